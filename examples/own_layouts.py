"""Two layouts of your own: a function, whose parameters become options of the command, and a value.

choreo graph ppo jax:CartPole-v1 --layout examples/own_layouts.py:two_stage --workers 4
choreo train ppo jax:CartPole-v1 --layout examples/own_layouts.py:two_stage --workers 4
"""

import choreo


def two_stage(workers: int = 2, *, max_lag: int = 0) -> choreo.Layout:
    """Environments at many sites, inference at two, learning at one; parameters may be up to `max_lag` updates old."""
    return choreo.Layout(
        choreo.Group("env", replicas=workers),
        choreo.Group("actor", replicas=2),
        choreo.Group("buffer", "learner"),
        max_lag=max_lag,
    )


SPLIT_ACTOR = choreo.Layout(choreo.Group("env"), choreo.Group("actor"), choreo.Group("buffer", "learner"))
"""Three sites: one steps environments, one acts, one stores and learns. The plan shows every value that crosses between them."""
