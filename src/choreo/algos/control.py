"""What algorithms for continuous actions have in common, as plain functions: acting at first, one item, one step.

    uniform actions, until the first update  ->  replay  ->  items (obs, action, reward, discount, next_obs)
    descend(optimizer, ...)                  ->  parameters, one step later
    follow(target, parameters, tau)          ->  targets, a little nearer

A network for them has a `policy`, which is all that acting needs, and `critics` of actions (`choreo.networks.control`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import source_info_util

from choreo import networks, ops
from choreo.algos.off_policy import Batches
from choreo.buffers import StoredStep
from choreo.envs.base import Env
from choreo.errors import AlgorithmError
from choreo.types import Key, PyTree

source_info_util.register_exclusion(__file__)


class Params(NamedTuple):
    """What acting needs."""

    policy: PyTree
    """The module, frozen: every leaf an array."""
    updates: jax.Array
    """How many were done; before the first one, actions are drawn uniformly."""


class Network(NamedTuple):
    """The two parts of a network, frozen: every leaf an array."""

    policy: PyTree
    """obs -> action, or a distribution over actions; with `bounds` of the action space."""
    critics: PyTree
    """A tuple; each is obs, action -> value."""


class Item(NamedTuple):
    """One step out of the replay."""

    obs: PyTree
    action: jax.Array
    reward: jax.Array
    discount: jax.Array
    """Of the value of what came next: 0 where the episode terminated."""
    next_obs: PyTree
    weight: jax.Array
    """1; but 0 where a time limit cut the episode, and what came next was not stored."""


def init_network(factory: networks.Factory, env: Env, key: Key) -> Network:
    module = networks.freeze(factory(env.observation_space, env.action_space, key))
    return Network(module.policy, module.critics)


def values(critics: PyTree, obs: PyTree, action: jax.Array) -> jax.Array:
    """What each critic says of an action: [critic]."""
    # One after another: as one product with an axis for the critics, they are slower on a CPU.
    return jnp.stack([critic(obs, action) for critic in networks.thaw(critics)])


def item_of(steps: StoredStep, gamma: float) -> Item:
    """From a window of two steps."""
    ret = ops.n_step(steps.reward, steps.discount, steps.last, gamma)
    obs, next_obs = (jax.tree.map(lambda x, i=i: x[i], steps.obs) for i in (0, 1))
    return Item(obs, steps.action[0], ret.reward, ret.discount, next_obs, ret.weight)


def act(params: Params, obs: PyTree, key: Key, *, noise: float | None) -> jax.Array:
    """What a deterministic policy does in one environment, with `noise` in units of half the width of the space, or none."""
    policy = networks.thaw(params.policy)
    action = policy(obs)
    if noise is None:
        return action
    key_noise, key_any = jax.random.split(key)
    noisy = policy.bounds.add(action, noise * jax.random.normal(key_noise, (action.size,), action.dtype))
    return explore(params, noisy, policy.bounds.uniform(key_any))


def explore(params: Params, action: jax.Array, any_action: jax.Array) -> jax.Array:
    """Until something was learned, any action will do."""
    return jnp.where(params.updates > 0, action, any_action)


def learn(
    update: Callable[[Any, tuple[StoredStep, Key]], tuple[Any, dict[str, jax.Array]]],
    train: Any,
    batches: Batches,
    key: Key,
) -> tuple[Any, dict[str, jax.Array]]:
    """One `update` after another; while too little is stored, nothing but the number of iterations changes."""
    keys = jax.random.split(key, len(batches.probability))
    after, metrics = jax.lax.scan(update, train, (batches.steps, keys))
    after = jax.tree.map(lambda new, old: jnp.where(batches.ready, new, old), after, train)
    metrics = {name: jnp.mean(x) for name, x in metrics.items()}
    return after._replace(iterations=train.iterations + 1), metrics | {
        "learned": batches.ready.astype(jnp.result_type(float))
    }


def descend(
    optimizer: optax.GradientTransformation, gradient: PyTree, params: PyTree, state: optax.OptState
) -> tuple[PyTree, optax.OptState]:
    """One step of the optimiser: -> parameters, its state."""
    changes, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, changes), state


def follow(target: PyTree, params: PyTree, tau: float) -> PyTree:
    """Targets that follow parameters slowly: the fraction `tau` of the way (Lillicrap et al. 2016, section 3)."""
    return jax.tree.map(lambda old, new: old + tau * (new - old), target, params)


def check_counts(algo: Any) -> None:
    """Refuse counts below 1, and fractions that are none; a replay that does not fit refuses itself."""
    name = type(algo).__name__
    for count in ("unroll", "updates", "batch_size"):
        if getattr(algo, count) < 1:
            raise AlgorithmError(f"{name}({count}={getattr(algo, count)}) must be at least 1.")
    if not 0 < algo.tau <= 1:
        raise AlgorithmError(f"{name}(tau={algo.tau}) must be above 0, and at most 1.", fix="Use tau=0.005.")
    _ = algo.replay
