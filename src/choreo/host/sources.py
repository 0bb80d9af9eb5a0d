"""How an environment is made, as a value (`Source`) that can be pickled and sent to another process.

    Source.of_id("CartPole-v1", {"sutton_barto_reward": True})      the arguments of `gymnasium.make`
    Source.of_factory(lambda: MyWrapper(MyEnv()), {})               any function of a user

Two sources are equal if their functions and arguments are equal, also after one source was pickled and loaded in another process.
A factory from a script, a notebook or a user's file is pickled by value, so a worker never imports the user's main module. If
the same process pickles and unpickles a source, the result is the original object.
"""

import difflib
import importlib
import inspect
import sys
import uuid
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np

from choreo.errors import ChoreoError, EnvError, UnknownNameError, unknown_name

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class NotGymnasium(EnvError):
    """A factory made an object that is not a Gymnasium environment; `made` is this object."""

    def __init__(self, what: str, *, made: Any = None, fix: str | None = None, **places: str):
        super().__init__(what, fix=fix, **places)
        self.made = made


class Source:
    """How one environment, or one vector environment, is made."""

    def __init__(self, name: str, identity: Hashable, load: Callable[[], "FactoryCall"]):
        self.name, self.identity, self._load = name, identity, load
        self._hash = hash(identity)  # computed once, because every callback of a compiled program needs the hash
        self._factory_call: FactoryCall | None = None

    @classmethod
    def of_id(cls, env_id: str, kwargs: dict[str, Any], *, vector: bool = False) -> "Source":
        """The source of the Gymnasium environment `env_id`. With `vector`, its `vector_entry_point` makes a vector environment."""
        return cls._of(env_id, FactoryCall(env_id, kwargs, vector))

    @classmethod
    def of_factory(cls, factory: Callable[..., Any], kwargs: dict[str, Any], *, name: str | None = None) -> "Source":
        """The source of the environment that `factory(**kwargs)` makes; a vector environment if the factory takes `num_envs`."""
        return cls._of(name or _name(factory), FactoryCall(factory, kwargs, _takes_num_envs(factory)))

    @classmethod
    def _of(cls, name: str, call: "FactoryCall") -> "Source":
        identity = (name, _freeze(call.target), _freeze(call.kwargs), call.vector)
        source = _sources[identity] = cls(name, identity, lambda: call)
        return source

    def seen_as(self, form: str) -> "Source":
        """The same source, but equal only to sources with the same form: a class that is edited in a notebook may change form."""
        identity = (self.identity, form)
        source = _sources[identity] = Source(self.name, identity, lambda: self.factory_call)
        return source

    @property
    def factory_call(self) -> "FactoryCall":
        """The call that makes the environment; it is unpickled when it is first used."""
        if self._factory_call is None:
            self._factory_call = self._load()
        return self._factory_call

    def make_any(self) -> gymnasium.Env | gymnasium.vector.VectorEnv:
        """One environment; if the source makes vector environments, a vector environment with `num_envs=1`."""
        if not self.factory_call.vector:
            return self.make()
        made = self._make(num_envs=1)
        if isinstance(made, gymnasium.vector.VectorEnv):
            return made
        raise _no_environment(self.name, made)

    def make(self) -> gymnasium.Env:
        """One environment."""
        made = self._make()
        if not isinstance(made, gymnasium.Env):
            raise _no_environment(self.name, made)
        return made

    def make_vector(self, num_envs: int) -> gymnasium.vector.VectorEnv:
        """A vector environment of `num_envs` environments."""
        made = self._make(num_envs=num_envs)
        if not isinstance(made, gymnasium.vector.VectorEnv):
            raise _no_environment(self.name, made)
        if made.num_envs != num_envs:
            raise EnvError(f"`{self.name}` was asked for {num_envs} environments and made {made.num_envs}.")
        return made

    def _make(self, **more: Any) -> Any:
        target, kwargs = self.factory_call.target, {**self.factory_call.kwargs, **more}
        try:
            if callable(target):
                return target(**kwargs)
            if more:
                return gymnasium.make_vec(target, vectorization_mode="vector_entry_point", **kwargs)
            # Our checks are stricter and cheaper than the checks of Gymnasium's wrapper.
            return gymnasium.make(target, **{"disable_env_checker": True, **kwargs})
        except ChoreoError:
            raise
        except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
            raise _unknown(self.name) from error
        except Exception as error:
            raise EnvError(
                f"`{self.name}` could not be made: {type(error).__name__}: {error}",
                fix="The traceback shows where this happened in the environment's code.",
            ) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and self.identity == other.identity

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"<environments made by {self.name}>"

    def __reduce__(self):
        call = self.factory_call
        try:
            payload = cloudpickle.dumps((call.target, call.kwargs, call.vector))
        except Exception as error:
            raise EnvError(
                f"`{self.name}` cannot be sent to another process: {type(error).__name__}: {error}",
                fix="Create the objects that the factory needs inside the factory, or use a layout with one site.",
            ) from error
        return _unpickle, (self.name, self.identity, payload, _paths(call.target))


