"""The number of updates in an iteration follows from the update-to-data ratio."""

import jax
import pytest

from choreo import envs
from choreo.algos import DQN, SAC
from choreo.buffers.sharded import num_updates
from choreo.errors import AlgorithmError
from choreo.roles import SHARD_AXIS

EIGHT = envs.make("jax:CartPole-v1", num_envs=8)


@pytest.mark.parametrize(
    ("ratio", "unroll", "num_envs", "updates"),
    [(1.0, 1, 8, 8), (0.25, 4, 8, 8), (2.0, 1, 1, 2), (0.1, 5, 6, 3), (1 / 3, 3, 7, 7), (0.3333333333, 3, 7, 7)],
)
def test_the_number_of_updates_is_the_ratio_times_the_steps(ratio, unroll, num_envs, updates):
    assert num_updates(ratio, unroll, envs.make("jax:CartPole-v1", num_envs=num_envs)) == updates


def test_the_ratio_refers_to_the_steps_of_all_learner_shards():
    """`iterate` is given only the environments of one shard, but the number of updates follows from the steps of all shards."""
    found = []

    def one_shard(x):
        found.append(num_updates(0.25, 4, EIGHT.with_num_envs(4)))
        return x

    jax.vmap(one_shard, axis_name=SHARD_AXIS)(jax.numpy.zeros(2))
    assert found == [num_updates(0.25, 4, EIGHT)] == [8]


@pytest.mark.parametrize(
    ("algo", "message", "suggested"),
    [
        (
            SAC(updates_per_step=0.3),
            "updates_per_step=0.3 gives 2.4 updates in an iteration of 8 steps (unroll=1 x 8",
            0.25,
        ),
        (SAC(updates_per_step=0.01), "gives 0.08 updates in an iteration of 8 steps", 0.125),
        (DQN(updates_per_step=1 / 3), "gives 10.6667 updates in an iteration of 32 steps", 0.34375),
    ],
)
def test_the_number_of_updates_must_be_whole(algo, message, suggested):
    env = envs.make("jax:Pendulum-v1" if isinstance(algo, SAC) else "jax:CartPole-v1", num_envs=8)
    with pytest.raises(AlgorithmError) as error:
        algo.init(env, jax.random.key(0))
    assert message in str(error.value)
    assert f"Use updates_per_step={suggested}, which gives {round(suggested * 8 * algo.unroll)};" in str(error.value)
