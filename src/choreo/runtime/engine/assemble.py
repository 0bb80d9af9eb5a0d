"""Makes the programs and keys that a process needs to run a plan. Splits the carry over the sites, and joins it again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from choreo.partition.program import Program, Segment
from choreo.plans.plan import Plan
from choreo.runtime.engine.backend import Site
from choreo.runtime.engine.blocks import block
from choreo.runtime.engine.execution import Programs
from choreo.runtime.engine.jax_backend import join
from choreo.types import Key, PyTree


def programs_of(plan: Plan, init: Program, iterate: Program) -> Programs:
    """Everything that a process needs to run a plan. `init` and `iterate` are the plan's programs, or exported copies of them."""
    single = iterate.steps[0] if plan.single else None
    assert single is None or isinstance(single, Segment)
    return Programs(
        init=init, iterate=iterate, num_carry=plan.num_carry, carry_axes=plan.carry_axes, shards=plan.shards,
        max_lag=plan.layout.max_lag, num_workers=plan.num_workers, learner=plan.sites.default, single=single,
    )  # fmt: skip


def split_key(key: Key) -> tuple[np.ndarray, np.ndarray]:
    """Split a key into the key of `init` and the key of the iterations. Returns the key data of both."""
    init_key, run_key = jax.random.split(key)
    return np.asarray(jax.random.key_data(init_key)), np.asarray(jax.random.key_data(run_key))


def join_carry(plan: Plan, parts_of: dict[Site, list[Any]]) -> list[Any]:
    """Join the parts of the carry that the sites hold. Returns the leaves of the whole carry."""
    whole = []
    for i, port in enumerate(plan.iterate.ins[: plan.num_carry]):
        group, (_, axis) = next(iter(port.held.items()))
        parts = [jnp.asarray(parts_of[group, r][i]) for r in range(plan.replicas(group))]
        (device, *_) = parts[0].devices()
        whole.append(join([jax.device_put(part, device) for part in parts], axis))
    return whole


def split_carry(plan: Plan, carry: PyTree) -> dict[Site, list[Any]]:
    """Split a carry: return for each site its part of every leaf, or None for a leaf that the site does not hold."""
    whole, ports = plan.leaves(carry), plan.iterate.ins[: plan.num_carry]
    return {
        (group, r): [
            block(leaf, port.held[group][1], r, plan.replicas(group)) if group in port.held else None
            for leaf, port in zip(whole, ports, strict=True)
        ]
        for group, r in plan.all_sites
    }
