"""Python at a site: the objects that live there, and the calls that a plan makes on them.

A site makes one object for its own block of the environments, and keeps it:

    environments  0 1 2 3 | 4 5 6 7        HostMethod(make, "step")
    site          env-0   | env-1          env-0: make(range(0, 4)).step(...)   env-1: make(range(4, 8)).step(...)

Nothing here imports JAX: a worker that only steps environments stays small.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from choreo.dtypes import NAMES, dtype_named
from choreo.errors import AlgorithmError


@dataclass(frozen=True)
class Spec:
    """The type of an array."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class HostMethod:
    """One method of an object that each site makes for its own environments.

    It takes arrays and returns a tuple of new ones, all with the env axis first. A call for a block of environments must
    give the block of a call for all of them: what happens to one environment may not depend on another.
    """

    make: Callable[[range], Any]
    """From the numbers of the site's environments to its object. Methods with an equal `make` share the object; a `close`
    method ends it. If it has an attribute `exact` that is true, what the methods return is not looked at: it is known to be
    as declared."""
    method: str
    outs: tuple[Spec, ...]
    """Types of the results for all environments."""

    @property
    def num_envs(self) -> int:
        return self.outs[0].shape[0]

    def of_shards(self, shards: int) -> "HostMethod":
        """The same for the environments of several shards, one after the other."""
        return replace(self, outs=tuple(Spec((shards * s.shape[0], *s.shape[1:]), s.dtype) for s in self.outs))


HostFn = HostMethod | Callable[..., tuple[np.ndarray, ...]]
"""What a host fragment calls: a method, or a function on all environments at once."""


class HostObjects:
    """What one site has made, for its `replica`-th of `replicas` equal blocks of environments.

    `each`: methods are those of one block, not of all of them. `sharing`: whose objects to use.
    """

    def __init__(
        self, replica: int = 0, replicas: int = 1, *, each: bool = False, sharing: "HostObjects | None" = None
    ):
        self.replica, self.replicas, self.each = replica, replicas, each
        self.made: dict[Any, Any] = {} if sharing is None else sharing.made
        self.calls = 0
        """Counts up at the beginning and at the end of every call."""

    def bind(self, fn: HostFn, shards: int = 1) -> Callable[..., tuple[np.ndarray, ...]]:
        """The function to call at this site; with several shards, `fn` is for one, and arrays are [shard, env, ...]."""
        if not isinstance(fn, HostMethod):
            return self._counted(fn)
        if shards > 1:
            return _for_shards(self.bind(fn.of_shards(shards)))
        size = fn.num_envs if self.each else fn.num_envs // self.replicas
        envs = range(self.replica * size, (self.replica + 1) * size)
        shapes, dtypes = [(size, *spec.shape[1:]) for spec in fn.outs], [_dtype(spec) for spec in fn.outs]
        method: Callable[..., Any] | None = None
        trusted = getattr(fn.make, "exact", False)

        def call(*leaves: np.ndarray) -> tuple[np.ndarray, ...]:
            nonlocal method
            self.calls += 1
            found = method
            if found is None:  # looked up once: this is called in every step
                if fn.make not in self.made:
                    self.made[fn.make] = fn.make(envs)
                found = method = getattr(self.made[fn.make], fn.method)
            results = found(*leaves)
            self.calls += 1
            if not trusted and ([x.shape for x in results] != shapes or [x.dtype for x in results] != dtypes):
                raise _wrong_types(fn, results, shapes, dtypes)
            return results if trusted else _own(results)

        return call

    def _counted(self, fn: Callable[..., tuple[np.ndarray, ...]]) -> Callable[..., tuple[np.ndarray, ...]]:
        def call(*leaves: np.ndarray) -> tuple[np.ndarray, ...]:
            self.calls += 1
            results = fn(*leaves)
            self.calls += 1
            return _own(results)

        return call

    def current(self) -> int | None:
        """The environment that is being worked on, as far as an object tells by its attribute `current`."""
        found = (getattr(obj, "current", None) for obj in self.made.values())
        return next((index for index in found if index is not None), None)

    def close(self) -> None:
        while self.made:
            _, obj = self.made.popitem()
            obj.close()


def _dtype(spec: Spec) -> np.dtype:
    return dtype_named(spec.dtype) if spec.dtype in NAMES else np.dtype(spec.dtype)


def _own(results: Any) -> tuple[np.ndarray, ...]:
    """Copies: a loop keeps what each step gave, and a user's function may write into the same arrays again."""
    return tuple(np.array(x) for x in results)


def _for_shards(fn: Callable[..., tuple[np.ndarray, ...]]) -> Callable[..., tuple[np.ndarray, ...]]:
    """A function of [env, ...], called on [shard, env, ...]."""

    def call(*leaves: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = leaves[0].shape[:2]
        return tuple(x.reshape(*rows, *x.shape[1:]) for x in fn(*(x.reshape(-1, *x.shape[2:]) for x in leaves)))

    return call


def _wrong_types(fn: HostMethod, results: Any, shapes: list[Any], dtypes: list[Any]) -> AlgorithmError:
    def words(shapes: list[Any], dtypes: list[Any]) -> str:
        return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in zip(shapes, dtypes, strict=True))

    got = words([np.shape(x) for x in results], [getattr(x, "dtype", type(x).__name__) for x in results])
    return AlgorithmError(
        f"The host method `{fn.method}` returned {got}; it was declared to return {words(shapes, dtypes)}.",
        fix="Correct the `outs` of its HostMethod, or what it returns.",
    )
