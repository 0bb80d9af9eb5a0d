"""Layouts of your own: a value, or a function whose arguments are options of the command.

choreo graph ppo jax:CartPole-v1 --layout examples/own_layouts.py:two_stage --workers 4
choreo train ppo jax:CartPole-v1 --layout examples/own_layouts.py:two_stage --workers 4
"""

import choreo


def two_stage(workers: int = 2, *, max_lag: int = 0) -> choreo.Layout:
    """Environments on many sites, inference on two, learning on one; parameters may be `max_lag` updates old."""
    return choreo.Layout(
        choreo.Group("env", replicas=workers),
        choreo.Group("actor", replicas=2),
        choreo.Group("buffer", "learner"),
        max_lag=max_lag,
    )


SPLIT_ACTOR = choreo.Layout(choreo.Group("env"), choreo.Group("actor"), choreo.Group("buffer", "learner"))
"""Three programs, one for each role: the plan shows all that they say to each other."""
