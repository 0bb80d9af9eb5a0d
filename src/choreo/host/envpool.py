"""EnvPool as a Gymnasium vector environment: `envpool:Pong-v5`. An optional extra: `pip install 'choreo[envpool]'`.

EnvPool takes seeds only when a pool is made, so a reset with seeds makes a new pool. We do not use EnvPool's automatic reset.
Instead, the caller of `reset` names the environments to reset. This is Gymnasium's autoreset mode DISABLED.
"""

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from choreo.errors import EnvError, unknown_name


def make_envpool(env_id: str, num_envs: int = 1, **kwargs: Any) -> "EnvPool":
    """`num_envs` EnvPool environments of the id `env_id`; `kwargs` are EnvPool's options (`num_threads=1`)."""
    return EnvPool(env_id, num_envs, kwargs)


class EnvPool(VectorEnv):
    """One pool of environments, stepped together."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, env_id: str, num_envs: int, options: dict[str, Any]):
        self.env_id, self.num_envs, self.options = env_id, num_envs, options
        self.pool = self._make([0] * num_envs)
        self.single_observation_space, self.single_action_space = self.pool.observation_space, self.pool.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.pool = self._make(seed if isinstance(seed, list) else [seed + i for i in range(self.num_envs)])
            with _quiet():
                self.seen, info = self.pool.reset()
            return self.seen, info
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        seen, info = self.pool.reset(np.flatnonzero(mask).astype(np.int32))
        self.seen = _put(self.seen, seen, info["env_id"])
        return self.seen, info

    def step(self, actions: Any) -> Any:
        self.seen, reward, terminated, truncated, info = self.pool.step(actions)
        return self.seen, reward, terminated, truncated, info

    def close(self, **kwargs: Any) -> None:
        self.pool.close()

    def _make(self, seeds: list[int]) -> Any:
        pools = _import_envpool()
        known = pools.list_all_envs()
        if self.env_id not in known:
            raise unknown_name("environment", f"envpool:{self.env_id}", [f"envpool:{name}" for name in known])
        with _quiet():
            pool = pools.make_gymnasium(
                self.env_id, num_envs=self.num_envs, seed=[seed & 0x7FFFFFFF for seed in seeds], **self.options
            )
            _ = pool.observation_space, pool.action_space  # EnvPool computes the spaces at first use, with warnings
            return pool


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings that the bounds of EnvPool's spaces lose precision."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
        yield


def _put(into: Any, new: Any, where: np.ndarray) -> Any:
    """A copy of the observations `into`, in which `new` replaces the observations of the environments `where`."""
    if isinstance(into, dict):
        return {key: _put(part, new[key], where) for key, part in into.items()}
    into = np.array(into)
    into[where] = new
    return into


def _import_envpool() -> Any:
    try:
        return importlib.import_module("envpool")
    except ImportError as error:
        raise EnvError(f"EnvPool cannot be imported: {error}.", fix="Run: pip install 'choreo[envpool]'") from error
