"""Proximal policy optimisation (Schulman et al. 2017), for discrete and continuous actions, for networks with or without memory.

    iterate:   act, step, act, step, ...  ->  trajectory [time, env]  ->  learn: advantages, then epochs of minibatches

The implementation details follow Huang et al. 2022, "The 37 implementation details of PPO"; a comment marks every deviation.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from choreo import networks, ops
from choreo.envs.base import Env
from choreo.errors import AlgorithmError
from choreo.loops import Position, Transition, anneal, begin, count_steps, minibatches, rollout, unfold
from choreo.roles import all_reduce, fragment
from choreo.types import Key, PyTree


class Params(NamedTuple):
    """The values that `act` needs to choose an action."""

    network: PyTree
    """The module, frozen: every leaf is an array."""
    moments: PyTree
    """Statistics of observations (`ops.normalise`); None if observations are not normalised."""


class Train(NamedTuple):
    """The state of learning."""

    params: Params
    """The values that `act` needs to choose an action."""
    optimizer: optax.OptState
    """State of the optimiser."""
    iterations: jax.Array
    """Number of iterations done; the learning rate depends on it."""


class Carry(NamedTuple):
    """The values that one iteration hands to the next."""

    train: Train
    """The state of learning."""
    position: Position
    """The environments."""


class Batch(NamedTuple):
    """The input of the loss: [sample], or [sequence, time] if the network has memory."""

    obs: PyTree
    action: jax.Array
    log_prob: jax.Array
    last: jax.Array
    advantage: jax.Array
    target: jax.Array
    memory: PyTree
    """Memory of the network before the first step: [sequence]; None if the network has no memory."""


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
    """The probability ratio of an action, new to old policy, is clipped to [1 - clip, 1 + clip]."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the critic's loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    normalise_obs: bool = False
    """Scale observations by their running mean and variance."""
    total_steps: int | None = None
    """Environment steps of the whole run; None: the learning rate is constant."""
    network: networks.Factory = networks.mlp
    """Builds the network: (observation_space, action_space, key) -> module."""
    optimizer: Callable[[Any], optax.GradientTransformation] | None = None
    """Makes an optimiser from a learning rate; None: Adam on gradients clipped to `max_grad_norm`."""

    def __post_init__(self):
        for name in ("unroll", "epochs", "minibatch_size"):
            if getattr(self, name) < 1:
                raise AlgorithmError(f"PPO({name}={getattr(self, name)}) must be at least 1.")

    def init(self, env: Env, key: Key) -> Carry:
        key_network, key_env = jax.random.split(key)
        network = networks.freeze(self.network(env.observation_space, env.action_space, key_network))
        params = Params(network, ops.initial_moments(env.observation_space) if self.normalise_obs else None)
        position = begin(env, key_env, self.initial_state(params))
        self.sequences_per_minibatch(env.num_envs, recurrent=position.memory is not None)
        optimizer = self.make_optimizer(self.learning_rate).init(network)
        return Carry(Train(params, optimizer, jnp.zeros((), jnp.int32)), position)

    def policy(self, train: Train) -> Params:
        return train.params

    def initial_state(self, params: Params) -> PyTree:
        """The memory of one environment at the beginning of an episode; None if the network has no memory."""
        network = networks.thaw(params.network)
        return network.initial_state() if isinstance(network, networks.Recurrent) else None

    @fragment("actor")
    def act(self, params: Params, obs: PyTree, key: Key, memory: PyTree = None, *, greedy: bool = False):
        """The action for one environment and its distribution; if the network has memory, also the new memory."""
        pi, _, memory = self.apply(params, obs, memory)
        action = pi.mode() if greedy else pi.sample(key)
        return (action, pi) if memory is None else (action, pi, memory)

    def apply(self, params: Params, obs: PyTree, memory: PyTree):
        """Apply the network to one observation; returns pi, value and memory (None if the network has no memory)."""
        if params.moments is not None:
            obs = ops.normalise(params.moments, obs)
        network = networks.thaw(params.network)
        return (*network(obs), None) if memory is None else network(obs, memory)

    def unfold(self, params: Params, obs: PyTree, last: jax.Array, memory: PyTree):
        """Apply the network along sequences [sequence, time, ...]; `memory` [sequence] is the memory before their first step."""
        apply, fresh = functools.partial(self.apply, params), self.initial_state(params)
        return jax.vmap(lambda obs, last, memory: unfold(apply, obs, last, memory, fresh))(obs, last, memory)

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
        """Learn from one trajectory; `memory` is the memory of the network before the first step."""
        steps = count_steps(trajectory.reward.size, trajectory.reward.dtype)
        learning_rate = anneal(self.learning_rate, self.total_steps, train.iterations, steps)
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
        # Update the statistics only after the epochs: the actor computed its probabilities with the old statistics.
        moments = train.params.moments
        if moments is not None:
            moments = ops.update_moments(moments, trajectory.obs)
        metrics = jax.tree.map(jnp.mean, metrics) | {"learning_rate": learning_rate}
        return Train(Params(network, moments), opt_state, train.iterations + 1), metrics

    def loss(self, network: PyTree, moments: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of a minibatch, and metrics. The loss is equation 9 of the paper, negated; its first term is equation 7
        (`ops.clipped_surrogate`)."""
        params = Params(network, moments)
        if batch.memory is None:
            pi, value_tm1, _ = jax.vmap(self.apply, (None, 0, None))(params, batch.obs, None)
        else:
            pi, value_tm1, _ = self.unfold(params, batch.obs, batch.last, batch.memory)
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
        """All input of the loss, with advantages and targets: [sequence, time] if the network has memory, else [sample]."""
        sequences = jax.tree.map(lambda x: x.swapaxes(0, 1), trajectory)
        # The learner computes the values, so that an actor need not compute and send them.
        _, value_tm1, memories = self.unfold(params, sequences.obs, sequences.last, memory)
        each_step = jax.vmap(jax.vmap(self.apply, (None, 0, 0)), (None, 0, 0))
        _, value_t, _ = each_step(params, sequences.next_obs, memories)
        discount_t = self.gamma * trajectory.discount
        advantage = ops.gae(trajectory.reward, discount_t, trajectory.last, value_tm1.T, value_t.T, self.gae_lambda).T
        s = sequences
        # Compute the log-probabilities here and not in `act`: one large computation is faster than a small one at every step.
        log_prob = s.extras.log_prob(s.action)
        batch = Batch(s.obs, s.action, log_prob, s.last, advantage, advantage + value_tm1, memory)
        return batch if memory is not None else jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)

    def make_optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        if self.optimizer is not None:
            return self.optimizer(learning_rate)
        return ops.clipped(optax.adam(learning_rate, eps=1e-5), self.max_grad_norm)

    def sequences_per_minibatch(self, num_envs: int, *, recurrent: bool) -> int:
        """Number of sequences in a minibatch; a sequence has `unroll` steps if the network has memory, else one step."""
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
    """The six largest minibatch sizes (or fewer) that divide the steps of an iteration."""
    return [length * d for d in range(num_sequences, 0, -1) if num_sequences % d == 0][:6]
