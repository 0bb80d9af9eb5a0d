"""Soft actor-critic (Haarnoja et al. 2018), for actions within bounds.

    iterate:   draw -> learn                        from what is stored
               act, step, act, step, ... -> add     at the same time

This is its second form, "Soft actor-critic algorithms and applications": two critics, no network for the value of states,
and a temperature that is found by itself.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from choreo import networks
from choreo.algos import control, off_policy
from choreo.algos.actor_critic import MakeOptimizer
from choreo.algos.control import Network, Params
from choreo.algos.off_policy import Batches, Carry
from choreo.buffers import Replay, StoredStep
from choreo.envs.base import Env
from choreo.errors import AlgorithmError
from choreo.loops import Position, rollout
from choreo.networks.control import squashed
from choreo.roles import all_reduce, fragment
from choreo.types import Key, PyTree


class Learned(NamedTuple):
    """What gradients change."""

    network: Network
    """Policy and critics."""
    log_temperature: jax.Array
    """What a nat of entropy is worth, as a logarithm."""


class Train(NamedTuple):
    """Everything learned."""

    learned: Learned
    """What gradients change."""
    target: PyTree
    """Critics that follow slowly."""
    optimizer: optax.OptState
    """State of the optimiser."""
    updates: jax.Array
    """How many have been done."""
    iterations: jax.Array
    """How many have been done, also those in which there was too little to learn from."""


@dataclass(frozen=True, kw_only=True)
class SAC:
    """Soft actor-critic: continuous actions, rewarded for staying random."""

    learning_rate: float = 3e-4
    """Step size of the optimiser."""
    unroll: int = 1
    """Steps per environment and iteration."""
    updates: int = 1
    """Updates per iteration."""
    batch_size: int = 256
    """Items per update."""
    gamma: float = 0.99
    """Discount factor."""
    tau: float = 0.005
    """How far the target critics follow in each update."""
    temperature: float | None = None
    """What a nat of entropy is worth, in units of reward; None: found such that the entropy is `target_entropy`."""
    target_entropy: float = -1.0
    """Entropy for each dimension of an action, in nats, as if actions were between -1 and 1."""
    capacity: int = 1_000_000
    """Steps that are stored."""
    min_size: int = 1_000
    """Steps that are stored before anything is learned; until then actions are uniform."""
    buffer_shards: int = 1
    """Replays, each over its own environments; part of the meaning: every batch takes as many items from each."""
    network: networks.Factory = squashed
    """Builds the network: (observation_space, action_space, key) -> module with `policy` and `critics`."""
    optimizer: MakeOptimizer | None = None
    """From a learning rate to an optimiser; None: Adam."""

    def __post_init__(self):
        control.check_counts(self)
        if self.temperature is not None and self.temperature < 0:
            raise AlgorithmError(f"SAC(temperature={self.temperature}) must not be negative.")

    @property
    def replay(self) -> Replay:
        """Of one shard."""
        return off_policy.make_replay(
            capacity=self.capacity, unroll=self.unroll, length=2, updates=self.updates,
            batch_size=self.batch_size, min_size=self.min_size, shards=self.buffer_shards,
        )  # fmt: skip

    def init(self, env: Env, key: Key) -> Carry:
        key_network, key_env = jax.random.split(key)
        network = control.init_network(self.network, env, key_network)
        learned = Learned(network, jnp.zeros((), jnp.result_type(float)))
        target = jax.tree.map(jnp.copy, network.critics)
        zero = jnp.zeros((), jnp.int32)
        train = Train(learned, target, self.make_optimizer().init(learned), zero, zero)
        env_state, obs = env.reset(env.keys(key_env))
        step = off_policy.step_types(env, self.act, self.policy(train))
        replay = off_policy.init_replay(self.replay, step, env.num_envs, self.buffer_shards)
        return Carry(train, replay, Position(env_state, obs))

    def policy(self, train: Train) -> Params:
        return Params(train.learned.network.policy, train.updates)

    @fragment("actor")
    def act(self, params: Params, obs: PyTree, key: Key, *, greedy: bool = False):
        """One environment: -> action, and nothing else."""
        pi = networks.thaw(params.policy)(obs)
        if greedy:
            return pi.mode(), None
        key_policy, key_any = jax.random.split(key)
        return control.explore(params, pi.sample(key_policy), pi.bounds.uniform(key_any)), None

    def iterate(self, env: Env, carry: Carry, key: Key) -> tuple[Carry, dict[str, jax.Array]]:
        key_draw, key_learn, key_act = jax.random.split(key, 3)
        replay, batches, _ = off_policy.draw(
            self.replay, carry.replay, key_draw, updates=self.updates, shards=self.buffer_shards
        )
        train, metrics = self.learn(carry.train, batches, key_learn)
        params = self.policy(carry.train)
        end, trajectory, episodes = rollout(env, self.act, params, carry.position, key_act, self.unroll)
        replay, stored = off_policy.add(self.replay, replay, trajectory, self.buffer_shards)
        return Carry(train, replay, end), {**episodes, **metrics, **stored}

    @fragment("learner")
    def learn(self, train: Train, batches: Batches, key: Key):
        """`updates` steps of the optimiser."""
        return control.learn(self.update, train, batches, key)

    def update(self, train: Train, now: tuple[StoredStep, Key]) -> tuple[Train, dict[str, jax.Array]]:
        """From a batch of items [item, step, ...]: all parts at once; in the paper the policy ascends the newer critics."""
        gradient, metrics = jax.grad(self.loss, has_aux=True)(train.learned, train.target, *now)
        learned, optimizer = control.descend(
            self.make_optimizer(), all_reduce(gradient), train.learned, train.optimizer
        )
        target = control.follow(train.target, learned.network.critics, self.tau)
        return Train(learned, target, optimizer, train.updates + 1, train.iterations), metrics

    def loss(self, learned: Learned, target: PyTree, steps: StoredStep, key: Key):
        """Of items [item, step, ...]: all three losses; each changes parameters that the others leave alone."""
        keys = jax.random.split(key, len(steps.reward))
        metrics = jax.vmap(self.item_losses, (None, None, 0, 0))(learned, target, steps, keys)
        metrics = {name: jnp.mean(x) for name, x in metrics.items()}
        return metrics["critic_loss"] + metrics["policy_loss"] + metrics["temperature_loss"], metrics

    def item_losses(self, learned: Learned, target: PyTree, steps: StoredStep, key: Key) -> dict[str, jax.Array]:
        """Of one item [step, ...]."""
        item, network = control.item_of(steps, self.gamma), networks.thaw(learned.network)
        fixed = jax.lax.stop_gradient(network)
        temperature = self.temperature_of(learned)
        key_next, key_now = jax.random.split(key)

        # Equations 5 and 6, with a sample in place of V, and the smaller of two critics.
        next_action, next_log_prob = fixed.policy(item.next_obs).sample_and_log_prob(key_next)
        value = jnp.min(control.values(target, item.next_obs, next_action)) - temperature * next_log_prob
        q = control.values(network.critics, item.obs, item.action)
        wanted = jax.lax.stop_gradient(item.reward + item.discount * value)
        critic_loss = item.weight * 0.5 * jnp.sum((q - wanted) ** 2)

        # Equation 9.
        action, log_prob = network.policy(item.obs).sample_and_log_prob(key_now)
        policy_loss = temperature * log_prob - jnp.min(control.values(fixed.critics, item.obs, action))

        # Equation 18, of the logarithm: the temperature rises while the entropy is too small.
        surplus = jax.lax.stop_gradient(-log_prob - self.target_entropy * action.size)
        return {
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "temperature_loss": learned.log_temperature * surplus,
            "temperature": temperature,
            "entropy": -log_prob,
            "q": jnp.mean(q),
        }

    def temperature_of(self, learned: Learned) -> jax.Array:
        if self.temperature is not None:
            return jnp.full_like(learned.log_temperature, self.temperature)
        return jax.lax.stop_gradient(jnp.exp(learned.log_temperature))

    def make_optimizer(self) -> optax.GradientTransformation:
        return (self.optimizer or optax.adam)(self.learning_rate)
