"""What actor-critics have in common, as plain functions: their state, the network along a trajectory, one step.

    init_params, init_position, init_train  ->  Carry(Train(params, optimizer, iterations), position)
    predict(params, trajectory, memory)     ->  pi, value_tm1, value_t   [time, env]
    descend(train, gradient, ...)           ->  Train, one iteration later

A network with memory is unfolded along whole sequences, from the memory it had before the first step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import optax
from jax.extend import source_info_util

from choreo import networks, ops
from choreo.envs.base import Env
from choreo.errors import AlgorithmError
from choreo.loops import Position, Transition, select
from choreo.roles import all_reduce
from choreo.types import Key, PyTree

source_info_util.register_exclusion(__file__)

MakeOptimizer = Callable[[Any], optax.GradientTransformation]
"""From a learning rate to an optimiser."""


class Params(NamedTuple):
    """What acting needs."""

    network: PyTree
    """The module, frozen: every leaf an array."""
    moments: PyTree
    """`ops.Moments` of each part of an observation, None for parts that are not normalised."""


class Train(NamedTuple):
    """Everything learned."""

    params: Params
    """What acting needs."""
    optimizer: optax.OptState
    """State of the optimiser."""
    iterations: jax.Array
    """How many have been done; the learning rate follows it."""


class Carry(NamedTuple):
    """What one iteration hands to the next."""

    train: Train
    """Everything learned."""
    position: Position
    """Where the environments stand."""


class Predictions(NamedTuple):
    """The network along a trajectory: [time, env]."""

    pi: ops.Distribution
    """What it would do."""
    value_tm1: jax.Array
    """Of what was acted on."""
    value_t: jax.Array
    """Of its true successor."""


class Gradient(NamedTuple):
    """What one trajectory says about how to change; averaged over learner shards before it is applied."""

    network: PyTree
    """The gradient of the loss."""
    seen: PyTree
    """`ops.Seen` of each part of an observation that is normalised."""


def init_params(network: networks.Factory, env: Env, key: Key, *, normalise_obs: bool) -> Params:
    frozen = networks.freeze(network(env.observation_space, env.action_space, key))
    return Params(frozen, initial_moments(env.observation_space) if normalise_obs else None)


def init_position(env: Env, params: Params, key: Key) -> Position:
    env_state, obs = env.reset(env.keys(key))
    memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (env.num_envs, *x.shape)), initial_state(params))
    return Position(env_state, obs, memory)


def init_train(params: Params, optimizer: optax.GradientTransformation) -> Train:
    return Train(params, optimizer.init(params.network), jnp.zeros((), jnp.int32))


def initial_state(params: Params) -> PyTree:
    """The memory an episode begins with, of one environment; None if the network has none."""
    network = networks.thaw(params.network)
    return network.initial_state() if isinstance(network, networks.Recurrent) else None


def act(params: Params, obs: PyTree, key: Key, memory: PyTree, *, greedy: bool):
    """One environment: -> action, what it was drawn from; and, if the network has one, its new memory."""
    pi, _, memory = apply(params, obs, memory)
    action = pi.mode() if greedy else pi.sample(key)
    return (action, pi) if memory is None else (action, pi, memory)


def predict(params: Params, trajectory: Transition, memory: PyTree) -> Predictions:
    """What the network says now about each step of a trajectory; no gradient flows through the value of a successor."""
    pi, value_tm1, memories = jax.vmap(unfold, (None, 1, 1, 0), 1)(params, trajectory.obs, trajectory.last, memory)
    each_step = jax.vmap(jax.vmap(apply, (None, 0, 0)), (None, 0, 0))
    _, value_t, _ = each_step(params, trajectory.next_obs, memories)
    return Predictions(pi, value_tm1, jax.lax.stop_gradient(value_t))


def unfold(params: Params, obs: PyTree, last: jax.Array, memory: PyTree):
    """The network along one sequence: pi [time], value [time], and the memory after each step [time]."""
    if memory is None:
        return jax.vmap(apply, (None, 0, None))(params, obs, None)
    fresh = initial_state(params)

    def step(memory, now):
        obs, last = now
        pi, value, memory = apply(params, obs, memory)
        return jax.tree.map(lambda new, old: select(last, new, old), fresh, memory), (pi, value, memory)

    return jax.lax.scan(step, memory, (obs, last))[1]


def apply(params: Params, obs: PyTree, memory: PyTree):
    """The network on one observation: pi, value, memory (None if it has none)."""
    obs = _each_part(lambda m, x: x if m is None else ops.normalise(m, x), params.moments, obs)
    network = networks.thaw(params.network)
    return (*network(obs), None) if memory is None else network(obs, memory)


def count_steps(per_step: jax.Array) -> jax.Array:
    """Environment steps of this iteration, on all shards together; `per_step` is any array [time, env]."""
    return all_reduce(jnp.full((), per_step.size, per_step.dtype), "sum")


def anneal(learning_rate: float, total_steps: int | None, iterations: jax.Array, steps: jax.Array) -> jax.Array:
    """The learning rate, falling linearly to 0 over the run, `steps` in each iteration; None: it stays."""
    initial = jnp.full((), learning_rate, steps.dtype)
    if total_steps is None:
        return initial
    done = iterations.astype(steps.dtype) * (steps / total_steps)
    return initial * jnp.maximum(1 - done, 0)


def descend(
    train: Train, gradient: Gradient, steps: jax.Array, optimizer: optax.GradientTransformation
) -> tuple[Train, dict[str, jax.Array]]:
    """One step of the optimiser, and the statistics of `steps` more observations; equal wherever its arguments are."""
    updates, opt_state = optimizer.update(gradient.network, train.optimizer, train.params.network)
    network = optax.apply_updates(train.params.network, updates)
    moments = _each_part(
        lambda m, seen: m if m is None else ops.merge_moments(m, seen, steps), train.params.moments, gradient.seen
    )
    metrics = {"grad_norm": optax.tree.norm(gradient.network)}
    return Train(Params(network, moments), opt_state, train.iterations + 1), metrics


def look(moments: PyTree, obs: PyTree) -> PyTree:
    """`ops.Seen` of each part of observations [time, env] that is normalised, None for others."""
    return _each_part(lambda m, x: m if m is None else ops.look(m, x), moments, obs)


def update_moments(moments: PyTree, obs: PyTree) -> PyTree:
    """The statistics of each part of an observation, with those of `obs` [time, env]; equal on all shards."""
    return _each_part(lambda m, x: m if m is None else ops.update_moments(m, x), moments, obs)


def initial_moments(space: gymnasium.Space) -> PyTree:
    """Statistics of nothing yet; refused where there is nothing to take them of."""
    moments = _moments(space)
    if not jax.tree.leaves(moments):
        raise AlgorithmError(
            f"normalise_obs needs observations in a Box, not in {space}.", fix="Leave normalise_obs off."
        )
    return moments


def _moments(space: gymnasium.Space) -> PyTree:
    """In the form of an observation: those of nothing for each Box, None for anything else."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: None if name == networks.ACTION_MASK else _moments(part) for name, part in space.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(map(_moments, space))
    return ops.Moments.of_nothing(space.shape) if isinstance(space, gymnasium.spaces.Box) else None


def _each_part(fn: Callable[[ops.Moments | None, Any], PyTree], moments: PyTree, obs: PyTree) -> PyTree:
    return jax.tree.map(fn, moments, obs, is_leaf=lambda m: m is None or isinstance(m, ops.Moments))
