"""The gradient of REINFORCE, and episodes that are longer than the unroll.

The tests that A2C, IMPALA and REINFORCE share are in test_one_gradient.py.
"""

import jax
import numpy as np
import optax

from algos.one_gradient import SMALL, check_sgd_step, first_value, gae_by_hand, learn_task, trajectory_of
from choreo import envs
from choreo.algos.reinforce import REINFORCE


def test_an_episode_longer_than_the_unroll_is_bootstrapped_from_the_baseline():
    """With a reward of 1 in every step, the value is 1 / (1 - gamma) = 5, although an unroll has only 3 steps."""
    algo = REINFORCE(unroll=3, learning_rate=1e-2, gamma=0.8, entropy_coef=0.0, max_grad_norm=10.0, network=SMALL)
    carry, _ = learn_task(algo, "income", 400)
    np.testing.assert_allclose(first_value(carry), 5.0, rtol=0.02)


def test_one_sgd_step_follows_the_gradient_of_the_textbook_loss():
    """A return minus the baseline is the generalised advantage with lambda = 1."""
    with jax.enable_x64(True):
        algo = REINFORCE(unroll=16, learning_rate=0.1, network=SMALL, optimizer=optax.sgd)
        carry, trajectory = trajectory_of(algo, envs.make("jax:CartPole-v1", num_envs=4))
        advantage, value = gae_by_hand(carry, trajectory, algo.gamma, 1.0)
        check_sgd_step(algo, carry.train, trajectory, target=value + advantage, advantage=advantage)
