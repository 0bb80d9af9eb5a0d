"""Environments of gymnax: `gymnax:Breakout-MinAtar`. An optional extra: `pip install 'choreo[gymnax]'`.

We do not use gymnax's automatic reset, because it loses the observation after the last step of an episode. If the time limit of
gymnax ends an episode, the episode counts as truncated, not as terminated, even if the limit is part of the task (for example, a
bandit of 100 pulls).
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from choreo import static_key
from choreo.envs.vmap import EnvStep
from choreo.errors import EnvError, unknown_name
from choreo.types import Key, PyTree


def make_gymnax(name: str, **params: Any) -> "GymnaxEnv":
    """The gymnax environment `name` (`gymnax:CartPole-v1`); `params` replace its default parameters."""
    gymnax = _import_gymnax()
    env_id = name.removeprefix("gymnax:")
    if env_id not in gymnax.registered_envs:
        raise unknown_name("environment", name, [f"gymnax:{known}" for known in gymnax.registered_envs])
    _, defaults = _build(env_id)
    for param in params:
        if param not in vars(defaults):
            raise EnvError(f"`{name}` has no parameter `{param}`.", fix=f"It has: {', '.join(vars(defaults))}.")
    return GymnaxEnv(env_id=env_id, params=tuple(sorted(params.items())))


@dataclass(frozen=True, kw_only=True)
class GymnaxEnv:
    """One environment of gymnax, as a `JaxEnv`."""

    env_id: str
    """The environment's name in gymnax."""
    params: tuple[tuple[str, Any], ...] = ()
    """Parameters that replace gymnax's defaults."""

    @property
    def name(self) -> str:
        return f"gymnax:{self.env_id}"

    @property
    def time_limit(self) -> None:
        """None, because gymnax itself ends episodes at their time limit."""

    @property
    def observation_space(self) -> gymnasium.Space:
        return _spaces(self)[0]

    @property
    def action_space(self) -> gymnasium.Space:
        return _spaces(self)[1]

    def reset(self, key: Key) -> tuple[PyTree, jax.Array]:
        env, params = self._build()
        obs, state = env.reset_env(key, params)
        return _strong(state), self._observation(obs)

    def step(self, state: PyTree, action: jax.Array, key: Key) -> tuple[PyTree, EnvStep]:
        env, params = self._build()
        obs, state, reward, terminated, _ = env.step_env(key, state, action, params)
        terminated = jnp.asarray(terminated, bool)
        step = EnvStep(self._observation(obs), jnp.asarray(reward), terminated, env.is_truncated(state, params))
        return _strong(state), step

    def _observation(self, obs: jax.Array) -> jax.Array:
        dtype = np.dtype(self.observation_space.dtype)
        return obs.astype(jnp.result_type(float) if np.issubdtype(dtype, np.floating) else dtype)

    def _build(self) -> tuple[Any, Any]:
        env, params = _build(self.env_id)
        return env, params.replace(**dict(self.params))


@functools.cache
def _build(env_id: str) -> tuple[Any, Any]:
    return _import_gymnax().make(env_id)


@static_key.cache
def _spaces(one: GymnaxEnv) -> tuple[gymnasium.Space, gymnasium.Space]:
    env, params = one._build()
    # gymnax computes the bounds of its spaces with JAX; while JAX traces, they would be tracers.
    with jax.ensure_compile_time_eval():
        return _space(one.name, env.observation_space(params)), _space(one.name, env.action_space(params))


def _import_gymnax() -> Any:
    try:
        return importlib.import_module("gymnax")
    except ImportError as error:
        raise EnvError(f"gymnax cannot be imported: {error}.", fix="Run: pip install 'choreo[gymnax]'") from error


def _space(name: str, space: Any) -> gymnasium.Space:
    kind = type(space).__name__
    if kind == "Discrete":
        return gymnasium.spaces.Discrete(int(space.n))
    if kind == "Box":
        dtype = np.dtype(space.dtype)
        low, high = (np.broadcast_to(np.asarray(x, dtype), space.shape) for x in (space.low, space.high))
        return gymnasium.spaces.Box(low, high, space.shape, dtype.type)
    raise EnvError(f"`{name}` has a {kind} space; Choreo reads Discrete and Box spaces of gymnax.")


def _strong(state: PyTree) -> PyTree:
    """The state with strongly typed arrays: a scan needs fixed types, but a state of gymnax may contain Python numbers."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), state)
