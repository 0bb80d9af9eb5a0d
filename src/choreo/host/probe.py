"""Finds the facts about an environment that a plan needs: makes one environment, inspects it and closes it.

probe(Source.of_id("CartPole-v1", {}))  ->  EnvForm(observation_space=Box(4), action_space=Discrete(2), ...)
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from choreo.errors import EnvError
from choreo.host import spaces
from choreo.host.env_errors import env_raised
from choreo.host.packages import packages_of
from choreo.host.sources import Source, import_prefix

MASK = "action_mask"
"""The key of the mask of allowed actions, in `info` or in a Dict observation."""


@dataclass(frozen=True, kw_only=True)
class EnvForm:
    """Facts about an environment, found by a probe."""

    observation_space: gymnasium.Space
    """The environment's observation space; if the action mask comes from `info`, a Dict of this space (`obs`) and `action_mask`."""
    action_space: gymnasium.Space
    """The environment's action space."""
    masked: bool
    """Whether the action mask comes from `info`."""
    vector: bool
    """Whether this is a vector environment."""
    packages: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)
    """The installed packages that the environment uses."""


def probe(source: Source) -> EnvForm:
    """The form of the environments of `source`. The first call for a source makes one environment; later calls do not."""
    if source not in _forms:
        _forms[source] = _inspect(source)
    return _forms[source]


_forms: dict[Source, EnvForm] = {}


def probe_anew(source: Source) -> Source:
    """Probe a source again, because its function may now make a different class. Returns the source to use from now on."""
    form = _inspect(source)
    source = source.seen_as(repr(form))
    _forms[source] = form
    return source


def _inspect(source: Source) -> EnvForm:
    import_prefix(source.factory_call.target)
    env = source.make_any()
    try:
        vector = isinstance(env, gymnasium.vector.VectorEnv)
        obs_space, action_space = _spaces_of(env, source)
        spaces.leaves(obs_space, what=f"The observation of `{source.name}`")
        spaces.leaves(action_space, what=f"The action of `{source.name}`")
        own = isinstance(obs_space, gymnasium.spaces.Dict) and MASK in obs_space.spaces
        mask = None if vector or own else _mask(env, source)
        if mask is not None:
            obs_space = gymnasium.spaces.Dict({"obs": obs_space, MASK: gymnasium.spaces.MultiBinary(np.shape(mask))})
        return EnvForm(
            observation_space=obs_space,
            action_space=action_space,
            masked=mask is not None,
            vector=vector,
            packages=packages_of(env),
        )
    finally:
        env.close()


def _spaces_of(env: Any, source: Source) -> list[gymnasium.Space]:
    single = "single_" if isinstance(env, gymnasium.vector.VectorEnv) else ""
    names = (f"{single}observation_space", f"{single}action_space")
    found = [getattr(env, name, None) for name in names]
    for name, space in zip(names, found, strict=True):
        if not isinstance(space, gymnasium.Space):
            raise EnvError(
                f"The `{name}` of `{source.name}` is {space!r}, which is not a Gymnasium space.",
                fix=f"Set self.{name} in its __init__, for example to gymnasium.spaces.Discrete(2).",
            )
    return found  # pyright: ignore[reportReturnType]


def _mask(env: Any, source: Source) -> Any:
    """The action mask in the `info` of the first reset; None if `info` has no mask."""
    try:
        _, info = env.reset(seed=0)
    except Exception as error:
        raise env_raised(source.name, "The first environment", "reset", error) from error
    return info.get(MASK)
