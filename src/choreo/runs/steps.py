"""How many environment steps an iteration takes, and what counts as a step of a run.

A step is an environment step. In a run whose iterations take no environment steps, such as offline training, a step is an
iteration. The argument `steps` of `train`, `total_steps` and steps per second all use this meaning of the word. The column
`env_steps` of the metrics always counts environment steps, so this column is 0 in a run without environment steps.
"""

import operator
from collections.abc import Mapping
from typing import Any

from choreo.errors import AlgorithmError

FORM = "`steps_per_iteration(env) -> int`"
"""The optional method of an algorithm that says how many environment steps an iteration takes, in all environments together."""


def env_steps_per_iteration(algo: Any, env: Any) -> int:
    """The environment steps that one iteration takes in all environments together.

    If the algorithm has a method `steps_per_iteration`, the result is `algo.steps_per_iteration(env)`. If not, it is `unroll` times
    the number of environments.
    """
    name = type(algo).__name__
    method: Any = getattr(algo, "steps_per_iteration", None)
    if method is None:
        return algo.unroll * env.num_envs
    if not callable(method):
        raise AlgorithmError(f"`{name}.steps_per_iteration` is not a method.", fix=f"Write it as {FORM}.")
    answer: Any = method(env)
    try:
        steps = operator.index(answer)
    except TypeError:
        steps = -1
    if steps < 0 or isinstance(answer, bool):
        raise AlgorithmError(
            f"`{name}.steps_per_iteration` returns {answer!r}, which is not a number of steps.",
            fix="Return a whole number of environment steps; 0 if an iteration takes none, as in offline training.",
        )
    return steps


def steps_of(row: Mapping[str, float | int]) -> int:
    """The steps of a run from its beginning to the end of one iteration. `row`: the metrics of this iteration."""
    return int(row["env_steps"]) or int(row["iteration"]) + 1


def has_steps(algo: Any) -> bool:
    """Whether an algorithm says how many environment steps an iteration takes: by a method, or by `unroll`."""
    return hasattr(algo, "unroll") or hasattr(algo, "steps_per_iteration")
