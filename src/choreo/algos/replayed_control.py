"""The loop of algorithms that learn control of continuous actions from replay: DDPG, TD3 and SAC.

    iterate:   draw -> learn: update, update, ...      from stored steps
               act, step, act, step, ... -> add        at the same time, with the parameters from before the iteration

Each algorithm of the family defines how a policy acts (`choose`), the initial state of learning (`start`), and how one batch
changes this state (`update`). The network (`choreo.networks.deterministic`, `squashed`) has a `policy`, which is all that acting
needs, and `critics`, which give values to actions. Until the first update, actions are drawn uniformly from the action space.
"""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from choreo import networks
from choreo.buffers import Replay, ReplayState, StoredStep
from choreo.buffers.sharded import Batches, add, draw, init_replay, make_replay, num_updates, step_types
from choreo.envs.base import Env
from choreo.errors import AlgorithmError
from choreo.loops import Position, begin, rollout
from choreo.roles import all_reduce, fragment
from choreo.types import Key, PyTree

Metrics = dict[str, jax.Array]


class Params(NamedTuple):
    """The values that `act` needs to choose an action."""

    policy: PyTree
    """The module, frozen: every leaf is an array."""
    updates: jax.Array
    """Number of updates done; before the first update, actions are uniform."""


class Network(NamedTuple):
    """The two parts of a network, frozen: every leaf is an array."""

    policy: PyTree
    """A function obs -> action, or obs -> distribution over actions; its attribute `bounds` has the bounds of the action space."""
    critics: PyTree
    """A tuple of functions obs, action -> value."""


class Train(NamedTuple):
    """The state of learning."""

    learned: Any
    """Everything that gradients change; `learned.policy` is the policy."""
    target: PyTree
    """The target networks, which follow the learned parameters slowly."""
    optimizer: Any
    """State of the optimiser, or a tuple with the states of several optimisers."""
    updates: jax.Array
    """Number of updates done."""
    iterations: jax.Array
    """Number of iterations done, including those with too few stored steps to learn from."""


class Carry(NamedTuple):
    """The values that one iteration hands to the next."""

    train: Train
    """The state of learning."""
    replay: ReplayState
    """The stored steps."""
    position: Position
    """The environments."""


class Item(NamedTuple):
    """One transition from the replay."""

    obs: PyTree
    action: jax.Array
    reward: jax.Array
    discount: jax.Array
    """Discount of the value of `next_obs`: 0 where the episode terminated."""
    next_obs: PyTree
    weight: jax.Array
    """Weight in the loss of the critics. It is 0 where a time limit cut the episode, because the true successor is not stored."""


