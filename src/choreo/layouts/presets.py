"""Well-known layouts. Each is a function of a few lines; users write their own layouts in the same way."""

import math
from collections.abc import Callable

from choreo.layouts.base import Group, Layout


def fused(*, devices: int = 1, shards: int | None = None) -> Layout:
    """Everything in one compiled program, on one or several devices (Anakin, PureJaxRL, WarpDrive; MSRL GPUOnly)."""
    group = Group("env", "actor", "buffer", "learner", devices=devices)
    return Layout(group, shards=shards or devices, name="fused")


def coarse(workers: int = 1, *, exact: bool = False, shards: int = 1, max_lag: int = 0, merge: str = "all") -> Layout:
    """Workers act and one site learns; trajectories cross once per iteration (Acme, IMPALA; MSRL SingleLearnerCoarse)."""
    groups = Group("env", "actor", replicas=workers), Group("buffer", "learner")
    return Layout(*groups, exact=exact, shards=shards, max_lag=max_lag, merge=merge, name="coarse")


def fine(workers: int = 1, *, exact: bool = False, shards: int = 1) -> Layout:
    """Workers step environments; one site acts and learns; data crosses at every step (SEED RL; MSRL SingleLearnerFine)."""
    groups = Group("env", replicas=workers), Group("actor", "buffer", "learner")
    return Layout(*groups, exact=exact, shards=shards, name="fine")


def multi_learner(workers: int = 2, *, shards: int | None = None) -> Layout:
    """Every worker acts and learns; gradients are averaged over workers (data parallel, DD-PPO; MSRL MultiLearner)."""
    group = Group("env", "actor", "buffer", "learner", replicas=workers)
    return Layout(group, shards=shards or workers, name="multi_learner")


def sebulba(workers: int = 2, learners: int = 2, *, shards: int | None = None, max_lag: int = 0) -> Layout:
    """Workers act; each learner learns from some workers; learners average gradients (Sebulba, Cleanba, IMPALA)."""
    groups = Group("env", "actor", replicas=workers), Group("buffer", "learner", replicas=learners)
    return Layout(*groups, shards=shards or math.lcm(workers, learners), max_lag=max_lag, name="sebulba")


def apex(workers: int = 2, buffers: int = 1, *, max_lag: int = 0) -> Layout:
    """Workers act; replay has separate sites; one site learns and sends priorities back (Ape-X, Reverb)."""
    groups = Group("env", "actor", replicas=workers), Group("buffer", replicas=buffers), Group("learner")
    return Layout(*groups, max_lag=max_lag, name="apex")


def per_agent(workers: int = 1) -> Layout:
    """Workers step environments; each agent acts and learns at a separate site (MAPPO; MSRL Environments)."""
    groups = Group("env", replicas=workers), Group("actor", "buffer", "learner", axis="agent")
    return Layout(*groups, name="per_agent")


def central(workers: int = 2, *, shards: int | None = None, max_lag: int = 0, merge: str = "all") -> Layout:
    """Workers act and compute gradients; one site applies them (parameter server; if relaxed, A3C; MSRL Central)."""
    groups = Group("env", "actor", "gradient", replicas=workers), Group("buffer", "learner", "update")
    shards = shards or (workers if merge == "all" else 1)
    return Layout(*groups, shards=shards, max_lag=max_lag, merge=merge, name="central")


PRESETS: dict[str, Callable[..., Layout]] = {
    "fused": fused,
    "coarse": coarse,
    "fine": fine,
    "multi_learner": multi_learner,
    "sebulba": sebulba,
    "central": central,
    "apex": apex,
    "per_agent": per_agent,
}


def impala(workers: int = 2, learners: int = 1, *, shards: int | None = None, max_lag: int = 4) -> Layout:
    """coarse --max-lag 4, or sebulba --max-lag 4 if --learners is 2 or more: workers read parameters up to 4 updates old."""
    if learners == 1:
        return coarse(workers, shards=shards or 1, max_lag=max_lag)
    return sebulba(workers, learners, shards=shards, max_lag=max_lag)


def a3c(workers: int = 2, *, max_lag: int | None = None) -> Layout:
    """central --merge any, with --max-lag twice the number of workers. Each worker's gradient is applied when it arrives."""
    return central(workers, max_lag=2 * workers if max_lag is None else max_lag, merge="any")


ALIASES: dict[str, Callable[..., Layout]] = {
    "anakin": fused,
    "pure_jax_rl": fused,
    "warp_drive": fused,
    "gpu_only": fused,
    "acme": coarse,
    "single_learner_coarse": coarse,
    "seed_rl": fine,
    "single_learner_fine": fine,
    "data_parallel": multi_learner,
    "dd_ppo": multi_learner,
    "cleanba": sebulba,
    "parameter_server": central,
    "environments": per_agent,
    "reverb": apex,
    "impala": impala,
    "a3c": a3c,
}
"""Names of known systems. Each stands for a preset, or for a preset with different defaults."""


def find(name: str) -> Callable[..., Layout] | None:
    """The preset or alias of this name; None if there is none. `SEED-RL`, `seed_rl` and `SeedRL` are the same name."""
    return {_spelling(known): make for known, make in (PRESETS | ALIASES).items()}.get(_spelling(name))


def _spelling(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
