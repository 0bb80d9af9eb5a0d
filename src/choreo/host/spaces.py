"""Convert values of a Gymnasium space to flat lists of arrays and back, without JAX.

    Dict(position=Box(3), count=Discrete(5))   ->   leaves  ['count'] int32[]   ['position'] float32[3]

The leaves have the same order as in `jax.tree.leaves`: dictionary keys are sorted, tuple items keep their order. The types are
those of JAX: floats get JAX's default float type, and 64-bit integers become 32-bit integers unless JAX computes in 64 bits.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from choreo.errors import EnvError


class WrongValue(Exception):
    """A value does not fit its space; the value is from environment `index` of a block."""

    def __init__(self, index: int, what: str):
        super().__init__(what)
        self.index = index


def leaves(space: Space, *, what: str, path: str = "") -> list[tuple[str, Space]]:
    """The elementary spaces in `space`, each with its path (`['camera'][0]`); `what` names the space in errors."""
    if isinstance(space, spaces.Dict):
        parts = [(f"{path}[{key!r}]", space[key]) for key in sorted(space)]
    elif isinstance(space, spaces.Tuple):
        parts = [(f"{path}[{i}]", part) for i, part in enumerate(space)]
    elif isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return [(path, space)]
    else:
        raise EnvError(
            f"{what} has a {type(space).__name__} space{f' at {path}' if path else ''}, which has no fixed shape.",
            fix="Choreo reads Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these; wrap the environment "
            "so that it has such a space.",
        )
    return [leaf for path, part in parts for leaf in leaves(part, what=what, path=path)]


def flatten(space: Space, value: Any, *, index: int, path: str = "") -> list[Any]:
    """The values at the leaves of `value`; `index` is the number of the environment in its block, for errors."""
    if isinstance(space, spaces.Dict):
        _require_keys(space, value, index, path)
        parts = [(space[key], value[key], f"{path}[{key!r}]") for key in sorted(space)]
    elif isinstance(space, spaces.Tuple):
        _require_length(space, value, index, path)
        parts = [(part, value[i], f"{path}[{i}]") for i, part in enumerate(space)]
    else:
        return [value]
    return [leaf for part, inner, at in parts for leaf in flatten(part, inner, index=index, path=at)]


def unflatten(space: Space, values: Iterator[Any]) -> Any:
    """A value of `space` with `values` at its leaves."""
    if isinstance(space, spaces.Dict):
        return {key: unflatten(space[key], values) for key in sorted(space)}
    if isinstance(space, spaces.Tuple):
        return tuple(unflatten(part, values) for part in space)
    return next(values)


def dtype_of(space: Space, *, wide: bool) -> np.dtype:
    """The type of the arrays for a leaf; `wide`: whether JAX computes in 64 bits."""
    dtype = np.dtype(space.dtype)
    if np.issubdtype(dtype, np.floating):
        return np.dtype(np.float64 if wide else np.float32)
    if dtype.itemsize == 8 and not wide:
        return np.dtype(dtype.kind + "4")
    return dtype


class Leaf:
    """One elementary space: checks the values of all environments and puts them into one array."""

    def __init__(self, space: Space, path: str, *, wide: bool):
        self.space, self.path, self.shape, self.dtype = space, path, space.shape or (), np.dtype(space.dtype)
        self.dtype_out = dtype_of(space, wide=wide)
        # A Box has one exact type; the other spaces accept booleans and integers of any type.
        self.kinds = None if isinstance(space, spaces.Box) else "iub"

    def stack(self, values: Sequence[Any]) -> np.ndarray:
        """A new array [env, ...] from one value per environment; raises WrongValue with the index of a wrong value."""
        shape, dtype = self.shape, self.dtype
        for value in values:
            if value.__class__ is not np.ndarray or value.dtype is not dtype or value.shape != shape:
                values = [self.check(value, i) for i, value in enumerate(values)]
                break
        return np.array(values, self.dtype_out)

    def whole(self, values: Any, count: int) -> np.ndarray:
        """A new array [env, ...] from the array of a vector environment; raises WrongValue if shape or type do not fit."""
        shape = (count, *self.shape)
        if isinstance(values, np.ndarray) and values.shape == shape and self._right_type(values.dtype):
            return np.array(values, self.dtype_out)
        said = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else f"a {type(values).__name__}"
        raise WrongValue(0, f"{said}{_at(self.path)} where its space says {self.dtype}{list(shape)}")

    def check(self, value: Any, i: int) -> Any:
        """Return `value` if its shape and type fit the space; otherwise raise WrongValue for environment `i`."""
        if isinstance(value, np.ndarray | np.generic):
            if value.shape == self.shape and self._right_type(value.dtype):
                return value
            said = f"{value.dtype}{list(value.shape)}"
        elif isinstance(value, int) and self.shape == () and self.kinds:
            return value
        else:
            said = f"a {type(value).__name__}"
        expected = f"{self.dtype}{list(self.shape)}" if self.kinds is None or self.shape else str(self.space)
        raise WrongValue(i, f"{said}{_at(self.path)} where its space says {expected}")

    def _right_type(self, dtype: np.dtype) -> bool:
        return dtype == self.dtype if self.kinds is None else dtype.kind in self.kinds


def _require_keys(space: Any, value: Any, index: int, path: str) -> None:
    if value.__class__ is dict and value.keys() == space.spaces.keys():
        return
    try:
        found = set(value.keys())
    except AttributeError:
        raise WrongValue(index, f"a {type(value).__name__}{_at(path)} where its space says a dictionary") from None
    if found != set(space):
        lacking, more = sorted(set(space) - found, key=str), sorted(found - set(space), key=str)
        words = [f"without {lacking}"] if lacking else []
        words += [f"with {more}, which its space does not have"] if more else []
        raise WrongValue(index, f"a dictionary{_at(path)} {' and '.join(words)}")


def _require_length(space: Any, value: Any, index: int, path: str) -> None:
    if not isinstance(value, tuple | list) or len(value) != len(space):
        said = f"{len(value)} items" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
        raise WrongValue(index, f"{said}{_at(path)} where its space says a tuple of {len(space)}")


def _at(path: str) -> str:
    return f" at {path}" if path else ""