@dataclass(frozen=True, kw_only=True)
class ReplayedControl(abc.ABC):
    """The common fields and the loop of DDPG, TD3 and SAC."""

    learning_rate: float = 1e-3
    """Step size of the optimiser."""
    unroll: int = 1
    """Steps per environment and iteration."""
    updates_per_step: float = 1.0
    """Update-to-data ratio: gradient updates per environment step. Its product with unroll x environments must be an integer."""
    batch_size: int = 256
    """Items per update."""
    gamma: float = 0.99
    """Discount factor."""
    tau: float = 0.005
    """In each update, the target networks move this fraction of the way to the learned parameters; 1 copies the parameters."""
    capacity: int = 1_000_000
    """Steps that the replay holds."""
    min_size: int = 1_000
    """Steps that are stored before learning begins; until then actions are uniform."""
    buffer_shards: int = 1
    """Number of buffer shards; it changes the results. Each shard has its own environments and gives an equal part of a batch."""
    network: networks.Factory = networks.deterministic
    """Builds the network: (observation_space, action_space, key) -> module with `policy` and `critics`."""
    optimizer: Callable[[Any], optax.GradientTransformation] | None = None
    """Makes an optimiser from a learning rate; None: Adam."""

    @abc.abstractmethod
    def choose(self, policy: Any, obs: PyTree, key: Key | None) -> jax.Array:
        """The action of a policy in one environment: with exploration noise, or the best action if `key` is None."""

    @abc.abstractmethod
    def start(self, network: Network) -> tuple[Any, PyTree, Any]:
        """The fields `learned`, `target` and `optimizer` of `Train` before the first update."""

    @abc.abstractmethod
    def update(self, train: Train, steps: StoredStep, key: Key) -> tuple[Train, Metrics]:
        """Learn from a batch of stored windows [item, step, ...]; changes `learned`, `target` and `optimizer`."""

    def __post_init__(self):
        name = type(self).__name__
        for count in ("unroll", "batch_size"):
            if getattr(self, count) < 1:
                raise AlgorithmError(f"{name}({count}={getattr(self, count)}) must be at least 1.")
        if not 0 < self.updates_per_step < math.inf:
            raise AlgorithmError(f"{name}(updates_per_step={self.updates_per_step}) must be above 0, and finite.")
        if not 0 < self.tau <= 1:
            raise AlgorithmError(f"{name}(tau={self.tau}) must be above 0, and at most 1.", fix="Use tau=0.005.")
        self.replay(updates=1)  # raises AlgorithmError if the sizes do not fit together

    def replay(self, updates: int) -> Replay:
        """The replay of one buffer shard. One draw gives `updates` batches; an item is a window of two steps."""
        return make_replay(
            capacity=self.capacity, unroll=self.unroll, length=2, updates=updates,
            batch_size=self.batch_size, min_size=self.min_size, shards=self.buffer_shards,
        )  # fmt: skip

    def init(self, env: Env, key: Key) -> Carry:
        key_network, key_env = jax.random.split(key)
        module = networks.freeze(self.network(env.observation_space, env.action_space, key_network))
        zero = jnp.zeros((), jnp.int32)
        train = Train(*self.start(Network(module.policy, module.critics)), zero, zero)
        step = step_types(env, self.act, self.policy(train))
        updates = num_updates(self.updates_per_step, self.unroll, env)
        replay = init_replay(self.replay(updates), step, env.num_envs, self.buffer_shards)
        return Carry(train, replay, begin(env, key_env))

    def policy(self, train: Train) -> Params:
        return Params(train.learned.policy, train.updates)

    @fragment("actor")
    def act(self, params: Params, obs: PyTree, key: Key, *, greedy: bool = False):
        """The action for one environment, and None: these algorithms have no extras to store in the replay."""
        policy = networks.thaw(params.policy)
        if greedy:
            return self.choose(policy, obs, None), None
        key_policy, key_uniform = jax.random.split(key)
        action = self.choose(policy, obs, key_policy)
        return jnp.where(params.updates > 0, action, policy.bounds.uniform(key_uniform)), None

    def iterate(self, env: Env, carry: Carry, key: Key) -> tuple[Carry, Metrics]:
        key_draw, key_learn, key_act = jax.random.split(key, 3)
        updates = num_updates(self.updates_per_step, self.unroll, env)
        buffer = self.replay(updates)
        replay, batches, _ = draw(buffer, carry.replay, key_draw, updates=updates, shards=self.buffer_shards)
        train, metrics = self.learn(carry.train, batches, key_learn)
        params = self.policy(carry.train)
        end, trajectory, episodes = rollout(env, self.act, params, carry.position, key_act, self.unroll)
        replay, stored = add(buffer, replay, trajectory, self.buffer_shards)
        return Carry(train, replay, end), {**episodes, **metrics, **stored}

    @fragment("learner")
    def learn(self, train: Train, batches: Batches, key: Key):
        """Do all updates of an iteration. While too few steps are stored, only the number of iterations changes."""

        def update(train: Train, now: tuple[StoredStep, Key]) -> tuple[Train, Metrics]:
            after, metrics = self.update(train, *now)
            return after._replace(updates=train.updates + 1), metrics

        keys = jax.random.split(key, len(batches.probability))
        after, metrics = jax.lax.scan(update, train, (batches.steps, keys))
        after = jax.tree.map(lambda new, old: jnp.where(batches.ready, new, old), after, train)
        metrics = {name: jnp.mean(x) for name, x in metrics.items()}
        metrics |= {"learned": batches.ready.astype(jnp.result_type(float))}
        return after._replace(iterations=train.iterations + 1), metrics

    def item(self, steps: StoredStep) -> Item:
        """The transition in a window of two stored steps."""
        obs, next_obs = (jax.tree.map(lambda x, i=i: x[i], steps.obs) for i in (0, 1))
        action, reward, discount, last = steps.action[0], steps.reward[0], steps.discount[0], steps.last[0]
        cut = last & (discount > 0)  # a time limit cut the episode: `next_obs` belongs to the next episode
        return Item(obs, action, reward, self.gamma * discount, next_obs, jnp.where(cut, 0.0, 1.0).astype(reward.dtype))

    def make_optimizer(self) -> optax.GradientTransformation:
        return (self.optimizer or optax.adam)(self.learning_rate)

    def descend(self, gradient: PyTree, params: PyTree, state: optax.OptState) -> tuple[PyTree, optax.OptState]:
        """Average a gradient over learner shards and do one optimiser step; returns the parameters and the optimiser state."""
        changes, state = self.make_optimizer().update(all_reduce(gradient), state, params)
        return optax.apply_updates(params, changes), state

    def follow(self, target: PyTree, params: PyTree) -> PyTree:
        """The target networks, moved by the fraction `tau` of the way to the parameters (Lillicrap et al. 2016, section 3)."""
        return jax.tree.map(lambda old, new: old + self.tau * (new - old), target, params)


def values(critics: PyTree, obs: PyTree, action: jax.Array) -> jax.Array:
    """The value of an action by each critic: [critic]."""
    # One critic after another: on a CPU, one batched product for all critics is slower.
    return jnp.stack([critic(obs, action) for critic in networks.thaw(critics)])


def noisy(policy: Any, obs: PyTree, key: Key | None, noise: float) -> jax.Array:
    """The action of a deterministic policy, plus normal noise unless `key` is None.

    `noise` is the standard deviation, in units of half the width of the action space.
    """
    action = policy(obs)
    if key is None:
        return action
    return policy.bounds.add(action, noise * jax.random.normal(key, (action.size,), action.dtype))


def mean_losses(losses: Callable[[StoredStep, Key], Metrics], steps: StoredStep, key: Key) -> Metrics:
    """The means of `losses` over a batch of windows [item, step, ...]; each item gets a different key."""
    metrics = jax.vmap(losses)(steps, jax.random.split(key, len(steps.reward)))
    return {name: jnp.mean(x) for name, x in metrics.items()}
