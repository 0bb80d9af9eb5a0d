"""The loop of actor-critics that compute one gradient from each trajectory: A2C, IMPALA and REINFORCE.

    iterate:   act, step, act, step, ...  ->  trajectory [time, env]  ->  gradient  ->  all_reduce  ->  update

Each algorithm of the family defines `targets`, which computes the critic's target values and the advantages of the actions from
a trajectory. A network with memory is applied along the whole trajectory and starts with its memory from before the first step.
"""

import abc
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
from choreo.loops import Position, Transition, anneal, begin, count_steps, rollout, unfold
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


class Predictions(NamedTuple):
    """The outputs of the network along a trajectory [time, env]."""

    pi: ops.Distribution
    """Distribution of actions."""
    value_tm1: jax.Array
    """Value of `obs`."""
    value_t: jax.Array
    """Value of `next_obs`, the true successor."""


class Targets(NamedTuple):
    """The values from which critic and policy learn, for a trajectory [time, env]; the loss treats all fields as constants."""

    value: jax.Array
    """Target of the critic."""
    advantage: jax.Array
    """The factor that the policy loss multiplies with the log-probability of each action."""
    metrics: dict[str, jax.Array] = {}
    """Further metrics of the algorithm."""


class Gradient(NamedTuple):
    """The result of `gradient` for one trajectory. `all_reduce` averages it over learner shards; then `update` applies it."""

    network: PyTree
    """The gradient of the loss."""
    seen: PyTree
    """The result of `ops.look` for the observations; None if observations are not normalised."""


@dataclass(frozen=True, kw_only=True)
class OneGradient(abc.ABC):
    """The common fields and the loop of A2C, IMPALA and REINFORCE."""

    learning_rate: float = 1e-3
    """Step size of the optimiser; falls to 0 over `total_steps`."""
    unroll: int = 16
    """Steps per environment and iteration; each iteration computes one gradient."""
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
    """Environment steps of the whole run; None: the learning rate is constant."""
    network: networks.Factory = networks.mlp
    """Builds the network: (observation_space, action_space, key) -> module."""
    optimizer: Callable[[Any], optax.GradientTransformation] | None = None
    """Makes an optimiser from a learning rate; None: `usual_optimizer`, on gradients clipped to `max_grad_norm`."""

    @abc.abstractmethod
    def targets(self, trajectory: Transition, predicted: Predictions) -> Targets:
        """Target values and advantages of a trajectory; no gradient flows through `predicted`."""

    @abc.abstractmethod
    def usual_optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        """The optimiser that is used if `optimizer` is None."""

    def __post_init__(self):
        if self.unroll < 1:
            raise AlgorithmError(f"{type(self).__name__}(unroll={self.unroll}) must be at least 1.")

    def init(self, env: Env, key: Key) -> Carry:
        key_network, key_env = jax.random.split(key)
        network = networks.freeze(self.network(env.observation_space, env.action_space, key_network))
        params = Params(network, ops.initial_moments(env.observation_space) if self.normalise_obs else None)
        optimizer = self.make_optimizer(self.learning_rate).init(network)
        train = Train(params, optimizer, jnp.zeros((), jnp.int32))
        return Carry(train, begin(env, key_env, self.initial_state(params)))

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

    def iterate(self, env: Env, carry: Carry, key: Key) -> tuple[Carry, dict[str, jax.Array]]:
        params = self.policy(carry.train)
        end, trajectory, episodes = rollout(
            env, self.act, params, carry.position, key, self.unroll, fresh=self.initial_state(params)
        )
        gradient, metrics = self.gradient(params, trajectory, carry.position.memory)
        steps = count_steps(trajectory.reward.size, trajectory.reward.dtype)
        train, step_metrics = self.update(carry.train, all_reduce(gradient), steps)
        return Carry(train, end), {**episodes, **metrics, **step_metrics}

    @fragment("gradient")
    def gradient(self, params: Params, trajectory: Transition, memory: PyTree):
        """The gradient of one trajectory, and metrics; `memory` is the memory of the network before the first step."""
        grads, metrics = jax.grad(self.loss, has_aux=True)(params.network, params.moments, trajectory, memory)
        seen = None if params.moments is None else ops.look(params.moments, trajectory.obs)
        return Gradient(grads, seen), metrics

    @fragment("update")
    def update(self, train: Train, gradient: Gradient, steps: jax.Array):
        """Apply a gradient that is averaged over all shards; `steps` counts the environment steps of all shards."""
        learning_rate = anneal(self.learning_rate, self.total_steps, train.iterations, steps)
        network, moments = train.params
        changes, optimizer = self.make_optimizer(learning_rate).update(gradient.network, train.optimizer, network)
        if moments is not None:
            moments = ops.merge_moments(moments, gradient.seen, steps)
        params = Params(optax.apply_updates(network, changes), moments)
        metrics = {"grad_norm": optax.tree.norm(gradient.network), "learning_rate": learning_rate}
        return Train(params, optimizer, train.iterations + 1), metrics

    def loss(self, network: PyTree, moments: PyTree, trajectory: Transition, memory: PyTree):
        """The loss, and metrics: policy gradient, squared error of the critic and entropy bonus, as means over the trajectory."""
        predicted = self.predict(Params(network, moments), trajectory, memory)
        targets = self.targets(trajectory, jax.lax.stop_gradient(predicted))
        policy_loss = -jnp.mean(predicted.pi.log_prob(trajectory.action) * targets.advantage)
        value_loss = 0.5 * jnp.mean((predicted.value_tm1 - targets.value) ** 2)
        entropy = jnp.mean(predicted.pi.entropy())
        loss = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        metrics = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return loss, metrics | targets.metrics

    def predict(self, params: Params, trajectory: Transition, memory: PyTree) -> Predictions:
        """Apply the network at each step of a trajectory; no gradient flows through the value of a successor."""
        apply, fresh = functools.partial(self.apply, params), self.initial_state(params)
        along = jax.vmap(lambda obs, last, memory: unfold(apply, obs, last, memory, fresh), (1, 1, 0), 1)
        pi, value_tm1, memories = along(trajectory.obs, trajectory.last, memory)
        _, value_t, _ = jax.vmap(jax.vmap(apply))(trajectory.next_obs, memories)
        return Predictions(pi, value_tm1, jax.lax.stop_gradient(value_t))

    def apply(self, params: Params, obs: PyTree, memory: PyTree):
        """Apply the network to one observation; returns pi, value and memory (None if the network has no memory)."""
        if params.moments is not None:
            obs = ops.normalise(params.moments, obs)
        network = networks.thaw(params.network)
        return (*network(obs), None) if memory is None else network(obs, memory)

    def make_optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        if self.optimizer is not None:
            return self.optimizer(learning_rate)
        return ops.clipped(self.usual_optimizer(learning_rate), self.max_grad_norm)
