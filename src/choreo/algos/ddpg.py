"""Deep deterministic policy gradient (Lillicrap et al. 2016), for actions within bounds.

Deviations from the paper: the exploration noise of each step is independent of other steps. The paper uses an
Ornstein-Uhlenbeck process, which brings no advantage (Fujimoto et al. 2018, section 6.1). There is no weight decay and no
batch normalisation. The gradient of the policy uses the critic from before the update, because one optimiser step changes
policy and critic together.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from choreo import networks
from choreo.algos.replayed_control import Metrics, Network, ReplayedControl, Train, mean_losses, noisy, values
from choreo.buffers import StoredStep
from choreo.types import Key, PyTree


@dataclass(frozen=True, kw_only=True)
class DDPG(ReplayedControl):
    """Deep deterministic policy gradient: Q-learning for continuous actions."""

    network: networks.Factory = functools.partial(networks.deterministic, critics=1)
    noise: float = 0.1
    """Standard deviation of the exploration noise on actions, in units of half the width of the action space."""

    def choose(self, policy: Any, obs: PyTree, key: Key | None) -> jax.Array:
        return noisy(policy, obs, key, self.noise)

    def start(self, network: Network) -> tuple[Network, Network, Any]:
        return network, jax.tree.map(jnp.copy, network), self.make_optimizer().init(network)

    def update(self, train: Train, steps: StoredStep, key: Key) -> tuple[Train, Metrics]:
        """Algorithm 1 of the paper, with one optimiser step for policy and critic together."""
        gradient, metrics = jax.grad(self.loss, has_aux=True)(train.learned, train.target, steps, key)
        network, optimizer = self.descend(gradient, train.learned, train.optimizer)
        return train._replace(learned=network, target=self.follow(train.target, network), optimizer=optimizer), metrics

    def loss(self, network: Network, target: Network, steps: StoredStep, key: Key) -> tuple[jax.Array, Metrics]:
        """The sum of the two mean losses of a batch, and the metrics. Each parameter gets its gradient from one loss only."""
        metrics = mean_losses(lambda item, _: self.item_losses(network, target, item), steps, key)
        return metrics["critic_loss"] + metrics["policy_loss"], metrics

    def item_losses(self, network: Network, target: Network, steps: StoredStep) -> Metrics:
        """The losses of one item [step, ...], and the value `q` of its action."""
        item, network, target = self.item(steps), networks.thaw(network), networks.thaw(target)
        # Algorithm 1: y = r + gamma Q'(s', mu'(s')), and the critic's squared error.
        value = jnp.min(values(target.critics, item.next_obs, target.policy(item.next_obs)))
        q = values(network.critics, item.obs, item.action)
        critic_loss = item.weight * 0.5 * jnp.sum((q - (item.reward + item.discount * value)) ** 2)
        # Equation 6: the gradient of Q(s, mu(s)).
        policy_loss = -jax.lax.stop_gradient(network.critics)[0](item.obs, network.policy(item.obs))
        return {"critic_loss": critic_loss, "policy_loss": policy_loss, "q": jnp.mean(q)}
