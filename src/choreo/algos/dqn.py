"""Deep Q-learning (Mnih et al. 2015) and its variants, for Discrete actions.

    iterate:   draw -> learn -> priorities          from stored steps
               act, step, act, step, ... -> add     at the same time, with the parameters from before the iteration

Options turn DQN into double (van Hasselt 2016), dueling (Wang 2016), n-step or prioritized DQN (Schaul 2016), C51 (Bellemare
2017) or QR-DQN (Dabney 2018). Ape-X (Horgan 2018) is DQN under the layout `apex`, with a different epsilon in every environment
(`epsilon_spread`), priorities and several buffer shards.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from choreo import networks, ops
from choreo.buffers import Replay, ReplayState, StoredStep
from choreo.buffers.sharded import (
    Batches,
    add,
    draw,
    init_replay,
    make_replay,
    num_updates,
    step_types,
    update_priorities,
)
from choreo.envs.base import Env
from choreo.errors import AlgorithmError
from choreo.loops import Position, anneal, begin, count_steps, rollout
from choreo.roles import all_reduce, fragment
from choreo.types import Key, PyTree

FORBIDDEN = -1e9
"""The value of an action that the action mask forbids."""


class Params(NamedTuple):
    """The values that `act` needs to choose an action."""

    network: PyTree
    """The module, frozen: every leaf is an array."""
    start: jax.Array
    """The smallest action of the action space."""
    env_steps: jax.Array
    """Environment steps so far; epsilon depends on them."""


class Train(NamedTuple):
    """The state of learning."""

    params: Params
    """The values that `act` needs to choose an action."""
    target: PyTree
    """The target network: a copy of the network from some updates ago."""
    optimizer: optax.OptState
    """State of the optimiser."""
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


class Values(NamedTuple):
    """The output of the network for one observation."""

    q: jax.Array
    """The value of each action, FORBIDDEN where the mask forbids the action: [action]"""
    atoms: jax.Array
    """For each action, depending on `head`: its value, logits of the fixed values, or quantiles of the return: [action, atom]"""


class Item(NamedTuple):
    """The first step of a stored window, and its n-step return."""

    obs: PyTree
    action: jax.Array
    ret: ops.NStep
    next_obs: PyTree
    """Observation to bootstrap from."""


class Played(NamedTuple):
    """The actor's values at one step, from which `first_priority` computes the priority of a new item."""

    chosen: jax.Array
    """The value of the action taken."""
    best: jax.Array
    """The value of the best action."""


