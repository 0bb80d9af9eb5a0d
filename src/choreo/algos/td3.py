"""Twin delayed deterministic policy gradient, TD3 (Fujimoto et al. 2018), for actions within bounds.

DDPG overestimates values. TD3 is DDPG with three changes that reduce this error: TD3 uses the smaller value of two critics, smooths
the targets over nearby actions, and updates the policy less often than the critics.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from choreo import networks
from choreo.algos.replayed_control import Metrics, Network, ReplayedControl, Train, mean_losses, noisy, values
from choreo.buffers import StoredStep
from choreo.errors import AlgorithmError
from choreo.types import Key, PyTree


@dataclass(frozen=True, kw_only=True)
class TD3(ReplayedControl):
    """Twin delayed DDPG: two critics, smoothed targets, a policy that is updated less often."""

    noise: float = 0.1
    """Standard deviation of the exploration noise on actions, in units of half the width of the action space."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the actions of the target policy, in the same units."""
    target_noise_clip: float = 0.5
    """The noise on the actions of the target policy is clipped to plus or minus this bound, in the same units."""
    policy_delay: int = 2
    """Number of updates of the critics for each update of the policy and the target networks."""

    def __post_init__(self):
        super().__post_init__()
        if self.policy_delay < 1:
            raise AlgorithmError(f"TD3(policy_delay={self.policy_delay}) must be at least 1.")

    def choose(self, policy: Any, obs: PyTree, key: Key | None) -> jax.Array:
        return noisy(policy, obs, key, self.noise)

    def start(self, network: Network) -> tuple[Network, Network, Any]:
        """As in `ReplayedControl`; policy and critics have separate optimisers, because the policy is updated less often."""
        optimizers = tuple(map(self.make_optimizer().init, (network.policy, network.critics)))
        return network, jax.tree.map(jnp.copy, network), optimizers

    def update(self, train: Train, steps: StoredStep, key: Key) -> tuple[Train, Metrics]:
        """Algorithm 1 of the paper, from the point where a batch has been drawn."""
        network, (policy_state, critics_state) = train.learned, train.optimizer
        gradient, metrics = jax.grad(self.critic_loss, has_aux=True)(network.critics, train.target, steps, key)
        critics, critics_state = self.descend(gradient, network.critics, critics_state)
        due = (train.updates + 1) % self.policy_delay == 0
        # Only the gradient, which takes most of the time, is inside of `cond`. `descend` is outside, because it calls `all_reduce`,
        # in which all learner shards must take part.
        gradient = jax.lax.cond(
            due, jax.grad(self.policy_loss), lambda policy, *_: optax.tree.zeros_like(policy),
            network.policy, critics, steps.obs,
        )  # fmt: skip
        policy, new_policy_state = self.descend(gradient, network.policy, policy_state)
        after = (policy, self.follow(train.target, Network(policy, critics)), new_policy_state)
        before = (network.policy, train.target, policy_state)
        policy, target, policy_state = jax.tree.map(lambda new, old: jnp.where(due, new, old), after, before)
        learned, optimizer = Network(policy, critics), (policy_state, critics_state)
        return train._replace(learned=learned, target=target, optimizer=optimizer), metrics

    def critic_loss(self, critics: PyTree, target: Network, steps: StoredStep, key: Key) -> tuple[jax.Array, Metrics]:
        """The mean loss of the critics over a batch, and the metrics."""
        metrics = mean_losses(lambda item, key: self.item_losses(critics, target, item, key), steps, key)
        return metrics["critic_loss"], metrics

    def item_losses(self, critics: PyTree, target: Network, steps: StoredStep, key: Key) -> Metrics:
        """The loss of the critics for one item [step, ...], and the value `q` that each critic gives to the item's action."""
        item, target = self.item(steps), networks.thaw(target)
        # Equation 14: the action of the target policy, plus clipped noise.
        noise = self.target_noise * jax.random.normal(key, (item.action.size,), item.action.dtype)
        noise = jnp.clip(noise, -self.target_noise_clip, self.target_noise_clip)
        next_action = target.policy.bounds.add(target.policy(item.next_obs), noise)
        # Equation 10: the smaller of two target critics.
        wanted = item.reward + item.discount * jnp.min(values(target.critics, item.next_obs, next_action))
        q = values(critics, item.obs, item.action)
        return {"critic_loss": item.weight * 0.5 * jnp.sum((q - wanted) ** 2), "q": q}

    def policy_loss(self, policy: PyTree, critics: PyTree, obs: PyTree) -> jax.Array:
        """The mean value that the first critic gives to the policy's actions, negated (algorithm 1); `obs` is [item, step, ...]."""
        policy, critic = networks.thaw(policy), networks.thaw(critics)[0]
        first = jax.tree.map(lambda x: x[:, 0], obs)
        return -jnp.mean(jax.vmap(lambda obs: critic(obs, policy(obs)))(first))
