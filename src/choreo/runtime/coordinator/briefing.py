"""Makes everything that a worker needs to start: its environment variables, its briefing, and the programs of its sites."""

import os
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np

from choreo.errors import PartitionError
from choreo.partition.program import HostCall, walk
from choreo.plans.export import export_program
from choreo.runtime.coordinator.deployment import Deployment
from choreo.runtime.coordinator.silence import Silence
from choreo.runtime.engine.assemble import programs_of
from choreo.runtime.engine.xla_threads import XLA_THREADS, useful_threads


def pickled_programs(deployment: Deployment, worker: str) -> bytes:
    """The programs that a worker runs, pickled. Raises PartitionError if a Python environment cannot be pickled."""
    plan, groups = deployment.plan, deployment.groups(worker)
    init, iterate = (export_program(program, groups, plan.sites.replicas) for program in (plan.init, plan.iterate))
    try:
        return cloudpickle.dumps(programs_of(plan, init, iterate))
    except (TypeError, AttributeError, ValueError, NotImplementedError, OSError) as error:
        python = [step.name for step, _ in walk(iterate.steps) if isinstance(step, HostCall)]
        raise PartitionError(
            f"The programs of `{worker}` cannot be pickled: {error}",
            fix=f"Make everything that {', '.join(f'`{n}`' for n in python) or 'it'} holds picklable: create files, locks and "
            "windows inside the factory, not outside. Or use `--runtime inprocess`.",
        ) from error


def environment_variables(deployment: Deployment, worker: str) -> dict[str, str]:
    """The environment variables of a worker. Some of them limit the worker's threads to its share of the host's cores."""
    plan, host = deployment.plan, deployment.hosts[worker]
    cores = max(1, host.cpus // sum(other == host for other in deployment.hosts.values()))
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(cores))
    limits |= dict.fromkeys(XLA_THREADS, str(useful_threads(plan, cores)))
    platforms = {plan.platform(group) for group in deployment.groups(worker)}
    chosen = {"JAX_PLATFORMS": ",".join(sorted(p for p in platforms if p))} if None not in platforms else {}
    # Several workers may share an accelerator, so no worker may reserve most of the accelerator's memory.
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    set_by_user = {name: os.environ[name] for name in (*limits, *shared) if name in os.environ}
    # Hide the warnings that JAX's coordination service prints about the options that `worker.py` sets.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"} if deployment.collective(worker) else {}
    return {**limits, **shared, **quiet, **set_by_user, **chosen, "PYTHONUNBUFFERED": "1"}


def briefing(
    deployment: Deployment,
    worker: str,
    links: list[list[Any]],
    *,
    introduction: bool,
    profile: bool,
    env_timeout_s: float,
    silence: Silence,
    secret: str,
) -> dict[str, Any]:
    """The header of the command `set_up`. The only array of this command holds the worker's pickled programs."""
    plan, groups = deployment.plan, deployment.groups(worker)
    return {
        "kind": "set_up",
        "name": worker,
        "process_of_site": [[*site, name] for site, name in deployment.process_of_site.items()],
        "links": links,
        "host": deployment.hosts[worker].address,
        "platforms": {g: plan.platform(g) for g in groups} if deployment.compiles(worker) else None,
        "introduction": introduction,
        "collective": deployment.collective(worker),
        "num_devices": {g.name: g.devices for g in plan.layout.groups if g.name in groups and g.devices > 1},
        "x64": jnp.result_type(float) == np.float64,
        "prng": str(jax.random.key_impl(jax.random.key(0))),
        "profile": profile,
        "env_timeout_s": env_timeout_s,
        "silence_s": silence.connection_s,
        "collective_silence_s": silence.collective_s,
        "secret": secret,
    }
