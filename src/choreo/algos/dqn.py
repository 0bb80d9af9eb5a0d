"""Deep Q-learning (Mnih et al. 2015) and what became of it, for Discrete actions.

    iterate:   draw -> learn -> priorities          from what is stored
               act, step, act, step, ... -> add     at the same time

Options make it double (van Hasselt 2016), dueling (Wang 2016), n-step, prioritized (Schaul 2016), C51 (Bellemare 2017) or
QR-DQN (Dabney 2018). With an epsilon for every environment (`epsilon_spread`), priorities and several buffer shards under the
layout `apex`, it is Ape-X (Horgan 2018): the same file.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from choreo import networks, ops
from choreo.algos import off_policy
from choreo.algos.actor_critic import MakeOptimizer, anneal
from choreo.algos.off_policy import Batches, Carry
from choreo.buffers import Replay, StoredStep
from choreo.envs.base import Env
from choreo.errors import AlgorithmError
from choreo.loops import Position, rollout
from choreo.networks.q import QFactory, q_mlp
from choreo.roles import all_reduce, fragment
from choreo.types import Key, PyTree

FORBIDDEN = -1e9
"""The value of an action that may not be taken."""


class Params(NamedTuple):
    """What acting needs."""

    network: PyTree
    """The module, frozen: every leaf an array."""
    start: jax.Array
    """The first action of the space."""
    env_steps: jax.Array
    """Environment steps so far; epsilon follows them."""


class Train(NamedTuple):
    """Everything learned."""

    params: Params
    """What acting needs."""
    target: PyTree
    """The network as it was some updates ago."""
    optimizer: optax.OptState
    """State of the optimiser."""
    updates: jax.Array
    """How many have been done."""
    iterations: jax.Array
    """How many have been done."""


class Values(NamedTuple):
    """What the network says about an observation."""

    q: jax.Array
    """The value of each action, far below all others where it may not be taken: [action]"""
    atoms: jax.Array
    """Of its distribution: logits of fixed values, quantiles, or the value itself: [action, atom]"""


class Item(NamedTuple):
    """What stored steps say about the first of them."""

    obs: PyTree
    action: jax.Array
    ret: ops.NStep
    next_obs: PyTree
    """To bootstrap from."""


class Played(NamedTuple):
    """What an actor knew of a step, for the first priority of an item."""

    chosen: jax.Array
    """The value of the action taken."""
    best: jax.Array
    """The value of the best one."""


@dataclass(frozen=True, kw_only=True)
class DQN:
    """Deep Q-learning: double, dueling, n-step, prioritized, C51, QR; under the layout apex, Ape-X."""

    learning_rate: float = 5e-4
    """Step size of the optimiser; falls to 0 over `total_steps`."""
    unroll: int = 4
    """Steps per environment and iteration."""
    updates: int = 8
    """Updates per iteration."""
    batch_size: int = 64
    """Items per update."""
    gamma: float = 0.99
    """Discount factor."""
    n_step: int = 3
    """Steps until values are bootstrapped."""
    double: bool = True
    """Choose the action with the network, value it with the target network."""
    dueling: bool = True
    """A network that tells the value of a state from the advantages of actions."""
    head: str = "mean"
    """What is learned of an action's return: its mean, "c51" its distribution over fixed values, or "qr" its quantiles."""
    atoms: int = 51
    """Of the distribution, if there is one."""
    value_range: tuple[float, float] = (0.0, 100.0)
    """C51: the lowest and highest return that can be told."""
    target_period: int = 200
    """Updates after which the target network becomes a copy of the network, at the end of that iteration."""
    capacity: int = 100_000
    """Steps that are stored."""
    min_size: int = 1_000
    """Steps that are stored before anything is learned."""
    prioritized: bool = False
    """Draw items in proportion to how wrong they were; actors give the first priority."""
    priority_exponent: float = 0.6
    """0 draws all alike."""
    importance_exponent: float = 0.4
    """1 corrects for the priorities wholly, 0 not at all."""
    buffer_shards: int = 1
    """Replays, each over its own environments; part of the meaning: every batch takes as many items from each."""
    frame_stack: int = 1
    """Frames in an observation, along its last axis: with several, each frame is stored once."""
    epsilon: tuple[float, float] = (1.0, 0.05)
    """How often actions are random: at first, and in the end."""
    epsilon_steps: int = 20_000
    """Environment steps over which it falls from the first to the second."""
    epsilon_spread: float = 0.0
    """Environment i of E has epsilon to the power of 1 + spread * i / (E - 1): 0 for all the same; Ape-X has 7."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this norm."""
    total_steps: int | None = None
    """Environment steps of the whole run; None: the learning rate stays as it is."""
    network: QFactory = q_mlp
    """Builds the network: (observation_space, action_space, key, *, atoms, dueling) -> module."""
    optimizer: MakeOptimizer | None = None
    """From a learning rate to an optimiser; None: Adam on gradients clipped to `max_grad_norm`."""

    def __post_init__(self):
        if min(self.unroll, self.updates, self.n_step, self.target_period) < 1:
            raise AlgorithmError("DQN: unroll, updates, n_step and target_period are at least 1.")
        if self.head not in ("mean", "c51", "qr"):
            raise AlgorithmError(f"DQN(head={self.head!r}) is not known.", fix='Use "mean", "c51" or "qr".')
        if self.head == "c51" and self.value_range[0] >= self.value_range[1]:
            raise AlgorithmError(f"DQN(value_range={self.value_range}) is empty.", fix="Give the lowest return first.")
        _ = self.replay  # refuses what does not fit

    @property
    def replay(self) -> Replay:
        """Of one shard."""
        return off_policy.make_replay(
            capacity=self.capacity, unroll=self.unroll, length=self.n_step + 1, updates=self.updates,
            batch_size=self.batch_size, min_size=self.min_size, shards=self.buffer_shards,
            prioritized=self.prioritized, exponent=self.priority_exponent, stack=self.frame_stack,
        )  # fmt: skip

    def init(self, env: Env, key: Key) -> Carry:
        key_network, key_env = jax.random.split(key)
        atoms = 1 if self.head == "mean" else self.atoms
        network = self.network(env.observation_space, env.action_space, key_network, atoms=atoms, dueling=self.dueling)
        start = jnp.asarray(getattr(env.action_space, "start", 0), jnp.int32)
        params = Params(networks.freeze(network), start, jnp.zeros((), jnp.result_type(float)))
        train = self.init_train(params)
        env_state, obs = env.reset(env.keys(key_env))
        step = off_policy.step_types(env, self.act, params)
        replay = off_policy.init_replay(self.replay, step, env.num_envs, self.buffer_shards)
        return Carry(train, replay, Position(env_state, obs))

    def init_train(self, params: Params) -> Train:
        zero = jnp.zeros((), jnp.int32)
        optimizer = self.make_optimizer(self.learning_rate).init(params.network)
        return Train(params, jax.tree.map(jnp.copy, params.network), optimizer, zero, zero)

    def policy(self, train: Train) -> Params:
        return train.params

    @fragment("actor")
    def act(self, params: Params, obs: PyTree, key: Key, power: jax.Array | None = None, *, greedy: bool = False):
        """One environment: -> action (with probability epsilon ** `power` a random one), and what priorities need of it."""
        q = self.values(params.network, obs).q
        best = jnp.argmax(q)
        action = best
        if power is not None and not greedy:
            epsilon = self.epsilon_at(params.env_steps) ** power
            allowed = (q > FORBIDDEN).astype(epsilon.dtype)
            chosen = jax.nn.one_hot(best, len(q), dtype=epsilon.dtype)
            action = jax.random.categorical(key, jnp.log((1 - epsilon) * chosen + epsilon * allowed / jnp.sum(allowed)))
        # Everything beside the action is stored with the step, and read wherever the step is drawn.
        played = Played(q[action], q[best]) if self.prioritized else None
        return action.astype(jnp.int32) + params.start, played

    def iterate(self, env: Env, carry: Carry, key: Key) -> tuple[Carry, dict[str, jax.Array]]:
        key_draw, key_act = jax.random.split(key)
        replay, batches, where = off_policy.draw(
            self.replay, carry.replay, key_draw, updates=self.updates, shards=self.buffer_shards
        )
        steps = off_policy.count_steps(carry.position.obs, self.unroll)
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
            replay = off_policy.update_priorities(self.replay, replay, where, priorities)
        replay, stored = off_policy.add(self.replay, replay, trajectory, self.buffer_shards, self.first_priority)
        return Carry(train, replay, end), {**episodes, **metrics, **stored}

    def powers(self, num_envs: int) -> jax.Array:
        """By which epsilon differs between environments: [env]."""
        place = jnp.arange(num_envs, dtype=jnp.result_type(float)) / max(num_envs - 1, 1)
        return 1 + self.epsilon_spread * place

    def epsilon_at(self, env_steps: jax.Array) -> jax.Array:
        """How often actions are random."""
        return jnp.asarray(optax.linear_schedule(*self.epsilon, transition_steps=self.epsilon_steps)(env_steps))

    @fragment("learner")
    def learn(self, train: Train, batches: Batches, num_steps: jax.Array):
        """`updates` steps of the optimiser: -> everything learned, the items' new priorities [update, item], metrics."""
        learning_rate = anneal(self.learning_rate, self.total_steps, train.iterations, num_steps)
        optimizer = self.make_optimizer(learning_rate)
        weights = self.importance(batches.probability)
        steps = batches.steps._replace(action=batches.steps.action - train.params.start)
        items = jax.vmap(jax.vmap(self.item))(steps)
        # The target stays as it is through all updates, so it values what comes after their items in one go.
        beyond = jax.vmap(jax.vmap(self.values, (None, 0)), (None, 0))(train.target, items.next_obs)

        def update(learned: tuple[PyTree, optax.OptState], batch: tuple[Item, Values, jax.Array]):
            network, state = learned
            grads, said = jax.grad(self.loss, has_aux=True)(network, *batch)
            changes, state = optimizer.update(all_reduce(grads), state, network)
            return (optax.apply_updates(network, changes), state), said

        learned = train.params.network, train.optimizer
        (network, state), (losses, errors, q) = jax.lax.scan(update, learned, (items, beyond, weights))
        updates = train.updates + self.updates
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
        """From steps [step, ...]."""
        ret = ops.n_step(steps.reward, steps.discount, steps.last, self.gamma)
        obs, next_obs = (jax.tree.map(lambda x, at=at: x[at], steps.obs) for at in (0, ret.steps))
        return Item(obs, steps.action[0], ret, next_obs)

    def loss(self, network: PyTree, items: Item, beyond: Values, weight: jax.Array):
        """Of items [item, ...]: the loss; and of each its own, by how much it was wrong, and its value."""
        losses, errors, q = jax.vmap(self.item_loss, (None, 0, 0))(network, items, beyond)
        losses = weight * losses
        return jnp.mean(losses), (losses, errors, q)

    def item_loss(self, network: PyTree, item: Item, beyond: Values):
        """With what the target network says of where the item leads: -> loss, error, value."""
        values, ret = self.values(network, item.obs), item.ret
        chooser = self.values(network, item.next_obs).q if self.double else beyond.q
        best = jnp.argmax(jax.lax.stop_gradient(chooser))
        wanted = ret.reward + ret.discount * beyond.q[best]
        q, atoms = _of(item.action, values.q), _of(item.action, values.atoms)
        error = wanted - q
        loss = self.head_loss(atoms, beyond.atoms[best], ret, error)
        return ret.weight * loss, ret.weight * jax.lax.stop_gradient(error), q

    def head_loss(self, atoms: jax.Array, beyond: jax.Array, ret: ops.NStep, error: jax.Array) -> jax.Array:
        if self.head == "c51":
            support = jnp.linspace(*self.value_range, self.atoms, dtype=atoms.dtype)
            wanted = ops.categorical_projection(ret.reward + ret.discount * support, jax.nn.softmax(beyond), support)
            return -jnp.sum(wanted * jax.nn.log_softmax(atoms))
        if self.head == "qr":
            return ops.quantile_huber(atoms, ret.reward + ret.discount * beyond)
        # Squared, not Huber's: far from the target that one seeks the median, forgets the few items at which episodes end,
        # and values grow without bound (docs/algorithms/dqn.md).
        return 0.5 * error**2

    def values(self, network: PyTree, obs: PyTree) -> Values:
        """The network on one observation."""
        atoms = networks.thaw(network)(obs)
        if self.head == "c51":
            q = jax.nn.softmax(atoms) @ jnp.linspace(*self.value_range, self.atoms, dtype=atoms.dtype)
        else:
            q = jnp.mean(atoms, axis=-1)
        mask = networks.action_mask(obs)
        return Values(q if mask is None else jnp.where(mask, q, FORBIDDEN), atoms)

    def importance(self, probability: jax.Array) -> jax.Array:
        """Weights that undo drawing by priority; of each update [update, item] the largest is 1."""
        if not self.prioritized:
            return jnp.ones_like(probability)
        rarest = -all_reduce(-jnp.min(probability, axis=-1, keepdims=True), "max")
        return (jnp.maximum(probability, 1e-30) / jnp.maximum(rarest, 1e-30)) ** -self.importance_exponent

    def first_priority(self, steps: StoredStep) -> jax.Array:
        """Of a new item, by what its actor knew (Horgan et al. 2018, section 3)."""
        ret, played = ops.n_step(steps.reward, steps.discount, steps.last, self.gamma), steps.extras
        return ret.reward + ret.discount * played.best[ret.steps] - played.chosen[0]

    def make_optimizer(self, learning_rate) -> optax.GradientTransformation:
        if self.optimizer is not None:
            return self.optimizer(learning_rate)
        return ops.clipped(optax.adam(learning_rate), self.max_grad_norm)


def _of(action: jax.Array, values: jax.Array) -> jax.Array:
    """`values[action]`, as a product: its gradient is one too, where that of indexing is a scatter."""
    chosen = jax.nn.one_hot(action, len(values), dtype=values.dtype)
    return jnp.sum(values * chosen.reshape(-1, *(1,) * (values.ndim - 1)), axis=0)
