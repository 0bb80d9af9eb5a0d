"""Make a batch of environments from one environment written in JAX.

An author writes a `JaxEnv`: the dynamics of one environment. `VmapEnv` adds automatic resets, truncation at the time limit and
episode totals, and maps over environments. `VmapEnv` calls its fragments under `vmap`, and has no `vmap` inside a fragment. So the
traced program shows that environments are independent of each other.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gymnasium
import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from choreo.envs.base import TimeStep, check_kind, check_num_envs
from choreo.roles import fragment
from choreo.types import Key, PyTree

source_info_util.register_exclusion(__file__)


class EnvStep(NamedTuple):
    """The result of one step of one environment's dynamics."""

    obs: PyTree
    """Observation after the step; at the end of an episode, its last observation."""
    reward: jax.Array
    """Reward of the step, a scalar."""
    terminated: jax.Array
    """True if the task itself ended, so that there is no future reward."""
    truncated: jax.Array | bool = False
    """True if the environment ended the episode for any other reason. `VmapEnv` itself truncates at `time_limit`."""


@runtime_checkable
class JaxEnv(Protocol):
    """One environment, written in JAX: a frozen, hashable value."""

    @property
    def name(self) -> str:
        """The name for messages and run folders."""
        ...

    @property
    def observation_space(self) -> gymnasium.Space:
        """The space of observations."""
        ...

    @property
    def action_space(self) -> gymnasium.Space:
        """The space of actions."""
        ...

    @property
    def time_limit(self) -> int | None:
        """Steps after which an episode is truncated; None: never."""
        ...

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Begin an episode; returns (state, observation)."""
        ...

    def step(self, state: PyTree, action: jax.Array, key: Key) -> tuple[PyTree, EnvStep]:
        """Take one step."""
        ...


class VmapState(NamedTuple):
    """The state of each environment, and its episode totals."""

    inner: PyTree
    """The state that the `JaxEnv` returned."""
    key: Key
    """A random key for each environment."""
    episode_return: jax.Array
    """Sum of rewards of the running episode."""
    episode_length: jax.Array
    """Steps of the running episode."""


@dataclass(frozen=True, kw_only=True)
class VmapEnv:
    """`num_envs` copies of a `JaxEnv`."""

    env: JaxEnv
    """The dynamics of one environment."""
    num_envs: int
    """How many environments step together."""

    def __post_init__(self):
        check_num_envs(self.name, self.num_envs)

    @property
    def name(self) -> str:
        return self.env.name

    @property
    def observation_space(self) -> gymnasium.Space:
        return self.env.observation_space

    @property
    def action_space(self) -> gymnasium.Space:
        return self.env.action_space

    def keys(self, key: Key) -> Key:
        return jax.random.split(key, self.num_envs)

    def reset(self, keys: Key) -> tuple[VmapState, PyTree]:
        return jax.vmap(functools.partial(reset_one, self.env))(keys)

    def step(self, state: VmapState, action: jax.Array) -> tuple[VmapState, TimeStep]:
        check_kind(self.action_space, action, self.name)
        return jax.vmap(functools.partial(step_one, self.env))(state, action)

    def with_num_envs(self, num_envs: int) -> "VmapEnv":
        return dataclasses.replace(self, num_envs=num_envs)


@fragment("env")
def reset_one(env: JaxEnv, key: Key) -> tuple[VmapState, PyTree]:
    """Begin the first episode of one environment."""
    key, key_reset = jax.random.split(key)
    inner, obs = env.reset(key_reset)
    return VmapState(inner, key, jnp.zeros((), _float()), jnp.zeros((), jnp.int32)), obs


@fragment("env")
def step_one(env: JaxEnv, state: VmapState, action: jax.Array) -> tuple[VmapState, TimeStep]:
    """Take one step in one environment, and begin its next episode if this one ended."""
    key, key_step, key_reset = jax.random.split(state.key, 3)
    inner, step = env.step(state.inner, clip_to(env.action_space, action), key_step)
    reward = step.reward.astype(_float())
    episode_return, episode_length = state.episode_return + reward, state.episode_length + 1
    out_of_time = episode_length >= env.time_limit if env.time_limit else False
    last = step.terminated | step.truncated | out_of_time
    info = {"episode_return": episode_return, "episode_length": episode_length}

    # Always compute the reset: under vmap, a `cond` would become this select anyway.
    fresh, first_obs = env.reset(key_reset)
    inner, obs, episode_return, episode_length = jax.tree.map(
        lambda new, old: jnp.where(last, new, old),
        (fresh, first_obs, jnp.zeros_like(episode_return), jnp.zeros_like(episode_length)),
        (inner, step.obs, episode_return, episode_length),
    )
    discount = 1 - step.terminated.astype(_float())
    state = VmapState(inner, key, episode_return, episode_length)
    return state, TimeStep(obs, reward, discount, last, step.obs, info)


def clip_to(space: gymnasium.Space, action: jax.Array) -> jax.Array:
    """The action clipped to a Box; actions of other spaces are returned unchanged."""
    if not isinstance(space, gymnasium.spaces.Box):
        return action
    return jnp.clip(action, jnp.asarray(space.low, action.dtype), jnp.asarray(space.high, action.dtype))


def _float() -> Any:
    return jnp.result_type(float)  # float64 where the user enabled it
