"""Choreo: an RL algorithm is written once, as plain JAX; a layout decides where it runs.

Public names are imported when they are first used, so that `choreo --help` does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from choreo import (
        algos as algos,
        envs as envs,
        layouts as layouts,
        networks as networks,
        ops as ops,
        testing as testing,
    )
    from choreo.algos.ppo import PPO as PPO
    from choreo.algos.a2c import A2C as A2C
    from choreo.algos.impala import IMPALA as IMPALA
    from choreo.algos.reinforce import REINFORCE as REINFORCE
    from choreo.algos.dqn import DQN as DQN
    from choreo.algos.ddpg import DDPG as DDPG
    from choreo.algos.td3 import TD3 as TD3
    from choreo.algos.sac import SAC as SAC
    from choreo.layouts import (
        Group as Group,
        Layout as Layout,
        apex as apex,
        central as central,
        coarse as coarse,
        fine as fine,
        fused as fused,
        multi_learner as multi_learner,
        per_agent as per_agent,
        sebulba as sebulba,
    )
    from choreo.plans.costs import Rates as Rates
    from choreo.loops import minibatches as minibatches, rollout as rollout
    from choreo.roles import (
        all_reduce as all_reduce,
        fragment as fragment,
        host_fragment as host_fragment,
        host_method as host_method,
        metric as metric,
    )
    from choreo.runs.events import (
        BoundaryReached as BoundaryReached,
        CheckpointSaved as CheckpointSaved,
        EvaluationDone as EvaluationDone,
        Event as Event,
        IterationDone as IterationDone,
        RunBegan as RunBegan,
        RunEnded as RunEnded,
        Subscriber as Subscriber,
        WarningGiven as WarningGiven,
        WorkerOutput as WorkerOutput,
        WorkerStates as WorkerStates,
    )
    from choreo.runs.training import load as load, plan as plan, replay as replay, resume as resume, train as train

_NAMES_BY_MODULE = {
    "choreo.roles": ("fragment", "host_fragment", "host_method", "all_reduce", "metric"),
    "choreo.loops": ("rollout", "minibatches"),
    "choreo.algos.ppo": ("PPO",),
    "choreo.algos.a2c": ("A2C",),
    "choreo.algos.impala": ("IMPALA",),
    "choreo.algos.reinforce": ("REINFORCE",),
    "choreo.algos.dqn": ("DQN",),
    "choreo.algos.ddpg": ("DDPG",),
    "choreo.algos.td3": ("TD3",),
    "choreo.algos.sac": ("SAC",),
    "choreo.layouts": (
        "Layout",
        "Group",
        "fused",
        "coarse",
        "fine",
        "multi_learner",
        "sebulba",
        "central",
        "apex",
        "per_agent",
    ),
    "choreo.runs.events": (
        "Event",
        "Subscriber",
        "RunBegan",
        "IterationDone",
        "EvaluationDone",
        "BoundaryReached",
        "CheckpointSaved",
        "WorkerStates",
        "WorkerOutput",
        "WarningGiven",
        "RunEnded",
    ),
    "choreo.plans.costs": ("Rates",),
    "choreo.runs.training": ("train", "resume", "replay", "load", "plan"),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
_SUBMODULES = ("algos", "envs", "layouts", "networks", "ops", "testing")
__all__ = [*_MODULE_OF, *_SUBMODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"choreo.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module `choreo` has no attribute `{name}`")
    return globals().setdefault(name, getattr(importlib.import_module(_MODULE_OF[name]), name))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
