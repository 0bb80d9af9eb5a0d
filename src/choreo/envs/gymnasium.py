"""Gymnasium environments, by id or from a function that makes one environment. They run in Python, as host fragments.

    make_gymnasium("CartPole-v1", 8)            HostEnv: what an algorithm gets as `env`; it holds no environments
          reset, step   ->   host methods       choreo.host.gymnasium.GymBatch: the environments, on the site where they run

The state of a HostEnv is a number that counts steps. `reset` returns the first number; each `step` takes the current number and
returns the next one, so the calls stay in order. A probe finds the spaces: it makes one environment, inspects the environment
and closes it. The result of the probe is kept, so tracing makes no environment.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from choreo import static_key
from choreo.envs.base import Env, TimeStep, check_kind, check_num_envs
from choreo.envs.vmap import JaxEnv, VmapEnv
from choreo.errors import EnvError
from choreo.host import HostMethod, Spec, spaces
from choreo.host.make_batch import MakeBatch
from choreo.host.probe import EnvForm, probe, probe_anew
from choreo.host.sources import NotGymnasium, Source
from choreo.roles import Fragment, host_method
from choreo.types import Key, PyTree

source_info_util.register_exclusion(__file__)

InfoKeys: TypeAlias = str | Sequence[str]
"""Names of numbers in `info`: a sequence of names, or one string with commas between the names."""


def make_gymnasium(
    name: str, num_envs: int, *, info_keys: InfoKeys = (), vectorization_mode: str | None = None, **kwargs: Any
) -> "HostEnv":
    """The Gymnasium environment with the id `name` (`CartPole-v1`, `module:Id-v0`); `kwargs` are arguments of the environment.

    By default, `gymnasium.make` makes each environment, with its wrappers. With `vectorization_mode="vector_entry_point"`, the
    environments of a site are one vector environment, made by the entry point that the authors registered.
    """
    if vectorization_mode not in (None, "vector_entry_point"):
        raise EnvError(
            f"vectorization_mode={vectorization_mode!r} is not known.",
            fix='Leave it out, or pass "vector_entry_point". The layout says how many processes step environments.',
        )
    source = Source.of_id(name.removeprefix("gymnasium:"), kwargs, vector=vectorization_mode is not None)
    return _host_env(source, num_envs, info_keys)


def make_envpool(name: str, num_envs: int, *, info_keys: InfoKeys = (), **kwargs: Any) -> "HostEnv":
    """The EnvPool environment with this name (`envpool:Pong-v5`); `kwargs` are EnvPool's options."""
    from choreo.host import envpool  # an optional extra

    arguments = {"env_id": name.removeprefix("envpool:"), **kwargs}
    return _host_env(Source.of_factory(envpool.make_envpool, arguments, name=name), num_envs, info_keys)


def makes_environments(value: Any) -> bool:
    """True if `value` should be passed to `from_factory`: if it is a function, a class, or a single environment.

    `from_factory` accepts a single environment only if it is a `JaxEnv`. For any other single environment, it raises an error that
    says what to pass instead.
    """
    return callable(value) or isinstance(value, gymnasium.Env | gymnasium.vector.VectorEnv | JaxEnv)


def from_factory(factory: Any, num_envs: int, *, info_keys: InfoKeys = (), **kwargs: Any) -> Env:
    """A batch of `num_envs` environments that `factory(**kwargs)` makes; they may be Gymnasium or JAX environments."""
    if isinstance(factory, JaxEnv) and not isinstance(factory, type):
        return VmapEnv(env=factory, num_envs=num_envs)
    if not callable(factory):
        raise EnvError(
            f"A {type(factory).__name__} was given; {num_envs} environments cannot be made from it.",
            fix="Pass a function that makes one environment: choreo.train(algo, lambda: MyEnv(), num_envs=8, ...).",
        )
    try:
        source = probe_anew(Source.of_factory(factory, kwargs))
    except NotGymnasium as other:
        if isinstance(other.made, Env):
            return other.made.with_num_envs(num_envs)
        if isinstance(other.made, JaxEnv):
            return VmapEnv(env=other.made, num_envs=num_envs)
        raise
    return _host_env(source, num_envs, info_keys)


def _host_env(source: Source, num_envs: int, info_keys: InfoKeys) -> "HostEnv":
    probe(source)  # reports a broken environment here, not in the middle of a trace
    return HostEnv(source=source, num_envs=num_envs, info_keys=_names(info_keys))


def _names(info_keys: InfoKeys) -> tuple[str, ...]:
    return tuple(info_keys.split(",")) if isinstance(info_keys, str) else tuple(info_keys)


