"""The functions that a user calls: train an algorithm; resume, replay or load a run; plan.

    train            configuration from arguments, state from `init`      ──► drive (choreo.runs.drive) ──► Run
    resume, replay   configuration and state from a run folder            ──► drive                     ──► Run
    load             configuration, state and metrics from a run folder                                 ──► Run
    plan             algorithm, environment and layout; nothing is run                                  ──► Plan

Arguments and folders are checked here, before anything is compiled or written.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from choreo.envs.gymnasium import HostEnv
from choreo.errors import RunError
from choreo.plans import build
from choreo.plans.plan import Plan
from choreo.runs import algorithm_checks, checkpoint, jax_settings, resolve
from choreo.runs.config import InitFrom, RunConfig
from choreo.runs.drive import RunOptions, Start, Watchers, drive
from choreo.runs.events import OnIteration, Subscriber, check_subscribers
from choreo.runs.folder import RunFolder, free_folder
from choreo.runs.loggers import Logger, check_loggers
from choreo.runs.run import Run, Timing
from choreo.runs.warm_start import Weights
from choreo.runtime.compilation_cache import use_compilation_cache
from choreo.runtime.coordinator.cluster import Cluster
from choreo.runtime.coordinator.silence import Silence
from choreo.runtime.engine.schedule import VersionRead


def train(
    algo: Any,
    env: Any,
    *,
    steps: int,
    layout: Any = "fused",
    num_envs: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    runtime: str | None = None,
    cluster: Cluster | str | Path | None = None,
    env_timeout: float | int = 60.0,
    silence: float | int = 300.0,
    profile: bool = False,
    allow_versions: bool = False,
    same_bits: bool = False,
    trust_network: bool = False,
    eval_every: int | None = None,
    eval_episodes: int = 20,
    stop_at_return: float | int | None = None,
    checkpoint_every: int | None = None,
    init_from: str | Path | InitFrom | None = None,
    loggers: Sequence[str | Logger] = (),
    on_iteration: OnIteration | None = None,
    subscribers: Sequence[Subscriber] = (),
    progress: bool | None = None,
) -> Run:
    """Train `algo` on `env` for at least `steps` environment steps, rounded up to whole iterations.

    If the iterations of `algo` take no environment steps, `steps` counts iterations.

    `algo`, `env` and `layout` are values or names ("ppo", "my_ppo.py:MyPPO"; "jax:CartPole-v1"; "coarse").

    - `num_envs`: number of environments. By default 8; if `env` is a batch of environments, its own number.
    - `out`: the run folder, which must be new or empty. Without `out`, nothing is written; but if a logger is given by name, a
      new folder in `runs/` is used.
    - `eval_every`, `checkpoint_every`: in iterations.
    - `stop_at_return`: ends the run when an evaluation reaches this return. Without `eval_every`, the mean return of the last
      100 training episodes must reach it.
    - `init_from`: a run folder whose weights the run begins with; optimiser, counters and environments start anew.
    - `runtime`: "inprocess" runs all sites in this process, "local" in worker processes. None: worker processes if the plan
      needs several processes or if a cluster is given.
    - `cluster`: a Cluster, or the path of a `cluster.toml`; names the hosts of workers.
    - `env_timeout`: if an environment in a worker process does not return within this number of seconds, the worker ends the
      run; 0: no limit.
    - `silence`: if a worker process gives no sign of life for this number of seconds, the run ends. A silent worker is named
      after 10 s. A worker that computes for long, or waits, is not silent.
    - `profile`: records a timeline of each site's work, also as `trace.json` in the run folder (open it in Perfetto).
    - `allow_versions`: accepts hosts whose versions differ from those of this machine. By default they are refused.
    - `same_bits`: refuses hosts whose CPU or XLA_FLAGS differ from those of this machine. By default they give a warning.
    - `trust_network`: lets learners on different machines combine gradients without encryption. By default this is refused.
    - `loggers`: objects with `log(row)` and `close()`, or the name "tensorboard".
    - `on_iteration`: called as `on_iteration(iteration, row)` at each boundary, for each iteration since the previous boundary. If
      it returns True, the run ends at this boundary.
    - `subscribers`: functions that are called with every event of the run (choreo.runs.events).
    - `progress`: whether progress is shown; None: only in a terminal.

    JAX's settings are restored at the end, except for the number of CPU devices, which JAX cannot change after it started.
    Raises ChoreoError before anything is compiled if an argument is wrong.
    """
    with jax_settings.put_back():
        layout = resolve.layout(layout)
        jax_settings.prepare(layout)  # before importing the user's file, which may start JAX
        algo, env = resolve.algorithm(algo), resolve.environment(env, num_envs)
        jax_settings.prepare(layout, env)
        config = RunConfig(
            algo=algo,
            env=env,
            layout=layout,
            steps=steps,
            seed=seed,
            runtime=runtime,
            eval_every=eval_every,
            eval_episodes=eval_episodes,
            stop_at_return=stop_at_return,
            checkpoint_every=checkpoint_every,
        )
        if out is None and any(
            isinstance(logger, str) for logger in ([loggers] if isinstance(loggers, str) else loggers)
        ):
            out = free_folder(algo, env, seed)  # these loggers write into the run folder
        folder = None if out is None else RunFolder(out)
        if folder is not None:
            folder.check_new()
        watchers = _checked(loggers, on_iteration, subscribers, progress, folder)
        weights = None if init_from is None else Weights.read(config, init_from)
        if weights is not None:
            config = dataclasses.replace(config, init_from=weights.origin)
        start = Start(done=0, rows=[], carry=None, weights=weights)
        if cluster is not None and not isinstance(cluster, Cluster):
            cluster = Cluster.from_toml(cluster)
        options = RunOptions(
            env_timeout_s=float(env_timeout),
            silence=Silence(dead_s=float(silence)),
            profile=profile,
            cluster=cluster,
            allow_versions=allow_versions,
            same_bits=same_bits,
            trust_network=trust_network,
        )
        return drive(config, folder, start, options, watchers)


def plan(algo: Any, env: Any, layout: Any = "fused", *, num_envs: int | None = None) -> Plan:
    """The plan of `algo` on `env` in `layout`: sites, fragments, and the values that cross between sites.

    The arguments are values or names, as in `train`. The algorithm is only traced: nothing is compiled or started.
    """
    algo, env = resolve.algorithm(algo), resolve.environment(env, num_envs)
    algorithm_checks.check_parts(algo, env)
    the_plan = build.plan(algo, env, resolve.layout(layout))
    algorithm_checks.check_metric_names(algo, the_plan.metric_names)
    return the_plan


def resume(
    path: str | Path,
    *,
    steps: int | None = None,
    algo: Any = None,
    env: Any = None,
    trust: bool = False,
    loggers: Sequence[str | Logger] = (),
    on_iteration: OnIteration | None = None,
    subscribers: Sequence[Subscriber] = (),
    progress: bool | None = None,
) -> Run:
    """Continue a run from the last checkpoint in its folder. `steps` is by default the number that the run began with.

    The result is the same, bit for bit, as that of a run that was never interrupted. If `steps` differs from the number that
    the run began with, schedules (of the learning rate, for example) stretch to the new end. They do not stretch if the
    algorithm was given `total_steps`. Only runs with one site and with environments in JAX can be resumed. `algo`, `env` and
    `trust` mean the same as in `load`.
    """
    with jax_settings.put_back():
        folder = RunFolder(path)
        folder.check_run()
        folder.check_not_in_use()
        config = RunConfig.read(folder.config_file, algo=algo, env=env, trust=trust)
        jax_settings.prepare(config.layout, config.env)
        if isinstance(config.env, HostEnv):
            raise RunError(
                f"This run cannot be resumed: `{config.env.name}` is a Python environment, whose state is not in the checkpoint.",
                fix=f"Begin a new run with its weights: choreo train {folder.path}/run.toml --init-from {folder.path}",
            )
        if steps is not None:
            config = dataclasses.replace(config, steps=steps)
        watchers = _checked(loggers, on_iteration, subscribers, progress, folder)
        done = checkpoint.iteration(folder.checkpoint)
        if done >= config.iterations:
            raise RunError(
                f"{folder.path} is finished: {done} iterations, {done * config.steps_per_iteration:,} steps.",
                fix=f"Continue with `choreo resume {folder.path} --steps {2 * done * config.steps_per_iteration}`.",
            )
        start = Start(
            done=done,
            rows=folder.read_metrics(before=done),
            carry=checkpoint.load(folder.checkpoint, config.carry_structure()),
        )
        options = RunOptions()
        return drive(config, folder, start, options, watchers)


def replay(
    path: str | Path, *, algo: Any = None, env: Any = None, trust: bool = False, progress: bool | None = None
) -> Run:
    """Repeat the run in a folder, in this process, and return the new run; nothing is written.

    The result is the same, bit for bit. If workers read parameters that were out of date, the same versions are read again;
    the run's log (reads.jsonl) lists them. `algo`, `env` and `trust` mean the same as in `load`.
    """
    with jax_settings.put_back():
        folder = RunFolder(path)
        folder.check_run()
        config = RunConfig.read(folder.config_file, algo=algo, env=env, trust=trust)
        jax_settings.prepare(config.layout, config.env)
        log = [VersionRead(*read) for read in folder.read_log()]
        if config.layout.is_relaxed and not log:
            raise RunError(
                f"{folder.path} has no reads.jsonl, the log of the versions that were read.",
                fix="Restore it from a copy: without it, this run cannot be replayed.",
            )
        config = dataclasses.replace(config, runtime="inprocess")
        weights = None if config.init_from is None else Weights.read(config, config.init_from)
        start = Start(done=0, rows=[], carry=None, weights=weights)
        options = RunOptions(replay=log or None)
        last = checkpoint.iteration(folder.checkpoint) - 1  # a run may have ended early
        is_last = lambda iteration, _: iteration >= last  # noqa: E731
        return drive(config, None, start, options, Watchers(on_iteration=is_last, progress=progress))


def load(path: str | Path, *, algo: Any = None, env: Any = None, trust: bool = False) -> Run:
    """The run in a folder, at its last checkpoint.

    If run.toml names code (`my_ppo.py:MyPPO`), the code is run only if this account wrote the file, or with `trust=True`.
    `algo` and `env` replace those of run.toml; they are needed if run.toml could not describe them (a lambda).
    """
    with jax_settings.put_back():
        use_compilation_cache()
        folder = RunFolder(path)
        folder.check_run()
        config = RunConfig.read(folder.config_file, algo=algo, env=env, trust=trust)
        done = checkpoint.iteration(folder.checkpoint)
        train = checkpoint.load(folder.checkpoint, config.carry_structure(), part="train")
        rows = folder.read_metrics(before=done)
        return Run(config=config, train_state=train, rows=rows, timing=_read_timing(folder), path=folder.path)


def _checked(
    loggers: Sequence[str | Logger],
    on_iteration: OnIteration | None,
    subscribers: Sequence[Subscriber],
    progress: bool | None,
    folder: RunFolder | None,
) -> Watchers:
    """The `Watchers` of a run. Loggers and subscribers that could not be used are refused."""
    check_loggers(loggers, folder and folder.path)
    check_subscribers(subscribers)
    return Watchers(loggers=loggers, on_iteration=on_iteration, subscribers=subscribers, progress=progress)


def _read_timing(folder: RunFolder) -> Timing:
    """The timing of the last training that finished in this folder; NaN if none did."""
    known = folder.read_summary()
    numbers = {f.name: known.get(f.name) for f in dataclasses.fields(Timing)}
    return Timing(**{name: float(value) for name, value in numbers.items() if isinstance(value, int | float)})
