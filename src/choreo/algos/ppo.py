"""Proximal policy optimisation (Schulman et al. 2017), for any space of numbers, with or without memory.

    iterate:   act, step, act, step, ...  ->  trajectory [time, env]  ->  learn: advantages, then epochs of minibatches

The details that matter in practice are those of Huang et al. 2022, "The 37 implementation details of PPO"; where this
file departs from them, a comment says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from choreo import networks, ops
from choreo.algos import actor_critic
from choreo.algos.actor_critic import Carry, Params, Train, apply, unfold
from choreo.envs.base import Env
from choreo.errors import AlgorithmError
from choreo.loops import Transition, minibatches, rollout
from choreo.roles import all_reduce, fragment
from choreo.types import Key, PyTree


class Batch(NamedTuple):
    """What the loss reads: [sample], or [sequence, time] if the network has memory."""

    obs: PyTree
    action: jax.Array
    log_prob: jax.Array
    last: jax.Array
    advantage: jax.Array
    target: jax.Array
    memory: PyTree
    """The network's memory before the first step, [sequence]; None if it has none."""


@dataclass(frozen=True, kw_only=True)
class PPO:
    """Proximal policy optimisation."""

    learning_rate: float = 2e-3
    """Step size of the optimiser; falls to 0 over `total_steps`."""
    unroll: int = 128
    """Steps per environment and iteration."""
    epochs: int = 4
    """Passes over each trajectory."""
    minibatch_size: int = 256
    """Steps per gradient; must divide unroll x environments."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.98
    """Between one-step (0) and Monte Carlo (1) advantages."""
    clip: float = 0.2
    """How far the probability of an action may move in one iteration."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the critic's loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    normalise_obs: bool = False
    """Scale observations by their running mean and variance."""
    total_steps: int | None = None
    """Environment steps of the whole run; None: the learning rate stays as it is."""
    network: networks.Factory = networks.mlp
    """Builds the network: (observation_space, action_space, key) -> module."""
    optimizer: Callable[[Any], optax.GradientTransformation] | None = None
    """From a learning rate to an optimiser; None: Adam on gradients clipped to `max_grad_norm`."""

    def __post_init__(self):
        for name in ("unroll", "epochs", "minibatch_size"):
            if getattr(self, name) < 1:
                raise AlgorithmError(f"PPO({name}={getattr(self, name)}) must be at least 1.")

    def init(self, env: Env, key: Key) -> Carry:
        key_network, key_env = jax.random.split(key)
        params = actor_critic.init_params(self.network, env, key_network, normalise_obs=self.normalise_obs)
        position = actor_critic.init_position(env, params, key_env)
        self.sequences_per_minibatch(env.num_envs, recurrent=position.memory is not None)
        return Carry(actor_critic.init_train(params, self.make_optimizer(self.learning_rate)), position)

    def policy(self, train: Train) -> Params:
        return train.params

    def initial_state(self, params: Params) -> PyTree:
        """The memory an episode begins with, of one environment; None if the network has none."""
        return actor_critic.initial_state(params)

    @fragment("actor")
    def act(self, params: Params, obs: PyTree, key: Key, memory: PyTree = None, *, greedy: bool = False):
        """One environment: -> action, what it was drawn from; and, if the network has one, its new memory."""
        return actor_critic.act(params, obs, key, memory, greedy=greedy)

    def iterate(self, env: Env, carry: Carry, key: Key) -> tuple[Carry, dict[str, jax.Array]]:
        key_rollout, key_learn = jax.random.split(key)
        params = self.policy(carry.train)
        end, trajectory, episodes = rollout(
            env, self.act, params, carry.position, key_rollout, self.unroll, fresh=self.initial_state(params)
        )
        train, metrics = self.learn(carry.train, trajectory, carry.position.memory, key_learn)
        return Carry(train, end), {**episodes, **metrics}

    @fragment("learner")
    def learn(self, train: Train, trajectory: Transition, memory: PyTree, key: Key):
        """Improve on one trajectory; `memory` is what the network remembered before its first step."""
        steps = actor_critic.count_steps(trajectory.reward)
        learning_rate = actor_critic.anneal(self.learning_rate, self.total_steps, train.iterations, steps)
        batch = self.make_batch(train.params, trajectory, memory)
        size = self.sequences_per_minibatch(trajectory.reward.shape[1], recurrent=memory is not None)
        optimizer = self.make_optimizer(learning_rate)

        def epoch(state, key):
            return jax.lax.scan(update, state, minibatches(batch, key, size))

        def update(state, minibatch):
            network, opt_state = state
            grads, metrics = jax.grad(self.loss, has_aux=True)(network, train.params.moments, minibatch)
            updates, opt_state = optimizer.update(all_reduce(grads), opt_state, network)
            return (optax.apply_updates(network, updates), opt_state), metrics

        state = (train.params.network, train.optimizer)
        (network, opt_state), metrics = jax.lax.scan(epoch, state, jax.random.split(key, self.epochs))
        # After the epochs, not before: the probabilities we compare with were computed with the old statistics.
        moments = actor_critic.update_moments(train.params.moments, trajectory.obs)
        metrics = jax.tree.map(jnp.mean, metrics) | {"learning_rate": learning_rate}
        return Train(Params(network, moments), opt_state, train.iterations + 1), metrics

    def loss(self, network: PyTree, moments: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Equation 9 of the paper, on a minibatch."""
        params = Params(network, moments)
        if batch.memory is None:
            pi, value_tm1, _ = jax.vmap(apply, (None, 0, None))(params, batch.obs, None)
        else:
            pi, value_tm1, _ = jax.vmap(unfold, (None, 0, 0, 0))(params, batch.obs, batch.last, batch.memory)
        log_ratio = pi.log_prob(batch.action) - batch.log_prob
        advantage = (batch.advantage - jnp.mean(batch.advantage)) / (jnp.std(batch.advantage) + 1e-8)
        policy_loss = jnp.mean(ops.clipped_surrogate(jnp.exp(log_ratio), advantage, self.clip))
        # The value loss is not clipped: clipping hurts more than it helps (Andrychowicz et al. 2021, section 3.2).
        value_loss = 0.5 * jnp.mean((value_tm1 - batch.target) ** 2)
        entropy = jnp.mean(pi.entropy())
        loss = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": jnp.mean(jnp.exp(log_ratio) - 1 - log_ratio),
            "clip_fraction": jnp.mean((jnp.abs(jnp.expm1(log_ratio)) > self.clip).astype(loss.dtype)),
        }

    def make_batch(self, params: Params, trajectory: Transition, memory: PyTree) -> Batch:
        """Advantages and targets of a trajectory, and everything in the order of the loss."""
        sequences = jax.tree.map(lambda x: x.swapaxes(0, 1), trajectory)
        # Values are the learner's, not the actor's: an actor then computes and sends none.
        _, value_tm1, memories = jax.vmap(unfold, (None, 0, 0, 0))(params, sequences.obs, sequences.last, memory)
        each_step = jax.vmap(jax.vmap(apply, (None, 0, 0)), (None, 0, 0))
        _, value_t, _ = each_step(params, sequences.next_obs, memories)
        discount_t = self.gamma * trajectory.discount
        advantage = ops.gae(trajectory.reward, discount_t, trajectory.last, value_tm1.T, value_t.T, self.gae_lambda).T
        s = sequences
        log_prob = s.extras.log_prob(s.action)  # not in `act`, where it would be one small computation in every step
        batch = Batch(s.obs, s.action, log_prob, s.last, advantage, advantage + value_tm1, memory)
        return batch if memory is not None else jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)

    def make_optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        if self.optimizer is not None:
            return self.optimizer(learning_rate)
        return ops.clipped(optax.adam(learning_rate, eps=1e-5), self.max_grad_norm)

    def sequences_per_minibatch(self, num_envs: int, *, recurrent: bool) -> int:
        """How many sequences (of `unroll` steps with memory, else of one) make a minibatch."""
        length, num_sequences = (self.unroll, num_envs) if recurrent else (1, self.unroll * num_envs)
        if self.minibatch_size % length:
            raise AlgorithmError(
                f"A network with memory learns from whole sequences: unroll={self.unroll} must divide "
                f"minibatch_size={self.minibatch_size}.",
                fix=f"Set minibatch_size to a multiple of {self.unroll}, or change unroll.",
            )
        size = self.minibatch_size // length
        if num_sequences % size:
            steps = self.unroll * num_envs
            raise AlgorithmError(
                f"minibatch_size={self.minibatch_size} does not divide the {steps} steps of an iteration "
                f"(unroll={self.unroll} x {num_envs} environments).",
                fix=f"Set minibatch_size to one of {', '.join(map(str, _divisors(num_sequences, length)))}; "
                "or change unroll or the number of environments.",
            )
        return size


def _divisors(num_sequences: int, length: int) -> list[int]:
    """Up to six of the largest minibatch sizes that would do."""
    return [length * d for d in range(num_sequences, 0, -1) if num_sequences % d == 0][:6]