@dataclass(frozen=True, kw_only=True)
class DQN:
    """Deep Q-learning, with options for double, dueling, n-step, prioritized, C51 and QR; under the layout `apex` it is Ape-X."""

    learning_rate: float = 5e-4
    """Step size of the optimiser; falls to 0 over `total_steps`."""
    unroll: int = 4
    """Steps per environment and iteration."""
    updates_per_step: float = 0.25
    """Update-to-data ratio: gradient updates per environment step. Its product with unroll x environments must be an integer."""
    batch_size: int = 64
    """Items per update."""
    gamma: float = 0.99
    """Discount factor."""
    n_step: int = 3
    """Number of rewards in a return; after these rewards, the return bootstraps from a value."""
    double: bool = True
    """Double Q-learning: the network chooses the next action, and the target network gives its value."""
    dueling: bool = True
    """Use a network that computes the value of the state and the advantages of actions separately."""
    head: str = "mean"
    """What the network predicts about an action's return: "mean", "c51" (probabilities of fixed values) or "qr" (quantiles)."""
    atoms: int = 51
    """Number of fixed values or quantiles, with "c51" and "qr"."""
    value_range: tuple[float, float] = (0.0, 100.0)
    """The lowest and highest of the fixed values, with "c51"."""
    target_period: int = 200
    """Updates between two copies of the network to the target network. A copy is made only at the end of an iteration."""
    capacity: int = 100_000
    """Steps that the replay holds."""
    min_size: int = 1_000
    """Steps that are stored before learning begins."""
    prioritized: bool = False
    """Draw items by priority: the absolute temporal-difference error, computed when an item is stored and whenever it is drawn."""
    priority_exponent: float = 0.6
    """An item is drawn in proportion to its priority to this power; with 0, all items are equally likely."""
    importance_exponent: float = 0.4
    """How strongly the loss corrects for drawing by priority: 1 is the full correction, 0 is none."""
    buffer_shards: int = 1
    """Number of buffer shards; it changes the results. Each shard has its own environments and gives an equal part of a batch."""
    frame_stack: int = 1
    """Frames in an observation, along its last axis. If more than 1, the replay stores each frame only once."""
    epsilon: tuple[float, float] = (1.0, 0.05)
    """Probability of a random action, at the beginning and at the end of `epsilon_steps`."""
    epsilon_steps: int = 20_000
    """Environment steps over which epsilon falls from the first value to the second."""
    epsilon_spread: float = 0.0
    """Environment i of E uses epsilon ** (1 + epsilon_spread * i / (E - 1)). 0: the same in all environments; Ape-X has 7."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this norm."""
    total_steps: int | None = None
    """Environment steps of the whole run; None: the learning rate is constant."""
    network: networks.QFactory = networks.q_mlp
    """Builds the network: (observation_space, action_space, key, *, atoms, dueling) -> module."""
    optimizer: Callable[[Any], optax.GradientTransformation] | None = None
    """Makes an optimiser from a learning rate; None: Adam on gradients clipped to `max_grad_norm`."""

    def __post_init__(self):
        if min(self.unroll, self.n_step, self.target_period) < 1:
            raise AlgorithmError("DQN: unroll, n_step and target_period must be at least 1.")
        if not 0 < self.updates_per_step < math.inf:
            raise AlgorithmError(f"DQN(updates_per_step={self.updates_per_step}) must be above 0, and finite.")
        if self.head not in ("mean", "c51", "qr"):
            raise AlgorithmError(f"DQN(head={self.head!r}) is not known.", fix='Use "mean", "c51" or "qr".')
        if self.head == "c51" and self.value_range[0] >= self.value_range[1]:
            raise AlgorithmError(f"DQN(value_range={self.value_range}) is empty.", fix="Give the lowest return first.")
        self.replay(updates=1)  # raises AlgorithmError if the sizes do not fit together

    def replay(self, updates: int) -> Replay:
        """The replay of one buffer shard. One draw gives `updates` batches."""
        return make_replay(
            capacity=self.capacity, unroll=self.unroll, length=self.n_step + 1, updates=updates,
            batch_size=self.batch_size, min_size=self.min_size, shards=self.buffer_shards,
            prioritized=self.prioritized, exponent=self.priority_exponent, stack=self.frame_stack,
        )  # fmt: skip

    def init(self, env: Env, key: Key) -> Carry:
        key_network, key_env = jax.random.split(key)
        atoms = 1 if self.head == "mean" else self.atoms
        network = self.network(env.observation_space, env.action_space, key_network, atoms=atoms, dueling=self.dueling)
        start = jnp.asarray(getattr(env.action_space, "start", 0), jnp.int32)
        params = Params(networks.freeze(network), start, jnp.zeros((), jnp.result_type(float)))
        zero, optimizer = jnp.zeros((), jnp.int32), self.make_optimizer(self.learning_rate).init(params.network)
        train = Train(params, jax.tree.map(jnp.copy, params.network), optimizer, zero, zero)
        step = step_types(env, self.act, params)
        updates = num_updates(self.updates_per_step, self.unroll, env)
        replay = init_replay(self.replay(updates), step, env.num_envs, self.buffer_shards)
        return Carry(train, replay, begin(env, key_env))

    def policy(self, train: Train) -> Params:
        return train.params

    def with_policy(self, train: Train, params: Params) -> Train:
        """`train` with the weights of another run, for `--init-from`; the target network gets them too."""
        return train._replace(params=params, target=jax.tree.map(jnp.copy, params.network))

    @fragment("actor")
    def act(self, params: Params, obs: PyTree, key: Key, power: jax.Array | None = None, *, greedy: bool = False):
        """Return the action for one environment, and `Played` if the replay is prioritized (else None).

        With probability epsilon ** power the action is random. If `power` is None or `greedy` is True, the action is the best one.
        """
        q = self.values(params.network, obs).q
        best = jnp.argmax(q)
        action = best
        if power is not None and not greedy:
            epsilon = self.epsilon_at(params.env_steps) ** power
            allowed = (q > FORBIDDEN).astype(epsilon.dtype)
            chosen = jax.nn.one_hot(best, len(q), dtype=epsilon.dtype)
            action = jax.random.categorical(key, jnp.log((1 - epsilon) * chosen + epsilon * allowed / jnp.sum(allowed)))
        # The replay stores everything that `act` returns, so `act` returns `Played` only if the replay needs it.
        played = Played(q[action], q[best]) if self.prioritized else None
        return action.astype(jnp.int32) + params.start, played

    def iterate(self, env: Env, carry: Carry, key: Key) -> tuple[Carry, dict[str, jax.Array]]:
        key_draw, key_act = jax.random.split(key)
        updates = num_updates(self.updates_per_step, self.unroll, env)
        buffer = self.replay(updates)
        replay, batches, where = draw(buffer, carry.replay, key_draw, updates=updates, shards=self.buffer_shards)
        steps = count_steps(env.num_envs * self.unroll, jnp.result_type(float))
        train, priorities, metrics = self.learn(carry.train, batches, steps)
        end, trajectory, episodes = rollout(
            env,
            self.act,
            self.policy(carry.train),
            carry.position,
            key_act,
            self.unroll,
            each=self.powers(env.num_envs),
        )
        if self.prioritized:
            replay = update_priorities(buffer, replay, where, priorities)
        replay, stored = add(buffer, replay, trajectory, self.buffer_shards, self.first_priority)
        return Carry(train, replay, end), {**episodes, **metrics, **stored}

    def powers(self, num_envs: int) -> jax.Array:
        """The exponent `power` of epsilon in each environment: [env]."""
        place = jnp.arange(num_envs, dtype=jnp.result_type(float)) / max(num_envs - 1, 1)
        return 1 + self.epsilon_spread * place

    def epsilon_at(self, env_steps: jax.Array) -> jax.Array:
        """The probability of a random action after `env_steps` environment steps."""
        return jnp.asarray(optax.linear_schedule(*self.epsilon, transition_steps=self.epsilon_steps)(env_steps))

    @fragment("learner")
    def learn(self, train: Train, batches: Batches, num_steps: jax.Array):
        """Do all updates of an iteration; return the state of learning, new priorities [update, item] and metrics."""
        learning_rate = anneal(self.learning_rate, self.total_steps, train.iterations, num_steps)
        optimizer = self.make_optimizer(learning_rate)
        weights = self.importance(batches.probability)
        steps = batches.steps._replace(action=batches.steps.action - train.params.start)
        items = jax.vmap(jax.vmap(self.item))(steps)
        # The target network is constant through all updates, so one call computes its values for the successors of all items.
        beyond = jax.vmap(jax.vmap(self.values, (None, 0)), (None, 0))(train.target, items.next_obs)

        def update(learned: tuple[PyTree, optax.OptState], batch: tuple[Item, Values, jax.Array]):
            network, state = learned
            grads, each_item = jax.grad(self.loss, has_aux=True)(network, *batch)
            changes, state = optimizer.update(all_reduce(grads), state, network)
            return (optax.apply_updates(network, changes), state), each_item

        learned = train.params.network, train.optimizer
        (network, state), (losses, errors, q) = jax.lax.scan(update, learned, (items, beyond, weights))
        updates = train.updates + len(batches.probability)
        due = updates // self.target_period > train.updates // self.target_period
        target = jax.tree.map(lambda new, old: jnp.where(due, new, old), network, train.target)
        after = Train(train.params._replace(network=network), target, state, updates, train.iterations)
        after = jax.tree.map(lambda new, old: jnp.where(batches.ready, new, old), after, train)
        metrics = {"loss": jnp.mean(losses), "q": jnp.mean(q), "td_error": jnp.mean(jnp.abs(errors))}
        metrics |= {"learning_rate": learning_rate, "learned": batches.ready.astype(jnp.float32)}
        metrics |= {"epsilon": self.epsilon_at(train.params.env_steps)}
        iterations = train.iterations + 1
        params = after.params._replace(env_steps=iterations.astype(num_steps.dtype) * num_steps)
        return after._replace(iterations=iterations, params=params), jnp.abs(errors), metrics

    def item(self, steps: StoredStep) -> Item:
        """The item of a window of stored steps [step, ...]."""
        ret = ops.n_step(steps.reward, steps.discount, steps.last, self.gamma)
        obs, next_obs = (jax.tree.map(lambda x, at=at: x[at], steps.obs) for at in (0, ret.steps))
        return Item(obs, steps.action[0], ret, next_obs)

    def loss(self, network: PyTree, items: Item, beyond: Values, weight: jax.Array):
        """The mean loss of items [item, ...], and the loss, the error and the value of each item."""
        losses, errors, q = jax.vmap(self.item_loss, (None, 0, 0))(network, items, beyond)
        losses = weight * losses
        return jnp.mean(losses), (losses, errors, q)

    def item_loss(self, network: PyTree, item: Item, beyond: Values):
        """Loss, error and value of one item (Mnih et al. 2015, eq. 2). `beyond` is the target network's output for `next_obs`."""
        values, ret = self.values(network, item.obs), item.ret
        # Double Q-learning: van Hasselt et al. 2016, eq. 4.
        chooser = self.values(network, item.next_obs).q if self.double else beyond.q
        best = jnp.argmax(jax.lax.stop_gradient(chooser))
        wanted = ret.reward + ret.discount * beyond.q[best]
        q, atoms = _of(item.action, values.q), _of(item.action, values.atoms)
        error = wanted - q
        loss = self.head_loss(atoms, beyond.atoms[best], ret, error)
        return ret.weight * loss, ret.weight * jax.lax.stop_gradient(error), q

    def head_loss(self, atoms: jax.Array, beyond: jax.Array, ret: ops.NStep, error: jax.Array) -> jax.Array:
        """The loss of the atoms of one action; `beyond` are the atoms to bootstrap from."""
        if self.head == "c51":  # Bellemare et al. 2017, algorithm 1
            support = jnp.linspace(*self.value_range, self.atoms, dtype=atoms.dtype)
            wanted = ops.categorical_projection(ret.reward + ret.discount * support, jax.nn.softmax(beyond), support)
            return -jnp.sum(wanted * jax.nn.log_softmax(atoms))
        if self.head == "qr":  # Dabney et al. 2018, algorithm 1
            return ops.quantile_huber(atoms, ret.reward + ret.discount * beyond)
        # The squared error, not Huber's loss. Where errors are large, Huber's loss is linear, so it fits the median of the targets
        # and not their mean. Only the few items at which episodes end have low targets. They hardly change the median, so nothing
        # would stop the values from growing (docs/algorithms/dqn.md).
        return 0.5 * error**2

    def values(self, network: PyTree, obs: PyTree) -> Values:
        """The output of the network for one observation."""
        atoms = networks.thaw(network)(obs)
        if self.head == "c51":
            q = jax.nn.softmax(atoms) @ jnp.linspace(*self.value_range, self.atoms, dtype=atoms.dtype)
        else:
            q = jnp.mean(atoms, axis=-1)
        mask = networks.action_mask(obs)
        return Values(q if mask is None else jnp.where(mask, q, FORBIDDEN), atoms)

    def importance(self, probability: jax.Array) -> jax.Array:
        """Importance weights [update, item] (Schaul et al. 2016, section 3.4); the largest weight of each update is 1."""
        if not self.prioritized:
            return jnp.ones_like(probability)
        rarest = -all_reduce(-jnp.min(probability, axis=-1, keepdims=True), "max")
        return (jnp.maximum(probability, 1e-30) / jnp.maximum(rarest, 1e-30)) ** -self.importance_exponent

    def first_priority(self, steps: StoredStep) -> jax.Array:
        """The priority of a new item: its error, computed from the actor's values (Horgan et al. 2018, section 3)."""
        ret, played = ops.n_step(steps.reward, steps.discount, steps.last, self.gamma), steps.extras
        return ret.reward + ret.discount * played.best[ret.steps] - played.chosen[0]

    def make_optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        if self.optimizer is not None:
            return self.optimizer(learning_rate)
        return ops.clipped(optax.adam(learning_rate), self.max_grad_norm)


def _of(action: jax.Array, values: jax.Array) -> jax.Array:
    """`values[action]`, computed as a product with a one-hot vector, because the gradient of indexing would be a slow scatter."""
    chosen = jax.nn.one_hot(action, len(values), dtype=values.dtype)
    return jnp.sum(values * chosen.reshape(-1, *(1,) * (values.ndim - 1)), axis=0)
