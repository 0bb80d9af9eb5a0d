"""A2C's gradient against a direct computation, and its optimiser.

The tests that A2C, IMPALA and REINFORCE share are in test_one_gradient.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from algos.one_gradient import SMALL, check_sgd_step, gae_by_hand, trajectory_of
from algos.toys import Aim, batch
from choreo import envs
from choreo.algos.a2c import A2C
from choreo.algos.one_gradient import Gradient


def test_one_sgd_step_follows_the_gradient_of_the_textbook_loss():
    with jax.enable_x64(True):
        algo = A2C(unroll=16, learning_rate=0.1, gae_lambda=0.9, network=SMALL, optimizer=optax.sgd)
        carry, trajectory = trajectory_of(algo, envs.make("jax:CartPole-v1", num_envs=4))
        advantage, value = gae_by_hand(carry, trajectory, algo.gamma, 0.9)
        check_sgd_step(algo, carry.train, trajectory, target=value + advantage, advantage=advantage)


def test_update_clips_the_gradient_that_it_applies():
    algo = A2C(unroll=4, learning_rate=1.0, max_grad_norm=1e-3, network=SMALL)
    train = jax.jit(algo.init, static_argnums=0)(batch(Aim(), 8), jax.random.key(0)).train
    ones = jax.tree.map(jnp.ones_like, train.params.network)
    train, metrics = algo.update(train, Gradient(ones, None), jnp.float32(32))
    np.testing.assert_allclose(metrics["grad_norm"], sum(x.size for x in jax.tree.leaves(ones)) ** 0.5, rtol=1e-6)
    # Before the update, RMSProp's mean of squared gradients is 0 for every parameter. After the update, the sum of these means is
    # 0.01 (1 - decay) times the square of the clipped norm.
    mean_square = optax.tree.get(train.optimizer, "nu")
    np.testing.assert_allclose(sum(np.sum(x) for x in jax.tree.leaves(mean_square)), 0.01 * 1e-3**2, rtol=1e-4)
