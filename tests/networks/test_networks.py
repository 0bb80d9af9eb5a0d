"""How the built-in networks read observations, and which spaces and masks they refuse."""

import functools
from collections import OrderedDict

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from choreo import networks
from choreo.errors import AlgorithmError

VECTOR = spaces.Box(-1.0, 1.0, (2,), np.float32)
TWO = spaces.Discrete(2)


def test_a_discrete_observation_becomes_one_hot():
    encode = networks.encoder(spaces.Discrete(5))
    assert encode(jnp.int32(3)).tolist() == [0, 0, 0, 1, 0] and encode.size == 5
    encode = networks.encoder(spaces.Discrete(3, start=-1))
    assert encode(jnp.int32(-1)).tolist() == [1, 0, 0]


def test_each_part_of_a_multi_discrete_observation_becomes_one_hot():
    encode = networks.encoder(spaces.MultiDiscrete([2, 3], start=[5, -1]))
    assert encode(jnp.array([6, 1], jnp.int32)).tolist() == [0, 1, 0, 0, 1]
    encode = networks.encoder(spaces.MultiDiscrete([[2, 1], [1, 2]]))
    assert encode(jnp.array([[0, 0], [0, 1]], jnp.int32)).tolist() == [1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("space", "largest"),
    [
        (spaces.Box(0, 255, (2, 2), np.uint8), 1.0),
        (spaces.Box(0, 1, (2, 2), np.uint8), 255.0),  # planes of zeros and ones are not scaled
        (spaces.Box(0, 255, (2, 2), np.int32), 255.0),
    ],
)
def test_only_bytes_with_a_range_of_0_to_255_are_scaled_to_one(space, largest):
    encode = networks.encoder(space)
    assert encode(jnp.full((2, 2), 255, space.dtype)).tolist() == [largest] * 4
    # If a network gets floats in place of bytes, running statistics have normalised them already. So the floats are not scaled.
    assert encode(jnp.full((2, 2), 2.0)).tolist() == [2.0] * 4


def test_leaves_are_encoded_in_the_order_of_jax_tree():
    """The Dict space may have a different order, but observations are plain dicts, and JAX sorts the keys of a dict."""
    space = spaces.Dict(OrderedDict(b=TWO, a=spaces.Tuple([VECTOR, spaces.MultiBinary(1)]), action_mask=TWO))
    obs = {"b": jnp.int32(1), "a": (jnp.array([0.5, -0.5]), jnp.ones(1, jnp.int8)), "action_mask": jnp.int32(0)}
    encode = networks.encoder(space)
    assert encode(obs).tolist() == [0.5, -0.5, 1, 0, 1] and encode.size == 5


def test_a_mask_is_read_from_any_kind_of_number():
    for mask in (
        jnp.array([1, 0], jnp.int8),
        jnp.array([1.0, 0.0]),
        jnp.array([True, False]),
        (jnp.ones(1), jnp.zeros(1)),
    ):
        assert networks.action_mask({"action_mask": mask}).tolist() == [True, False]
    assert networks.action_mask({"obs": jnp.ones(2)}) is None
    assert networks.action_mask(jnp.ones(2)) is None


def masked_by(mask: gymnasium.Space, obs: gymnasium.Space = VECTOR) -> spaces.Dict:
    return spaces.Dict(action_mask=mask, obs=obs)


REFUSED = [
    (VECTOR, spaces.Box(-1, 1, (2, 2)), "spaces with one axis, not in Box", "Flatten the action"),
    (VECTOR, spaces.MultiBinary([2, 2]), "spaces with one axis, not in MultiBinary", "Flatten the action"),
    (VECTOR, spaces.Dict(a=TWO), "spaces with one axis, not in Dict", "Flatten the action"),
    (spaces.Text(5), TWO, r"cannot read `obs`, which is Text", "Encode it as numbers"),
    (
        spaces.Dict(a=spaces.Tuple([VECTOR, spaces.Sequence(TWO)])),
        TWO,
        r"cannot read `obs\['a'\]\[1\]`, which is Sequence",
        "Encode it as numbers",
    ),
    (spaces.Dict(action_mask=spaces.MultiBinary(2)), TWO, "There is nothing to observe", "Add a part"),
    (masked_by(spaces.MultiBinary(3)), TWO, r"does not fit the actions Discrete\(2\): it needs 2", r"MultiBinary(2)"),
    (masked_by(TWO), TWO, r"The action mask Discrete\(2\) does not fit", r"MultiBinary(2)"),
    (masked_by(spaces.MultiBinary(3)), spaces.MultiDiscrete([2, 3]), "it needs 5 numbers", r"MultiBinary(5)"),
    (masked_by(spaces.MultiBinary(2)), spaces.MultiBinary(2), "not for MultiBinary", "a different name"),
    (masked_by(spaces.MultiBinary(2)), VECTOR, "not for Box", "a different name"),
]
"""In each row: the observation space, the action space, a pattern of the message, and a part of the advice in the message."""


@pytest.mark.parametrize("network", [networks.mlp, networks.lstm], ids=["mlp", "lstm"])
@pytest.mark.parametrize(("observed", "acted", "what", "fix"), REFUSED, ids=range(len(REFUSED)))
def test_spaces_and_masks_that_do_not_fit_are_refused(network, observed, acted, what, fix):
    with pytest.raises(AlgorithmError, match=what) as error:
        jax.eval_shape(functools.partial(network, observed, acted), jax.random.key(0))
    assert fix in error.value.fix


def test_images_may_come_with_a_mask():
    image, mask = spaces.Box(0, 255, (36, 36, 1), np.uint8), jnp.array([0, 1], jnp.int8)
    build = functools.partial(networks.atari_cnn, masked_by(spaces.MultiBinary(2), image), TWO, width=4)
    pi, _ = jax.jit(lambda obs: build(jax.random.key(0))(obs))(
        {"action_mask": mask, "obs": jnp.zeros((36, 36, 1), np.uint8)}
    )
    assert pi.mode() == 1 and pi.entropy() == 0


def test_images_too_small_for_the_convolutions_are_refused():
    small = spaces.Box(0, 255, (20, 20, 4), np.uint8)
    with pytest.raises(AlgorithmError, match="at least 36 x 36"):
        jax.eval_shape(functools.partial(networks.atari_cnn, small, TWO), jax.random.key(0))
