"""Networks for continuous actions refuse some action spaces, all action masks, and zero critics. Each error gives the reason."""

import functools

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces

from choreo.errors import AlgorithmError
from choreo.networks import deterministic


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (2,), np.float32),
        spaces.Box(np.array([0, 1], np.float32), np.array([1, 1], np.float32)),
        spaces.Box(-1.0, 1.0, (), np.float32),
    ],
)
def test_a_box_with_infinite_or_equal_bounds_or_without_an_axis_is_refused(space: gymnasium.Space):
    with pytest.raises(AlgorithmError, match="a Box with finite bounds, the lower one below the upper one"):
        deterministic(spaces.Discrete(2), space, jax.random.key(0))


def test_integer_actions_are_refused():
    with pytest.raises(AlgorithmError, match="real numbers in a Box"):
        deterministic(spaces.Discrete(2), spaces.Box(0, 5, (2,), np.int32), jax.random.key(0))


def test_a_mask_of_continuous_actions_is_refused():
    masked = spaces.Dict(action_mask=spaces.MultiBinary(2), place=spaces.Discrete(2))
    with pytest.raises(AlgorithmError, match="An action mask is for Discrete and MultiDiscrete actions"):
        deterministic(masked, spaces.Box(-1.0, 1.0, (2,), np.float32), jax.random.key(0))


def test_zero_critics_are_refused():
    with pytest.raises(AlgorithmError, match="critics=0 has nothing to learn from"):
        jax.eval_shape(
            functools.partial(deterministic, spaces.Discrete(2), spaces.Box(-1.0, 1.0), critics=0), jax.random.key(0)
        )
