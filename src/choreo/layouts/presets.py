"""The layouts people know, a few lines each; your own is written the same way."""

from collections.abc import Callable

from choreo.layouts.base import Group, Layout


def fused() -> Layout:
    """Everything in one compiled program (Anakin, PureJaxRL, WarpDrive)."""
    return Layout(Group("env", "actor", "buffer", "learner"), name="fused")


def coarse(workers: int = 1, *, exact: bool = False) -> Layout:
    """Workers act in their own environments, one learner learns; trajectories cross once per iteration (Acme)."""
    return Layout(Group("env", "actor", replicas=workers), Group("buffer", "learner"), exact=exact, name="coarse")


def fine(workers: int = 1, *, exact: bool = False) -> Layout:
    """Workers step environments, one site infers for all of them and learns; every step crosses (SEED RL)."""
    return Layout(Group("env", replicas=workers), Group("actor", "buffer", "learner"), exact=exact, name="fine")


PRESETS: dict[str, Callable[..., Layout]] = {"fused": fused, "coarse": coarse, "fine": fine}
