"""Python objects of a site, and the calls of their methods in a plan.

A site makes one object for its own block of environments, and keeps this object for the whole run:

    environments  0 1 2 3 | 4 5 6 7        HostMethod(make, "step")
    site          env-0   | env-1          env-0: make(range(0, 4)).step(...)   env-1: make(range(4, 8)).step(...)

This package does not import JAX, so a worker that only steps environments needs little memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from choreo.dtypes import NAMES, dtype_named
from choreo.errors import AlgorithmError, EnvError
from choreo.host.states import METHODS, HasState, NoState, has_state, plain


@dataclass(frozen=True)
class Spec:
    """The type of an array."""

    shape: tuple[int, ...]
    """The shape of the array."""
    dtype: str
    """The name of the dtype of the array."""


@dataclass(frozen=True)
class HostMethod:
    """One method of an object that each site makes for its own environments.

    The method takes arrays and returns a tuple of new arrays, all with the env axis first. Environments must be independent: for
    one block of environments, a call must return the same values that a call for all environments returns for this block.
    """

    make: Callable[[range], Any]
    """Makes the object from the numbers of the site's environments, such as range(4, 8). Methods with an equal `make` share one
    object, which is closed at the end of the run. If `make.exact` is true, results are neither checked nor copied."""
    method: str
    """The name of the method."""
    outs: tuple[Spec, ...]
    """Types of the results, for all environments."""

    @property
    def num_envs(self) -> int:
        """The number of environments for which `outs` is declared."""
        return self.outs[0].shape[0]

    def of_shards(self, shards: int) -> "HostMethod":
        """The same method for the environments of several shards, concatenated."""
        return replace(self, outs=tuple(Spec((shards * s.shape[0], *s.shape[1:]), s.dtype) for s in self.outs))


HostFn = HostMethod | Callable[..., tuple[np.ndarray, ...]]
"""The Python code that a host fragment calls: a method, or a function on all environments at once."""


def key_of(fn: HostFn) -> Any:
    """The key that identifies the Python object of a host call: the `make` of a method, or the function itself."""
    return fn.make if isinstance(fn, HostMethod) else fn


class HostObjects:
    """The Python objects of one site, which has block `replica` of `replicas` equal blocks of environments.

    If `each` is true, the `outs` of a method are declared for one block. Otherwise they are declared for all environments. If
    `sharing` is given, both `HostObjects` use the same Python objects.
    """

    def __init__(
        self, replica: int = 0, replicas: int = 1, *, each: bool = False, sharing: "HostObjects | None" = None
    ):
        self.replica, self.replicas, self.each = replica, replicas, each
        self.made: dict[Any, Any] = {} if sharing is None else sharing.made
        self.blocks: dict[Any, range] = {} if sharing is None else sharing.blocks
        """The environments of each object, by the key of the object (`key_of`). A function counts as one environment."""
        self.calls = 0
        """Incremented at the beginning and at the end of every call; odd while a call is running."""

    def bind(self, fn: HostFn, shards: int = 1) -> Callable[..., tuple[np.ndarray, ...]]:
        """The function to call at this site.

        With several shards, `fn` is declared for one shard. The function to call then takes and returns arrays [shard, env, ...].
        """
        if not isinstance(fn, HostMethod):
            self.blocks[fn] = range(1)
            return self._counted(fn)
        if shards > 1:
            return _for_shards(self.bind(fn.of_shards(shards)))
        size = fn.num_envs if self.each else fn.num_envs // self.replicas
        envs = range(self.replica * size, (self.replica + 1) * size)
        self.blocks[fn.make] = envs
        shapes, dtypes = [(size, *spec.shape[1:]) for spec in fn.outs], [_dtype(spec) for spec in fn.outs]
        method: Callable[..., Any] | None = None
        trusted = getattr(fn.make, "exact", False)

        def call(*leaves: np.ndarray) -> tuple[np.ndarray, ...]:
            nonlocal method
            self.calls += 1
            found = method
            if found is None:  # looked up only once, because `call` runs in every step
                found = method = getattr(self._made(fn.make), fn.method)
            results = found(*leaves)
            self.calls += 1
            if not trusted and ([x.shape for x in results] != shapes or [x.dtype for x in results] != dtypes):
                raise _wrong_types(fn, results, shapes, dtypes)
            return results if trusted else _own(results)

        return call

    def _made(self, make: Callable[[range], Any]) -> Any:
        if make not in self.made:
            self.made[make] = make(self.blocks[make])
        return self.made[make]

    def states(self, key: Any, *, is_method: bool) -> list[Any]:
        """Copies of the states of an object's environments. Raises NoState if the object has no state that can be stored."""
        obj = self._with_state(key, is_method)
        name, count = f"`{type(obj).__name__}`", len(self.blocks[key])
        states = plain(obj.state(), name)
        if not isinstance(states, list) or len(states) != count:
            got = f"{len(states)} states" if isinstance(states, list) else f"a {type(states).__name__}"
            raise EnvError(f"`state` of {name} returned {got}, but it has {count} environments.",
                           fix="Return a list with one state for each environment, in order.")  # fmt: skip
        return states

    def load(self, key: Any, states: Sequence[Any], *, is_method: bool) -> None:
        """Let an object continue from the states of its environments."""
        obj = self._with_state(key, is_method)
        obj.load(plain(list(states), f"`{type(obj).__name__}`"))

    def _with_state(self, key: Any, is_method: bool) -> HasState:
        obj = self._made(key) if is_method else key
        if not has_state(obj):
            raise NoState(f"`{getattr(obj, '__name__', type(obj).__name__)}` has no {METHODS}")
        return obj

    def _counted(self, fn: Callable[..., tuple[np.ndarray, ...]]) -> Callable[..., tuple[np.ndarray, ...]]:
        def call(*leaves: np.ndarray) -> tuple[np.ndarray, ...]:
            self.calls += 1
            results = fn(*leaves)
            self.calls += 1
            return _own(results)

        return call

    def current(self) -> int | None:
        """The number of the environment that is running now, from the attribute `current` of the objects; None if there is none."""
        found = (getattr(obj, "current", None) for obj in self.made.values())
        return next((index for index in found if index is not None), None)

    def close(self) -> None:
        """Close all objects."""
        while self.made:
            _, obj = self.made.popitem()
            obj.close()


