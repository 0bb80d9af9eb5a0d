"""The adapter for gymnax. These tests are skipped if gymnax is not installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from choreo import envs
from choreo.envs import gymnax as adapter
from choreo.errors import EnvError, UnknownNameError
from choreo.testing import check_env

gymnax = pytest.importorskip("gymnax", reason="the extra choreo[gymnax] is not installed")


@pytest.fixture(autouse=True)
def gymnax_promotes_types():
    """gymnax relies on implicit type promotion, which our tests forbid elsewhere."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(
    "name", ["Pendulum-v1", "Breakout-MinAtar", pytest.param("FourRooms-misc", marks=pytest.mark.long)]
)
def test_environments_of_gymnax_keep_the_contract(name):
    check_env(envs.make(f"gymnax:{name}", num_envs=3), steps=60)


def test_cartpole_of_gymnax_equals_ours():
    """Both environments begin in the same state and are given the same actions."""
    ours, theirs = envs.make("jax:CartPole-v1", 1).env, adapter.make_gymnax("gymnax:CartPole-v1")
    state, _ = ours.reset(jax.random.key(0))
    other = gymnax.environments.classic_control.cartpole.EnvState(**state._asdict(), time=jnp.int32(0))
    for t in range(60):
        action, key = jnp.int32(t % 3 == 0), jax.random.key(t)
        state, one = ours.step(state, action, key)
        other, two = theirs.step(other, action, key)
        np.testing.assert_allclose(one.obs, two.obs, rtol=1e-4, atol=1e-5)
        assert bool(one.terminated) == bool(two.terminated)
        if one.terminated:
            return
    raise AssertionError("the pole never fell")


def test_the_time_limit_of_gymnax_truncates():
    env = envs.make("gymnax:Pendulum-v1", num_envs=2, max_steps_in_episode=4)
    state, _ = env.reset(env.keys(jax.random.key(0)))
    for _ in range(4):
        state, ts = env.step(state, jnp.zeros((2, 1)))
    assert ts.last.all() and (ts.discount == 1).all()
    assert not (ts.obs == ts.next_obs).all()


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match="no environment `gymnax:Breakout`") as error:
        envs.make("gymnax:Breakout", num_envs=2)
    assert "`gymnax:Breakout-MinAtar`" in str(error.value)


def test_an_unknown_parameter_is_named():
    with pytest.raises(EnvError, match="no parameter `mass`") as error:
        envs.make("gymnax:CartPole-v1", num_envs=2, mass=2.0)
    assert "masspole" in str(error.value)


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gymnax", None)
    with pytest.raises(EnvError, match="gymnax cannot be imported") as error:
        envs.make("gymnax:CartPole-v1", num_envs=2)
    assert "choreo[gymnax]" in str(error.value)
