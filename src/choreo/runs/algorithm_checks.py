"""Checks of an algorithm's carry, metrics and actions. `train`, `plan` and `check_algorithm` call them.

All checks use traced shapes and types: nothing is computed, and no environment is made.
"""

from collections.abc import Collection, Mapping
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from choreo.errors import AlgorithmError
from choreo.host import spaces
from choreo.partition.carry import form_of, types_of, with_leaves
from choreo.roles import Reduction
from choreo.runs.episode_returns import EPISODES
from choreo.runs.evaluation import initial_state
from choreo.types import PyTree

RESERVED = ("iteration", "env_steps", "seconds", "train_return", "eval_return", "lag_mean", "lag_max")
"""Names of the numbers that a run adds to its rows. Metrics of an algorithm must not have these names."""
NEEDED_REDUCTIONS = {"episodes": Reduction("sum"), "episode_return": Reduction("mean", "episodes")}
"""How the metrics from which `train_return` is computed must be reduced over the learner shards."""


def check_parts(algo: Any, env: Any) -> None:
    """Refuse an algorithm whose `init`, `policy` or `act` does not work on `env`. `iterate` is not traced."""
    form = form_of(lambda key: algo.init(env, key), jax.eval_shape(lambda: jax.random.key(0)))
    check_carry(algo, form)
    check_acts(algo, env, form.train)


def check_carry(algo: Any, carry: PyTree) -> None:
    """Refuse a carry without the field `train`."""
    if not hasattr(carry, "train"):
        raise AlgorithmError(
            f"`{type(algo).__name__}.init` returns a {type(carry).__name__} without `train`.",
            fix="Return a NamedTuple (or another pytree) whose field `train` holds everything learned.",
        )


def check_metrics(algo: Any, metrics: Mapping[str, Any]) -> None:
    """Refuse metrics that are not real scalars or that have a reserved name.

    Also refuse `episodes` without `episode_return`, and `episode_return` without `episodes`: `train_return` is computed from
    both. `metrics` maps the name of each metric to its traced type.
    """
    name = type(algo).__name__
    check_metric_names(algo, metrics)
    for metric, value in metrics.items():
        if value.shape != ():
            raise AlgorithmError(
                f"The metric `{metric}` of `{name}` has shape {list(value.shape)}.",
                fix="A metric is one number per iteration: take the mean, or return each element under a separate name.",
            )
        if not any(jnp.issubdtype(value.dtype, kind) for kind in (np.bool_, np.integer, np.floating)):
            raise AlgorithmError(
                f"The metric `{metric}` of `{name}` is {value.dtype}, which is not a real number.",
                fix="Return its real and imaginary parts, or its absolute value, under separate names.",
            )
    missing = [metric for metric in EPISODES if metric not in metrics]
    if len(missing) == 1:
        (given,) = set(EPISODES) - set(missing)
        raise AlgorithmError(
            f"`{name}.iterate` returns a metric `{given}`, but no metric `{missing[0]}`.",
            fix="Return both or neither. choreo.rollout returns the metrics of episodes; see also docs/your-own-algorithm.md.",
        )


def check_reductions(algo: Any, reductions: Mapping[str, Reduction]) -> None:
    """Refuse metrics whose reduction over the learner shards is not the one that `train_return` needs."""
    for metric, needed in NEEDED_REDUCTIONS.items():
        if metric in reductions and reductions[metric] != needed:
            declared = f'weight="{needed.weight}"' if needed.weight else f'reduce="{needed.op}"'
            raise AlgorithmError(
                f"`{type(algo).__name__}.iterate` returns `{metric}` without saying how the numbers of several learners become "
                "one.",
                fix=f'Return {{"{metric}": choreo.metric(x, {declared})}}; choreo.rollout does so for the metrics of episodes.',
            )


def check_metric_names(algo: Any, names: Collection[str]) -> None:
    """Refuse reserved names: a run writes its own numbers into the row under these names."""
    for name in names:
        if name in RESERVED:
            raise AlgorithmError(
                f"`{type(algo).__name__}.iterate` returns a metric `{name}`, which a run writes itself.",
                fix=f"Give it a different name. These names are reserved: {', '.join(RESERVED)}.",
            )


def check_acts(algo: Any, env: Any, train: PyTree) -> None:
    """Refuse an `act` whose result is not an action of the action space; `train` is the form of the train state."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = jax.eval_shape(lambda key: env.reset(env.keys(key))[1], key)
    obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)

    def actions(leaves, obs, key):
        params = algo.policy(with_leaves(train, leaves))
        return [_act(algo, params, obs, key, greedy=greedy) for greedy in (False, True)]

    for action in jax.eval_shape(actions, types_of(train), obs, key):
        check_action(type(algo).__name__, action, env.action_space)


def _act(algo: Any, params: PyTree, obs: PyTree, key: Any, *, greedy: bool) -> PyTree:
    state = initial_state(algo, params)
    memory = () if state is None else (state,)
    out = algo.act(params, obs, key, *memory, greedy=greedy)
    if not isinstance(out, tuple) or len(out) != 2 + len(memory):
        what = "(action, extras, memory)" if memory else "(action, extras)"
        raise AlgorithmError(
            f"`{type(algo).__name__}.act` does not return {what}.",
            fix=f"Write it as act(params, obs, key{', memory=None' * len(memory)}, *, greedy=False) -> {what}.",
        )
    return out[0]


def check_action(name: str, action: PyTree, space: gymnasium.Space) -> None:
    """Refuse an action of one environment whose shapes or kinds of numbers are not those of the action space."""
    declared = [leaf for _, leaf in spaces.leaves(space, what="The action")]
    given = jax.tree.leaves(action)
    fits = len(given) == len(declared) and all(_fits(x, leaf) for x, leaf in zip(given, declared, strict=True))
    if not fits:
        said = ", ".join(f"{x.dtype}{list(x.shape)}" for x in map(jax.typeof, given))
        raise AlgorithmError(
            f"`{name}.act` returns an action {said} for one environment, but actions are {space}.",
            fix="`act` is for one environment; `iterate` vmaps it. Actions of a Discrete space are integers, as from jnp.argmax; "
            "those of a Box are floats.",
        )


def _fits(action: Any, space: gymnasium.Space) -> bool:
    kinds: tuple[type, ...] = (np.integer,)
    if isinstance(space, gymnasium.spaces.Box):
        kinds = (np.floating,) if jnp.issubdtype(space.dtype, np.floating) else (np.integer, np.floating)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        kinds = (np.integer, np.bool_)
    aval = jax.typeof(action)
    return aval.shape == (space.shape or ()) and any(jnp.issubdtype(aval.dtype, kind) for kind in kinds)
