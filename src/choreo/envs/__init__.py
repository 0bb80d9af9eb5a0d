"""Environments by name: `make("jax:CartPole-v1", num_envs=8)`."""

import dataclasses
from typing import Any

from choreo.envs.base import Env as Env
from choreo.envs.base import TimeStep as TimeStep
from choreo.envs.cartpole import CartPole
from choreo.envs.gymnasium import HostEnv as HostEnv
from choreo.envs.gymnasium import from_factory as from_factory
from choreo.envs.gymnasium import make_envpool, make_gymnasium
from choreo.envs.gymnasium import makes_environments as makes_environments
from choreo.envs.pendulum import Pendulum
from choreo.envs.vmap import EnvStep as EnvStep
from choreo.envs.vmap import JaxEnv as JaxEnv
from choreo.envs.vmap import VmapEnv as VmapEnv
from choreo.errors import EnvError, unknown_name

BUILT_IN = {"jax:CartPole-v1": CartPole, "jax:Pendulum-v1": Pendulum}


def make(name: str, num_envs: int, **kwargs: Any) -> Env:
    """A batch of `num_envs` environments with this name; `kwargs` are settings of the environment.

    >>> make("jax:CartPole-v1", num_envs=8).action_space
    Discrete(2)
    """
    if name.startswith("gymnax:"):
        from choreo.envs.gymnax import make_gymnax  # an optional extra; its import takes 3.5 s

        return VmapEnv(env=make_gymnax(name, **kwargs), num_envs=num_envs)
    if name.startswith("envpool:"):
        return make_envpool(name, num_envs, **kwargs)
    if name.startswith("gymnasium:") or not name.startswith("jax:"):
        return make_gymnasium(name, num_envs, **kwargs)
    if name not in BUILT_IN:
        raise unknown_name("environment", name, names(), fix="Environments of gymnax are called `gymnax:<name>`.")
    settings = [field.name for field in dataclasses.fields(BUILT_IN[name])]
    for setting in kwargs:
        if setting not in settings:
            raise EnvError(f"`{name}` has no setting `{setting}`.", fix=f"It has: {', '.join(settings)}.")
    return VmapEnv(env=BUILT_IN[name](**kwargs), num_envs=num_envs)


def settings_of(env: Any) -> dict[str, Any] | None:
    """The settings with which `make(env.name, env.num_envs, **settings)` makes this JAX environment.

    None for a user's JAX environment, which `make` cannot make, and for an environment in Python (see `HostEnv.arguments`).
    """
    if not isinstance(env, VmapEnv):
        return None
    one: Any = env.env
    if type(one) is BUILT_IN.get(env.name):
        fields = {field.name: (getattr(one, field.name), field.default) for field in dataclasses.fields(one)}
        return {name: value for name, (value, default) in fields.items() if value != default}
    from choreo.envs.gymnax import GymnaxEnv

    return dict(one.params) if isinstance(one, GymnaxEnv) else None


def names() -> list[str]:
    """The names of the built-in environments."""
    return sorted(BUILT_IN)
