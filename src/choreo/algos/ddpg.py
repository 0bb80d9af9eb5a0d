"""Deep deterministic policy gradient (Lillicrap et al. 2016), for actions within bounds.

    iterate:   draw -> learn                        from what is stored
               act, step, act, step, ... -> add     at the same time

The noise of exploration is independent from step to step, where the paper has a process with inertia: that one was found to
make no difference (Fujimoto et al. 2018, section 6.1). Weights do not decay, and there is no batch normalisation.
"""

import functools
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
from choreo.loops import Position, rollout
from choreo.networks.control import deterministic
from choreo.roles import all_reduce, fragment
from choreo.types import Key, PyTree


class Train(NamedTuple):
    """Everything learned."""

    network: Network
    """Policy and critic."""
    target: Network
    """Both again, following slowly."""
    optimizer: optax.OptState
    """State of the optimiser."""
    updates: jax.Array
    """How many have been done."""
    iterations: jax.Array
    """How many have been done, also those in which there was too little to learn from."""


@dataclass(frozen=True, kw_only=True)
class DDPG:
    """Deep deterministic policy gradient: Q-learning for continuous actions."""

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
    capacity: int = 1_000_000
    """Steps that are stored."""
    min_size: int = 1_000
    """Steps that are stored before anything is learned; until then actions are uniform."""
    buffer_shards: int = 1
    """Replays, each over its own environments; part of the meaning: every batch takes as many items from each."""
    network: networks.Factory = functools.partial(deterministic, critics=1)
    """Builds the network: (observation_space, action_space, key) -> module with `policy` and `critics`."""
    optimizer: MakeOptimizer | None = None
    """From a learning rate to an optimiser; None: Adam."""

    def __post_init__(self):
        control.check_counts(self)

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
        zero = jnp.zeros((), jnp.int32)
        train = Train(network, target, self.make_optimizer().init(network), zero, zero)
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
        """`updates` steps of the optimiser."""
        return control.learn(self.update, train, batches, key)

    def update(self, train: Train, now: tuple[StoredStep, Key]) -> tuple[Train, dict[str, jax.Array]]:
        """From a batch of items [item, step, ...]: both parts at once; in the paper the policy ascends the newer critic."""
        steps, _ = now
        gradient, metrics = jax.grad(self.loss, has_aux=True)(train.network, train.target, steps)
        network, optimizer = control.descend(
            self.make_optimizer(), all_reduce(gradient), train.network, train.optimizer
        )
        target = control.follow(train.target, network, self.tau)
        return Train(network, target, optimizer, train.updates + 1, train.iterations), metrics

    def loss(self, network: Network, target: Network, steps: StoredStep):
        """Of items [item, step, ...]: both losses; each changes parameters that the other leaves alone."""
        metrics = jax.vmap(self.item_losses, (None, None, 0))(network, target, steps)
        metrics = {name: jnp.mean(x) for name, x in metrics.items()}
        return metrics["critic_loss"] + metrics["policy_loss"], metrics

    def item_losses(self, network: Network, target: Network, steps: StoredStep) -> dict[str, jax.Array]:
        """Of one item [step, ...]: algorithm 1 of the paper."""
        item, network, target = control.item_of(steps, self.gamma), networks.thaw(network), networks.thaw(target)
        value = jnp.min(control.values(target.critics, item.next_obs, target.policy(item.next_obs)))
        q = control.values(network.critics, item.obs, item.action)
        critic_loss = item.weight * 0.5 * jnp.sum((q - (item.reward + item.discount * value)) ** 2)
        policy_loss = -jax.lax.stop_gradient(network.critics)[0](item.obs, network.policy(item.obs))
        return {"critic_loss": critic_loss, "policy_loss": policy_loss, "q": jnp.mean(q)}

    def make_optimizer(self) -> optax.GradientTransformation:
        return (self.optimizer or optax.adam)(self.learning_rate)