@dataclass(frozen=True, kw_only=True)
class HostEnv:
    """A batch of `num_envs` environments that run in Python."""

    source: Source
    """How one environment is made."""
    num_envs: int
    """How many environments step together."""
    info_keys: tuple[str, ...] = ()
    """Names of the numbers in `info` that become metrics."""

    def __post_init__(self):
        check_num_envs(self.name, self.num_envs)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments with which this environment was made, except name and `num_envs`."""
        call = self.source.factory_call
        more: dict[str, Any] = {"info_keys": self.info_keys} if self.info_keys else {}
        if isinstance(call.target, str) and call.vector:
            more["vectorization_mode"] = "vector_entry_point"
        own = {name: value for name, value in call.kwargs.items() if not (self.is_envpool and name == "env_id")}
        return own | more

    @property
    def is_envpool(self) -> bool:
        return self.name.startswith("envpool:")

    @property
    def form(self) -> EnvForm:
        return probe(self.source)

    @property
    def observation_space(self) -> gymnasium.Space:
        return self.form.observation_space

    @property
    def action_space(self) -> gymnasium.Space:
        return self.form.action_space

    def keys(self, key: Key) -> Key:
        return jax.random.split(key, self.num_envs)

    def reset(self, keys: Key) -> tuple[jax.Array, PyTree]:
        token, *obs = _methods(self, _wide())[0](seeds(keys))
        return token, self.observation(obs)

    def step(self, state: jax.Array, action: PyTree) -> tuple[jax.Array, TimeStep]:
        token, *results = _methods(self, _wide())[1](state, *self._action_leaves(action))
        return token, self.timestep(results)

    def observation(self, leaves: Sequence[Any]) -> PyTree:
        """The observation tree with these leaves."""
        return spaces.unflatten(self.observation_space, iter(leaves))

    def timestep(self, results: list[Any]) -> TimeStep:
        """The TimeStep made of `results`: the arrays that `Batch.step` returned, without the token."""
        rest, space = iter(results), self.observation_space
        obs, reward, discount, last = spaces.unflatten(space, rest), next(rest), next(rest), next(rest)
        next_obs = spaces.unflatten(space, rest)
        info = dict(zip(("episode_return", "episode_length", *self.info_keys), rest, strict=True))
        return TimeStep(obs, reward, discount, last, next_obs, info)

    def batch_maker(self) -> MakeBatch:
        """The function that makes the environments of a site."""
        return MakeBatch(source=self.source, form=self.form, info_keys=self.info_keys, wide=_wide())

    def with_num_envs(self, num_envs: int) -> "HostEnv":
        return dataclasses.replace(self, num_envs=num_envs)

    def _action_leaves(self, action: PyTree) -> list[jax.Array]:
        """The arrays of an action, after a check of shapes and types. Without it, a wrong action would fail only during the run."""
        declared = spaces.leaves(self.action_space, what=self.name)
        given = jax.tree.leaves(action)
        expected = [(self.num_envs, *(space.shape or ())) for _, space in declared]
        if [x.shape for x in given] != expected:
            shapes = ", ".join(str(list(x.shape)) for x in given)
            raise EnvError(
                f"`{self.name}` was given actions of shape {shapes}, not {', '.join(str(list(shape)) for shape in expected)}.",
                fix=f"Its action space is {self.action_space}; the env axis comes first.",
            )
        for (_, space), leaf in zip(declared, given, strict=True):
            check_kind(space, leaf, self.name)
        return given


def seeds(keys: Key) -> jax.Array:
    """One seed for each environment; the seed determines all episodes of the environment."""
    return jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)


@static_key.cache
def _methods(env: HostEnv, wide: bool) -> tuple[Fragment, Fragment]:
    """The methods `reset` and `step` of a `Batch`, as fragments."""

    def spec(dtype: Any, *shape: int) -> Spec:
        return Spec((env.num_envs, *shape), np.dtype(dtype).name)

    make, count, floating = env.batch_maker(), spec(np.int32), spec(np.float64 if wide else np.float32)
    obs = tuple(
        spec(spaces.dtype_of(leaf, wide=wide), *(leaf.shape or ()))
        for _, leaf in spaces.leaves(env.observation_space, what=env.name)
    )
    results = (
        count,
        *obs,
        floating,
        floating,
        spec(np.bool_),
        *obs,
        floating,
        count,
        *(floating for _ in env.info_keys),
    )
    return (
        host_method("env", HostMethod(make, "reset", (count, *obs))),
        host_method("env", HostMethod(make, "step", results)),
    )


def _wide() -> bool:
    return jnp.result_type(float) == np.float64
