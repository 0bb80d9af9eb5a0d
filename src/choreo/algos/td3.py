"""Twin delayed deterministic policy gradient, TD3 (Fujimoto et al. 2018), for actions within bounds.

    iterate:   draw -> learn                        from what is stored
               act, step, act, step, ... -> add     at the same time

DDPG with three changes against values that are too high: the smaller of two critics, targets smoothed over nearby actions,
and a policy that is updated less often than the critics.
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
from choreo.networks.control import deterministic
from choreo.roles import all_reduce, fragment
from choreo.types import Key, PyTree


class Train(NamedTuple):
    """Everything learned."""

    network: Network
    """Policy and critics."""
    target: Network
    """Both again, following slowly."""
    policy_optimizer: optax.OptState
    """State of the policy's optimiser."""
    critics_optimizer: optax.OptState
    """State of the critics' optimiser."""
    updates: jax.Array
    """How many have been done."""
    iterations: jax.Array
    """How many have been done, also those in which there was too little to learn from."""


@dataclass(frozen=True, kw_only=True)
class TD3:
    """Twin delayed DDPG: two critics, smoothed targets, a policy that is updated less often."""

    learning_rate: float = 1e-3
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
    """How far the targets follow in each update."""
    noise: float = 0.1
    """Standard deviation of what is added to actions to explore, in units of half the width of the space."""
    target_noise: float = 0.2
    """Likewise, of what is added to the actions whose values are bootstrapped from."""
    target_noise_clip: float = 0.5
    """What is added there is at most this."""
    policy_delay: int = 2
    """Updates of the critics for each of the policy and the targets."""
    capacity: int = 1_000_000
    """Steps that are stored."""
    min_size: int = 1_000
    """Steps that are stored before anything is learned; until then actions are uniform."""
    buffer_shards: int = 1
    """Replays, each over its own environments; part of the meaning: every batch takes as many items from each."""
    network: networks.Factory = deterministic
    """Builds the network: (observation_space, action_space, key) -> module with `policy` and `critics`."""
    optimizer: MakeOptimizer | None = None
    """From a learning rate to an optimiser; None: Adam."""

    def __post_init__(self):
        control.check_counts(self)
        if self.policy_delay < 1:
            raise AlgorithmError(f"TD3(policy_delay={self.policy_delay}) must be at least 1.")

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
        target = jax.tree.map(jnp.copy, network)
        policy_state, critics_state = map(self.make_optimizer().init, (network.policy, network.critics))
        zero = jnp.zeros((), jnp.int32)
        train = Train(network, target, policy_state, critics_state, zero, zero)
        env_state, obs = env.reset(env.keys(key_env))
        step = off_policy.step_types(env, self.act, self.policy(train))
        replay = off_policy.init_replay(self.replay, step, env.num_envs, self.buffer_shards)
        return Carry(train, replay, Position(env_state, obs))

    def policy(self, train: Train) -> Params:
        return Params(train.network.policy, train.updates)

    @fragment("actor")
    def act(self, params: Params, obs: PyTree, key: Key, *, greedy: bool = False):
        """One environment: -> action, and nothing else."""
        return control.act(params, obs, key, noise=None if greedy else self.noise), None

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
        """`updates` steps of the critics' optimiser."""
        return control.learn(self.update, train, batches, key)

    def update(self, train: Train, now: tuple[StoredStep, Key]) -> tuple[Train, dict[str, jax.Array]]:
        """Algorithm 1 of the paper, from a batch of items [item, step, ...] on."""
        (steps, key), optimizer, network = now, self.make_optimizer(), train.network
        gradient, metrics = jax.grad(self.critic_loss, has_aux=True)(network.critics, train.target, steps, key)
        critics, critics_state = control.descend(
            optimizer, all_reduce(gradient), network.critics, train.critics_optimizer
        )
        due = (train.updates + 1) % self.policy_delay == 0
        # Only the gradient is computed on condition: it is what costs, and it is this shard's own.
        gradient = jax.lax.cond(
            due, jax.grad(self.policy_loss), lambda policy, *_: optax.tree.zeros_like(policy),
            network.policy, critics, steps.obs,
        )  # fmt: skip
        policy, policy_state = control.descend(optimizer, all_reduce(gradient), network.policy, train.policy_optimizer)
        moved = Network(policy, critics)
        after = (policy, control.follow(train.target, moved, self.tau), policy_state)
        before = (network.policy, train.target, train.policy_optimizer)
        policy, target, policy_state = jax.tree.map(lambda new, old: jnp.where(due, new, old), after, before)
        network = Network(policy, critics)
        return Train(network, target, policy_state, critics_state, train.updates + 1, train.iterations), metrics

    def critic_loss(self, critics: PyTree, target: Network, steps: StoredStep, key: Key):
        keys = jax.random.split(key, len(steps.reward))
        losses, q = jax.vmap(self.item_loss, (None, None, 0, 0))(critics, target, steps, keys)
        loss = jnp.mean(losses)
        return loss, {"critic_loss": loss, "q": jnp.mean(q)}

    def item_loss(self, critics: PyTree, target: Network, steps: StoredStep, key: Key) -> tuple[jax.Array, jax.Array]:
        """Of one item [step, ...]: the critics' loss, and what they say of its action."""
        item, target = control.item_of(steps, self.gamma), networks.thaw(target)
        noise = self.target_noise * jax.random.normal(key, (item.action.size,), item.action.dtype)
        noise = jnp.clip(noise, -self.target_noise_clip, self.target_noise_clip)
        next_action = target.policy.bounds.add(target.policy(item.next_obs), noise)
        wanted = item.reward + item.discount * jnp.min(control.values(target.critics, item.next_obs, next_action))
        q = control.values(critics, item.obs, item.action)
        return item.weight * 0.5 * jnp.sum((q - wanted) ** 2), q

    def policy_loss(self, policy: PyTree, critics: PyTree, obs: PyTree) -> jax.Array:
        """What the first critic says of the policy's own actions; `obs` is [item, step, ...]."""
        policy, critic = networks.thaw(policy), networks.thaw(critics)[0]
        first = jax.tree.map(lambda x: x[:, 0], obs)
        return -jnp.mean(jax.vmap(lambda obs: critic(obs, policy(obs)))(first))

    def make_optimizer(self) -> optax.GradientTransformation:
        return (self.optimizer or optax.adam)(self.learning_rate)
