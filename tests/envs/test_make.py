"""Environments by name, and errors for wrong names and settings."""

import jax
import jax.numpy as jnp
import pytest

from choreo import envs
from choreo.errors import EnvError, UnknownNameError
from choreo.testing import check_env


@pytest.mark.parametrize("name", envs.names())
def test_built_in_environments_keep_the_contract(name):
    check_env(envs.make(name, num_envs=4))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "jax:Pendulum-v1" else [pytest.mark.long]) for name in envs.names()],
)
def test_built_in_environments_keep_the_contract_in_float64(name):
    with jax.enable_x64(True):
        env = envs.make(name, num_envs=4)
        check_env(env)
        _, obs = env.reset(env.keys(jax.random.key(0)))
        assert obs.dtype == jnp.float64


def test_environments_with_equal_settings_are_equal_and_have_equal_hashes():
    env = envs.make("jax:CartPole-v1", num_envs=4)
    assert env == envs.make("jax:CartPole-v1", num_envs=4)
    assert hash(env) == hash(envs.make("jax:CartPole-v1", num_envs=4))
    assert env.with_num_envs(8) == envs.make("jax:CartPole-v1", num_envs=8)
    assert env.name == "jax:CartPole-v1"


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match="no environment `jax:CartPole-v2`") as error:
        envs.make("jax:CartPole-v2", num_envs=4)
    assert "Did you mean `jax:CartPole-v1`" in str(error.value)


def test_an_unknown_setting_is_named():
    with pytest.raises(EnvError, match="no setting `gravity`"):
        envs.make("jax:CartPole-v1", num_envs=4, gravity=1.0)


def test_zero_environments_are_refused():
    with pytest.raises(EnvError, match="num_envs=0"):
        envs.make("jax:CartPole-v1", num_envs=0)
