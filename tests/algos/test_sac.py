"""SAC's losses against numbers computed by hand, and its temperature.

The tests that DDPG, TD3 and SAC share are in test_replayed_control.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from algos.continuous import lines, on_two_shards, shoot, toy, window
from algos.one_gradient import assert_shards_equal, learn
from choreo.algos.sac import SAC, Learned
from choreo.errors import AlgorithmError
from choreo.networks import Bounds, Squashed, bounds_of, squashed

SMALL = functools.partial(squashed, hidden=(32, 32))


def test_a_learned_temperature_holds_the_entropy_at_its_target():
    algo = toy(SAC, network=SMALL, target_entropy=-0.5)
    _, metrics = learn(algo, shoot(), 900, 0)
    np.testing.assert_allclose(metrics["entropy"][-200:].mean(), -0.5, atol=0.2)
    assert 0 < metrics["temperature"][-1] < 0.7 and metrics["temperature"][0] == 1


def test_a_given_temperature_is_not_learned():
    losses = SAC(temperature=0.3).item_losses(by_hand(), by_hand().critics, window(), jax.random.key(0))
    np.testing.assert_allclose(losses["temperature"], 0.3)


@dataclasses.dataclass(frozen=True)
class SamePi:
    """A policy that always returns the same distribution."""

    pi: Squashed
    bounds: Bounds

    def __call__(self, obs):
        return self.pi


jax.tree_util.register_dataclass(SamePi, ["pi"], ["bounds"])


def by_hand(*, temperature: float = 0.5) -> Learned:
    """A policy, critics and a temperature whose losses can be computed by hand."""
    one = bounds_of(spaces.Box(-1.0, 1.0, (1,), np.float32))
    pi = Squashed(jnp.array([0.3]), jnp.array([-1.0]), one)
    return Learned(SamePi(pi, one), lines(1.0, 2.0), jnp.log(jnp.float32(temperature)))


@pytest.mark.parametrize(
    ("steps", "discount"), [(window(), 0.9), (window(discount=0.0, last=True), 0.0)], ids=["goes on", "terminates"]
)
def test_losses_equal_numbers_computed_by_hand(steps, discount):
    learned, key = by_hand(), jax.random.key(3)
    losses = SAC(gamma=0.9, target_entropy=-0.2).item_losses(learned, lines(3.0, 4.0), steps, key)
    pi = learned.policy.pi
    (next_action, next_log_prob), (action, log_prob) = map(pi.sample_and_log_prob, jax.random.split(key))
    next_a, a = float(next_action[0]), float(action[0])
    value = min(3 * next_a + 0.2, 4 * next_a + 0.2) - 0.5 * float(next_log_prob)
    wanted = 1 + discount * value
    critic_loss = 0.5 * ((-0.5 + 0.1 - wanted) ** 2 + (-1.0 + 0.1 - wanted) ** 2)
    np.testing.assert_allclose(losses["critic_loss"], critic_loss, rtol=1e-5)
    policy_loss = 0.5 * float(log_prob) - min(a + 0.1, 2 * a + 0.1)
    np.testing.assert_allclose(losses["policy_loss"], policy_loss, rtol=1e-5)
    np.testing.assert_allclose(losses["temperature_loss"], np.log(0.5) * (-float(log_prob) + 0.2), rtol=1e-5)


def test_the_last_step_before_a_time_limit_has_no_critic_loss():
    losses = SAC().item_losses(by_hand(), lines(3.0, 4.0), window(last=True), jax.random.key(0))
    assert losses["critic_loss"] == 0


def test_critics_policy_and_temperature_each_depend_on_their_own_loss_only():
    """The critics get the same gradient from the critic loss as from the sum of all losses; so do policy and temperature."""
    algo, learned, target = SAC(gamma=0.9), by_hand(), lines(3.0, 4.0)

    def gradient(*names):
        def loss(learned):
            losses = algo.item_losses(learned, target, window(), jax.random.key(3))
            return functools.reduce(jnp.add, [losses[f"{name}_loss"] for name in names])

        return jax.jit(jax.grad(loss))(learned)

    everything = gradient("critic", "policy", "temperature")
    for name, part in (
        ("critic", lambda x: x.critics),
        ("policy", lambda x: x.policy),
        ("temperature", lambda x: x.log_temperature),
    ):
        for alone, summed in zip(jax.tree.leaves(gradient(name)), jax.tree.leaves(everything), strict=True):
            assert alone.shape == summed.shape
        own, joint = jax.tree.leaves(part(gradient(name))), jax.tree.leaves(part(everything))
        for x, y in zip(own, joint, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
            assert np.any(x != 0)


@pytest.mark.long  # in CI, the law matrix (tests/laws) tests this with the layout multi_learner
def test_shards_stay_equal():
    assert_shards_equal(on_two_shards(SAC(network=SMALL)))


def test_a_negative_temperature_is_refused():
    with pytest.raises(AlgorithmError, match=r"SAC\(temperature=-1.0\) must not be negative"):
        SAC(temperature=-1.0)