class FactoryCall:
    """A function or Gymnasium id, and its arguments."""

    def __init__(self, target: str | Callable[..., Any], kwargs: dict[str, Any], vector: bool):
        self.target, self.kwargs, self.vector = target, kwargs, vector


_sources: "weakref.WeakValueDictionary[Hashable, Source]" = weakref.WeakValueDictionary()
"""The sources of this process, by identity. Unpickling returns the original object if this process has it."""


def _unpickle(name: str, identity: Hashable, payload: bytes, paths: list[str]) -> Source:
    def load() -> FactoryCall:
        # The user's file may import modules from its own folder; this process must find them too.
        sys.path.extend(path for path in paths if path not in sys.path)
        try:
            return FactoryCall(*cloudpickle.loads(payload))
        except Exception as error:
            raise EnvError(
                f"`{name}` cannot be made in this process: {type(error).__name__}: {error}",
                fix="Install the modules that the factory imports, or put them into the folder of the user's script.",
            ) from error

    return _sources.setdefault(identity, Source(name, identity, load))


def _paths(target: Any) -> list[str]:
    """The folders in which this process finds modules. The process that unpickles the source adds them to its `sys.path`."""
    code = getattr(target, "__code__", None)
    beside = [str(Path(code.co_filename).parent)] if code and Path(code.co_filename).is_file() else []
    return [str(Path(path).resolve()) for path in [*beside, *sys.path] if Path(path).is_dir()]


def _freeze(value: Any) -> Hashable:
    """A hashable key of a value; equal plain values have equal keys, also in different processes."""
    if isinstance(value, _PLAIN):
        return (type(value).__name__, value)
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(_freeze(x) for x in value))
    if isinstance(value, dict):
        return (
            "dict",
            tuple((_freeze(key), _freeze(x)) for key, x in sorted(value.items(), key=lambda item: str(item[0]))),
        )
    if isinstance(value, np.ndarray) and value.dtype != object:
        return ("array", value.shape, str(value.dtype), value.tobytes())
    # Any other object is equal only to itself: two lambdas on one line may have different closures, and a function that was
    # edited in a notebook keeps its name.
    unique_id, kept = _unique_ids.get(id(value), (None, None))
    if kept is not value:
        unique_id = uuid.uuid4().hex
        _unique_ids[id(value)] = (unique_id, value)
    return ("object", unique_id)


_unique_ids: dict[int, tuple[str, Any]] = {}
"""Unique ids of objects, by Python's `id`. The objects are kept alive, because Python reuses the `id` of a deleted object."""


def _name(factory: Callable[..., Any]) -> str:
    """The name of a factory (`make_env`); for a lambda, its file and line."""
    name = getattr(factory, "__qualname__", None) or type(factory).__qualname__
    code = getattr(factory, "__code__", None)
    if "<lambda>" in name and code is not None:
        return f"lambda at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return name.rsplit("<locals>.", 1)[-1]


def _takes_num_envs(factory: Callable[..., Any]) -> bool:
    try:
        return "num_envs" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def _unknown(env_id: str) -> UnknownNameError:
    known = [name for name in gymnasium.registry if name != env_id]
    fix = (
        "For an environment that a package registers, write `package:Id-v0`; for a function that makes an environment, "
        "`my_env.py:make_env`. `choreo list envs` lists the built-in environments."
    )
    if difflib.get_close_matches(env_id, known, n=1, cutoff=0.5):
        return unknown_name("environment", env_id, known, fix=fix)
    return UnknownNameError(f"There is no environment `{env_id}`.", fix=fix)


def _no_environment(name: str, made: Any) -> EnvError:
    if isinstance(made, gymnasium.vector.VectorEnv):
        return EnvError(
            f"`{name}` made a vector environment of {made.num_envs} environments, but takes no argument `num_envs`.",
            fix="Add a parameter `num_envs` to the factory: each site passes the number of its environments.",
        )
    return NotGymnasium(
        f"`{name}` made a {type(made).__name__}, which is neither a gymnasium.Env nor a choreo.envs.JaxEnv.",
        made=made,
        fix="Let the factory return the environment.",
    )


def import_prefix(env_id: Any) -> None:
    """Import `module` of `module:Id-v0`, as Gymnasium does, but with an error that names the module."""
    module = env_id.rpartition(":")[0] if isinstance(env_id, str) else ""
    if not module:
        return
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvError(
            f"There is no module `{module}` for `{env_id}`: {error}.",
            fix="Install the package of this module; for a file, write `path/to/my_env.py:make_env`.",
        ) from error
