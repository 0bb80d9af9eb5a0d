"""Soft actor-critic (Haarnoja et al. 2018), for actions within bounds.

This is the version of the second paper, "Soft actor-critic algorithms and applications": two critics, no network for the value
of states, and a learned temperature. Deviation from the paper: one optimiser step updates policy, critics and temperature
together, so the gradient of the policy uses the critics from before the update.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from choreo import networks
from choreo.algos.replayed_control import Metrics, Network, ReplayedControl, Train, mean_losses, values
from choreo.buffers import StoredStep
from choreo.errors import AlgorithmError
from choreo.types import Key, PyTree


class Learned(NamedTuple):
    """Everything that gradients change."""

    policy: PyTree
    critics: PyTree
    log_temperature: jax.Array
    """Logarithm of the temperature. The temperature is the reward for one nat of entropy."""


@dataclass(frozen=True, kw_only=True)
class SAC(ReplayedControl):
    """Soft actor-critic: continuous actions, and a reward for the entropy of the policy."""

    learning_rate: float = 3e-4
    network: networks.Factory = networks.squashed
    temperature: float | None = None
    """The reward for one nat of entropy; None: the temperature is learned, so that the entropy approaches `target_entropy`."""
    target_entropy: float = -1.0
    """Wanted entropy per dimension of an action, in nats, for actions scaled to [-1, 1]."""

    def __post_init__(self):
        super().__post_init__()
        if self.temperature is not None and self.temperature < 0:
            raise AlgorithmError(f"SAC(temperature={self.temperature}) must not be negative.")

    def choose(self, policy: Any, obs: PyTree, key: Key | None) -> jax.Array:
        pi = policy(obs)
        return pi.mode() if key is None else pi.sample(key)

    def start(self, network: Network) -> tuple[Learned, PyTree, Any]:
        """As in `ReplayedControl`; only the critics have target networks."""
        learned = Learned(*network, jnp.zeros((), jnp.result_type(float)))
        return learned, jax.tree.map(jnp.copy, network.critics), self.make_optimizer().init(learned)

    def update(self, train: Train, steps: StoredStep, key: Key) -> tuple[Train, Metrics]:
        """One gradient step of algorithm 1 of the paper, with one optimiser step for policy, critics and temperature together."""
        gradient, metrics = jax.grad(self.loss, has_aux=True)(train.learned, train.target, steps, key)
        learned, optimizer = self.descend(gradient, train.learned, train.optimizer)
        target = self.follow(train.target, learned.critics)
        return train._replace(learned=learned, target=target, optimizer=optimizer), metrics

    def loss(self, learned: Learned, target: PyTree, steps: StoredStep, key: Key) -> tuple[jax.Array, Metrics]:
        """The sum of the three mean losses of a batch, and the metrics. Each parameter gets its gradient from one loss only."""
        metrics = mean_losses(lambda item, key: self.item_losses(learned, target, item, key), steps, key)
        return metrics["critic_loss"] + metrics["policy_loss"] + metrics["temperature_loss"], metrics

    def item_losses(self, learned: Learned, target: PyTree, steps: StoredStep, key: Key) -> Metrics:
        """The losses of one item [step, ...], and its other metrics."""
        item, network = self.item(steps), networks.thaw(Network(learned.policy, learned.critics))
        fixed = jax.lax.stop_gradient(network)
        temperature = self.temperature_of(learned)
        key_next, key_now = jax.random.split(key)

        # Equations 3 and 5: the soft value of the successor from one sample and the smaller of two target critics.
        next_action, next_log_prob = fixed.policy(item.next_obs).sample_and_log_prob(key_next)
        value = jnp.min(values(target, item.next_obs, next_action)) - temperature * next_log_prob
        q = values(network.critics, item.obs, item.action)
        wanted = jax.lax.stop_gradient(item.reward + item.discount * value)
        critic_loss = item.weight * 0.5 * jnp.sum((q - wanted) ** 2)

        # Equation 9.
        action, log_prob = network.policy(item.obs).sample_and_log_prob(key_now)
        policy_loss = temperature * log_prob - jnp.min(values(fixed.critics, item.obs, action))

        # Equation 18, for the logarithm of the temperature. The temperature rises while the entropy is too small.
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