def _dtype(spec: Spec) -> np.dtype:
    return dtype_named(spec.dtype) if spec.dtype in NAMES else np.dtype(spec.dtype)


def _own(results: Any) -> tuple[np.ndarray, ...]:
    """Copies of the results; needed because a loop keeps the results of each step, and a user's function may reuse its arrays."""
    return tuple(np.array(x) for x in results)


def _for_shards(fn: Callable[..., tuple[np.ndarray, ...]]) -> Callable[..., tuple[np.ndarray, ...]]:
    """The function on arrays [shard, env, ...] that calls `fn` on arrays [env, ...]."""

    def call(*leaves: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = leaves[0].shape[:2]
        return tuple(x.reshape(*rows, *x.shape[1:]) for x in fn(*(x.reshape(-1, *x.shape[2:]) for x in leaves)))

    return call


def _wrong_types(fn: HostMethod, results: Any, shapes: list[Any], dtypes: list[Any]) -> AlgorithmError:
    def types(shapes: list[Any], dtypes: list[Any]) -> str:
        return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in zip(shapes, dtypes, strict=True))

    got = types([np.shape(x) for x in results], [getattr(x, "dtype", type(x).__name__) for x in results])
    return AlgorithmError(
        f"The host method `{fn.method}` returned {got}; it was declared to return {types(shapes, dtypes)}.",
        fix="Correct the `outs` of its HostMethod, or the method's results.",
    )
