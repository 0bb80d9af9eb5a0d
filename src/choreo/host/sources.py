"""How an environment is made, as a value that travels.

    Source.of_id("CartPole-v1", {"sutton_barto_reward": True})      what `gymnasium.make` is given
    Source.of_factory(lambda: MyWrapper(MyEnv()), {})               what a user wrote, wherever they wrote it

Two sources are equal if they are made of the same, also after a journey to another process. A factory from a script, a notebook
or a file of the user's goes by value: the process that makes environments never imports the user's main. In the process
it came from, the factory is the user's own object.
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

PLAIN = (bool, int, float, complex, str, bytes, type(None))


class NotGymnasium(EnvError):
    """A factory made something else."""

    def __init__(self, what: str, *, made: Any = None, fix: str | None = None, **places: str):
        super().__init__(what, fix=fix, **places)
        self.made = made


class Source:
    """How one environment (or, if `vector`, a vector environment) is made."""

    def __init__(self, name: str, identity: Hashable, load: Callable[[], "FactoryCall"]):
        self.name, self.identity, self._load = name, identity, load
        self._hash = hash(identity)  # asked for with every call of a host method
        self._recipe: FactoryCall | None = None

    @classmethod
    def of_id(cls, env_id: str, kwargs: dict[str, Any], *, vector: bool = False) -> "Source":
        """What Gymnasium calls `env_id`; with `vector`, its `vector_entry_point`."""
        return cls._of(env_id, FactoryCall(env_id, kwargs, vector))

    @classmethod
    def of_factory(cls, factory: Callable[..., Any], kwargs: dict[str, Any], *, name: str | None = None) -> "Source":
        """What `factory(**kwargs)` makes; a vector environment if it takes `num_envs` and makes one."""
        return cls._of(name or _name(factory), FactoryCall(factory, kwargs, _takes_num_envs(factory)))

    @classmethod
    def _of(cls, name: str, recipe: "FactoryCall") -> "Source":
        identity = (name, _freeze(recipe.target), _freeze(recipe.kwargs), recipe.vector)
        source = _sources[identity] = cls(name, identity, lambda: recipe)
        return source

    def seen_as(self, form: str) -> "Source":
        """The same, but not equal to the one that made environments of another form, before a class was edited."""
        identity = (self.identity, form)
        source = _sources[identity] = Source(self.name, identity, lambda: self.recipe)
        return source

    @property
    def recipe(self) -> "FactoryCall":
        if self._recipe is None:
            self._recipe = self._load()
        return self._recipe

    def make_any(self) -> gymnasium.Env | gymnasium.vector.VectorEnv:
        """One environment, or a vector environment of one if that is what is made."""
        if not self.recipe.vector:
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
        """`num_envs` environments in one."""
        made = self._make(num_envs=num_envs)
        if not isinstance(made, gymnasium.vector.VectorEnv):
            raise _no_environment(self.name, made)
        if made.num_envs != num_envs:
            raise EnvError(f"`{self.name}` was asked for {num_envs} environments and made {made.num_envs}.")
        return made

    def _make(self, **more: Any) -> Any:
        target, kwargs = self.recipe.target, {**self.recipe.kwargs, **more}
        try:
            if callable(target):
                return target(**kwargs)
            if more:
                return gymnasium.make_vec(target, vectorization_mode="vector_entry_point", **kwargs)
            # Our own checks are stricter than Gymnasium's wrapper for them, and cost less.
            return gymnasium.make(target, **{"disable_env_checker": True, **kwargs})
        except ChoreoError:
            raise
        except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
            raise _unknown(self.name) from error
        except Exception as error:
            raise EnvError(
                f"`{self.name}` could not be made: {type(error).__name__}: {error}",
                fix="The traceback above is the environment's own.",
            ) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and self.identity == other.identity

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"<environments made by {self.name}>"

    def __reduce__(self):
        recipe = self.recipe
        try:
            payload = cloudpickle.dumps((recipe.target, recipe.kwargs, recipe.vector))
        except Exception as error:
            raise EnvError(
                f"`{self.name}` cannot travel to another process: {type(error).__name__}: {error}",
                fix="Make inside the factory what it needs, rather than outside of it; or use a layout with one site.",
            ) from error
        return _arrive, (self.name, self.identity, payload, _paths(recipe.target))


class FactoryCall:
    """What is called, and with what."""

    def __init__(self, target: str | Callable[..., Any], kwargs: dict[str, Any], vector: bool):
        self.target, self.kwargs, self.vector = target, kwargs, vector


_sources: "weakref.WeakValueDictionary[Hashable, Source]" = weakref.WeakValueDictionary()
"""Those of this process: one that comes back from a journey is the one that left."""


def _arrive(name: str, identity: Hashable, payload: bytes, paths: list[str]) -> Source:
    def load() -> FactoryCall:
        # What the user's file imports from its own folder must be found here too.
        sys.path.extend(path for path in paths if path not in sys.path)
        try:
            return FactoryCall(*cloudpickle.loads(payload))
        except Exception as error:
            raise EnvError(
                f"`{name}` cannot be made in this process: {type(error).__name__}: {error}",
                fix="Modules that a factory imports must be installed here, or lie beside the user's script.",
            ) from error

    return _sources.setdefault(identity, Source(name, identity, load))


def _paths(target: Any) -> list[str]:
    """Where this process finds modules, as others may not."""
    code = getattr(target, "__code__", None)
    beside = [str(Path(code.co_filename).parent)] if code and Path(code.co_filename).is_file() else []
    return [str(Path(path).resolve()) for path in [*beside, *sys.path] if Path(path).is_dir()]


def _freeze(value: Any) -> Hashable:
    """A hashable stand-in, equal for equal values, that stays equal in another process."""
    if isinstance(value, PLAIN):
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
    # Anything else is equal to nothing but itself: two lambdas of one line may hold different things, and a function of a
    # notebook has the name of the one it was before it was edited.
    number, kept = _numbers.get(id(value), (None, None))
    if kept is not value:
        number = uuid.uuid4().hex
        _numbers[id(value)] = (number, value)
    return ("object", number)


_numbers: dict[int, tuple[str, Any]] = {}
"""Of objects that have no name: held on to, because Python gives their id to others when they are gone."""


def _name(factory: Callable[..., Any]) -> str:
    """`make_env`; for a lambda also where it stands."""
    name = getattr(factory, "__qualname__", None) or type(factory).__qualname__
    code = getattr(factory, "__code__", None)
    if "<lambda>" in name and code is not None:
        return f"lambda at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return name.rsplit("<locals>.", 1)[-1]


def _takes_num_envs(factory: Callable[..., Any]) -> bool:
    try:
        return "num_envs" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin that does not tell
        return False


def _unknown(env_id: str) -> UnknownNameError:
    known = [name for name in gymnasium.registry if name != env_id]
    fix = (
        "Environments that a package registers are called `package:Id-v0`; one that a function makes, "
        "`my_env.py:make_env`; `choreo list envs` names what is built in."
    )
    if difflib.get_close_matches(env_id, known, n=1, cutoff=0.5):
        return unknown_name("environment", env_id, known, fix=fix)
    return UnknownNameError(f"There is no environment `{env_id}`.", fix=fix)


def _no_environment(name: str, made: Any) -> EnvError:
    if isinstance(made, gymnasium.vector.VectorEnv):
        return EnvError(
            f"`{name}` made a vector environment, of {made.num_envs}, without being told of how many.",
            fix="Let the factory take `num_envs`: each site asks for as many as it has.",
        )
    return NotGymnasium(
        f"`{name}` made a {type(made).__name__}, which is no gymnasium.Env.",
        made=made,
        fix="Let the factory return the environment.",
    )


def import_prefix(env_id: Any) -> None:
    """Import `module` of `module:Id-v0`, as Gymnasium would, with an error that says so."""
    module = env_id.rpartition(":")[0] if isinstance(env_id, str) else ""
    if not module:
        return
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvError(
            f"There is no module `{module}` for `{env_id}`: {error}.",
            fix="Install the package it belongs to; for a file write `path/to/my_env.py:make_env`.",
        ) from error
