"""Plans that several test files use. Their layouts are made from all presets except `per_agent`, some with the options `exact`,
`max_lag`, `shards` or `devices`."""

import functools

from choreo.algos import A2C, DQN, PPO
from choreo.envs import make
from choreo.layouts import ALIASES, Group, Layout, apex, central, coarse, fine, fused, multi_learner, sebulba
from choreo.plans.build import plan_traced, trace_for
from choreo.plans.plan import Plan

ENV = make("jax:CartPole-v1", 12)
PPO_LAYOUTS = {
    "fused": fused(),
    "fused_2_devices": fused(devices=2, shards=4),
    "coarse_x1": coarse(1),
    "coarse_x2": coarse(2),
    "coarse_x2_exact": coarse(2, exact=True),
    "fine_x2": fine(2),
    "env_x2_actor_x3": Layout(Group("env", replicas=2, device="cpu"), Group("actor", replicas=3), Group("learner")),
    "coarse_x2_lag": coarse(2, max_lag=4),
    "multi_learner_x2": multi_learner(2, shards=4),
    "sebulba_x4_x2": sebulba(4, 2),
    "central_x2": central(2),
}
A2C_LAYOUTS = {"a2c_central_x2": central(2), "a2c_a3c_x2": ALIASES["a3c"](2)}
DQN_LAYOUTS = {"dqn_apex_x4_x2": apex(4, 2)}
LAYOUTS = PPO_LAYOUTS | A2C_LAYOUTS | DQN_LAYOUTS


@functools.cache
def planned(name: str) -> Plan:
    """The plan for the layout `LAYOUTS[name]`."""
    algo, layout = _algorithm(name), LAYOUTS[name]
    traced = _traced(algo, layout.shards, layout.num_workers)
    return plan_traced(traced, layout, title=f"{type(algo).__name__} on {ENV.name}")


def _algorithm(name: str):
    if name in DQN_LAYOUTS:
        return DQN(prioritized=True, buffer_shards=2)
    return A2C(unroll=16) if name in A2C_LAYOUTS else PPO(unroll=16, minibatch_size=24)


@functools.cache
def _traced(algo, shards: int, num_workers: int):
    """The traced algorithm. Layouts with the same numbers of shards and workers share one trace."""
    layouts = [layout for name, layout in LAYOUTS.items() if _algorithm(name) == algo]
    alike = [layout for layout in layouts if (layout.shards, layout.num_workers) == (shards, num_workers)]
    return trace_for(algo, ENV, alike[0])
