"""REINFORCE (Williams 1992) with a learned baseline, for any space of numbers, with or without memory.

    iterate:   act, step, act, step, ...  ->  trajectory [time, env]  ->  gradient  ->  all_reduce  ->  update

Actions are judged by the rewards that followed, all of them; what was to be expected is subtracted.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from choreo import networks, ops
from choreo.algos import actor_critic
from choreo.algos.actor_critic import Carry, Gradient, MakeOptimizer, Params, Train
from choreo.envs.base import Env
from choreo.errors import AlgorithmError
from choreo.loops import Transition, rollout
from choreo.roles import all_reduce, fragment
from choreo.types import Key, PyTree


@dataclass(frozen=True, kw_only=True)
class REINFORCE:
    """Monte Carlo policy gradient with a learned baseline."""

    learning_rate: float = 3e-3
    """Step size of the optimiser; falls to 0 over `total_steps`."""
    unroll: int = 128
    """Steps per environment and iteration, which makes one gradient."""
    gamma: float = 0.99
    """Discount factor."""
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
    optimizer: MakeOptimizer | None = None
    """From a learning rate to an optimiser; None: Adam on gradients clipped to `max_grad_norm`."""

    def __post_init__(self):
        if self.unroll < 1:
            raise AlgorithmError(f"REINFORCE(unroll={self.unroll}) must be at least 1.")

    def init(self, env: Env, key: Key) -> Carry:
        key_network, key_env = jax.random.split(key)
        params = actor_critic.init_params(self.network, env, key_network, normalise_obs=self.normalise_obs)
        train = actor_critic.init_train(params, self.make_optimizer(self.learning_rate))
        return Carry(train, actor_critic.init_position(env, params, key_env))

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
        params = self.policy(carry.train)
        end, trajectory, episodes = rollout(
            env, self.act, params, carry.position, key, self.unroll, fresh=self.initial_state(params)
        )
        gradient, metrics = self.gradient(params, trajectory, carry.position.memory)
        steps = actor_critic.count_steps(trajectory.reward)
        train, step_metrics = self.update(carry.train, all_reduce(gradient), steps)
        return Carry(train, end), {**episodes, **metrics, **step_metrics}

    @fragment("gradient")
    def gradient(self, params: Params, trajectory: Transition, memory: PyTree):
        """What one trajectory says; `memory` is what the network remembered before its first step."""
        grads, metrics = jax.grad(self.loss, has_aux=True)(params.network, params.moments, trajectory, memory)
        return Gradient(grads, actor_critic.look(params.moments, trajectory.obs)), metrics

    @fragment("update")
    def update(self, train: Train, gradient: Gradient, steps: jax.Array):
        """Apply it, averaged over all shards; `steps` are theirs together."""
        learning_rate = actor_critic.anneal(self.learning_rate, self.total_steps, train.iterations, steps)
        train, metrics = actor_critic.descend(train, gradient, steps, self.make_optimizer(learning_rate))
        return train, metrics | {"learning_rate": learning_rate}

    def loss(self, network: PyTree, moments: PyTree, trajectory: Transition, memory: PyTree):
        """Section 13.4 of Sutton & Barto 2018; as is common, without the factor gamma^t, which would forget late steps."""
        pi, value_tm1, value_t = actor_critic.predict(Params(network, moments), trajectory, memory)
        # An episode that is still going on at the end of the unroll (or at a time limit) is worth, from there on, what
        # the baseline says. To learn from whole episodes only would leave out the long ones, which are not like the rest.
        target = ops.discounted_return(trajectory.reward, self.gamma * trajectory.discount, trajectory.last, value_t)
        advantage = target - jax.lax.stop_gradient(value_tm1)
        policy_loss = -jnp.mean(pi.log_prob(trajectory.action) * advantage)
        value_loss = 0.5 * jnp.mean((value_tm1 - target) ** 2)
        entropy = jnp.mean(pi.entropy())
        loss = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        return loss, {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}

    def make_optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        if self.optimizer is not None:
            return self.optimizer(learning_rate)
        return ops.clipped(optax.adam(learning_rate, eps=1e-5), self.max_grad_norm)
