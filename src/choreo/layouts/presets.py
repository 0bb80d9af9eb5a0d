"""The layouts people know, a few lines each; your own is written the same way."""

import math
from collections.abc import Callable

from choreo.layouts.base import Group, Layout


def fused(*, devices: int = 1, shards: int | None = None) -> Layout:
    """Everything in one compiled program, on one device or several (Anakin, PureJaxRL, WarpDrive, MSRL GPUOnly)."""
    group = Group("env", "actor", "buffer", "learner", devices=devices)
    return Layout(group, shards=shards or devices, name="fused")


def coarse(workers: int = 1, *, exact: bool = False, shards: int = 1, max_lag: int = 0, merge: str = "all") -> Layout:
    """Workers act in their own environments, one learner learns; trajectories cross once per iteration (Acme; relaxed IMPALA)."""
    groups = Group("env", "actor", replicas=workers), Group("buffer", "learner")
    return Layout(*groups, exact=exact, shards=shards, max_lag=max_lag, merge=merge, name="coarse")


def fine(workers: int = 1, *, exact: bool = False, shards: int = 1) -> Layout:
    """Workers step environments, one site infers for all of them and learns; every step crosses (SEED RL)."""
    groups = Group("env", replicas=workers), Group("actor", "buffer", "learner")
    return Layout(*groups, exact=exact, shards=shards, name="fine")


def multi_learner(workers: int = 2, *, shards: int | None = None) -> Layout:
    """Every worker acts and learns on its own shard, gradients are averaged over all of them (data parallel, DD-PPO)."""
    group = Group("env", "actor", "buffer", "learner", replicas=workers)
    return Layout(group, shards=shards or workers, name="multi_learner")


def sebulba(workers: int = 2, learners: int = 2, *, shards: int | None = None, max_lag: int = 0) -> Layout:
    """Workers act, each for one of several learners, whose gradients are averaged (Sebulba, Cleanba, IMPALA)."""
    groups = Group("env", "actor", replicas=workers), Group("buffer", "learner", replicas=learners)
    return Layout(*groups, shards=shards or math.lcm(workers, learners), max_lag=max_lag, name="sebulba")


def central(workers: int = 2, *, shards: int | None = None, max_lag: int = 0, merge: str = "all") -> Layout:
    """Workers act and compute gradients, one site applies them: a parameter server (with merge="any", A3C)."""
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
}
