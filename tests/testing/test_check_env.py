"""`check_env` accepts a correct environment, and names the promise that each broken environment breaks."""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
import pytest

from choreo import envs
from choreo.envs import VmapEnv
from choreo.errors import EnvError
from choreo.testing import check_env


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A correct environment, except that the function `SPOILS[spoil]` changes its TimeSteps."""

    good: VmapEnv
    spoil: str

    def __getattr__(self, part):
        return getattr(self.good, part)

    def with_num_envs(self, num_envs):
        return dataclasses.replace(self, good=self.good.with_num_envs(num_envs))

    def step(self, state, action):
        state, ts = self.good.step(state, action)
        return state, SPOILS[self.spoil](ts)


def _no_last(ts):
    return ts._replace(last=jnp.zeros_like(ts.last))


# Each key except "nothing" is a regular expression that must match the error of `check_env`.
SPOILS = {
    "nothing": lambda ts: ts,
    "differs from `obs`": lambda ts: ts._replace(next_obs=ts.next_obs + 0.01),
    "`next_obs` differs from `obs` in a step that is not": _no_last,
    "`discount` is 0 in a step": lambda ts: ts._replace(discount=jnp.zeros_like(ts.discount)),
    "`discount` is neither": lambda ts: ts._replace(discount=ts.discount * 0.99),
    "sum of rewards": lambda ts: ts._replace(reward=ts.reward * 2),
    "count the steps": lambda ts: ts._replace(info=ts.info | {"episode_length": ts.info["episode_length"] + 1}),
    "`info` lacks `episode_return`": lambda ts: ts._replace(info={"episode_length": ts.info["episode_length"]}),
    "`reward` is float16": lambda ts: ts._replace(reward=ts.reward.astype(jnp.float16)),
    "observations of type": lambda ts: ts._replace(obs=ts.obs.astype(jnp.float16)),
    r"observations \[4, 3\], not \[4, 4\]": lambda ts: ts._replace(obs=ts.obs[:, :3]),
    "observations outside": lambda ts: ts._replace(obs=ts.obs + 100, next_obs=ts.next_obs + 100),
    "depend on the other environments": lambda ts: ts._replace(
        obs=ts.obs + 0.01 * ts.reward[:, None] * jnp.arange(4.0)[: len(ts.reward), None],
        next_obs=ts.next_obs + 0.01 * ts.reward[:, None] * jnp.arange(4.0)[: len(ts.reward), None],
    ),
    "depend on the number of environments": lambda ts: ts._replace(
        obs=ts.obs + 0.01 * len(ts.reward), next_obs=ts.next_obs + 0.01 * len(ts.reward)
    ),
}


@pytest.mark.parametrize("spoil", [s for s in SPOILS if s != "nothing"])
def test_the_error_names_the_broken_promise(spoil):
    with pytest.raises(EnvError, match=spoil):
        check_env(Broken(good=envs.make("jax:CartPole-v1", num_envs=4), spoil=spoil), steps=60)


def test_an_environment_that_breaks_no_promise_passes():
    check_env(Broken(good=envs.make("jax:CartPole-v1", num_envs=4), spoil="nothing"), steps=60)


def test_missing_attributes_are_named():
    @dataclass(frozen=True)
    class Partial:
        num_envs: int = 4
        name: str = "partial"

    with pytest.raises(EnvError, match="`Partial` lacks `observation_space`, `action_space`"):
        check_env(Partial())  # pyright: ignore[reportArgumentType]


def test_an_environment_that_ignores_its_keys_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class SameStart(Broken):
        def reset(self, keys):
            state, obs = self.good.reset(keys)
            return state, jnp.broadcast_to(obs[:1], obs.shape)

    with pytest.raises(EnvError, match="all environments begin alike"):
        check_env(SameStart(good=envs.make("jax:CartPole-v1", num_envs=4), spoil="nothing"), steps=60)


def test_a_state_that_changes_its_type_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Growing(Broken):
        def step(self, state, action):
            state, ts = self.good.step(state, action)
            return state._replace(episode_length=state.episode_length.astype(jnp.float32)), ts

    with pytest.raises(EnvError, match="same type of state"):
        check_env(Growing(good=envs.make("jax:CartPole-v1", num_envs=4), spoil="nothing"), steps=60)
