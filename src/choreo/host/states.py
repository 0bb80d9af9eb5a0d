"""The states of the Python objects of a run between two iterations, as plain data.

A Python object (a batch of environments, an object of a host method, the function of a host fragment) may offer two methods:

    state() -> list      plain data: one entry for each of its environments, in order; a function has one entry
    load(states)         continue from such a list, so that the next results have the same bits

Plain data is None, bool, int, float, str, numpy arrays, and lists and dicts (with strings as keys) of plain data. States are
kept by the number of the environment, not by the worker, so that another number of workers can load them. They are stored as
JSON and arrays. They are never stored with pickle, because loading a pickle can run code.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from choreo.dtypes import name_of
from choreo.errors import EnvError, RunError

ARRAY = "$array"
"""The only key of the dict that stands for an array in encoded data; the value is the number of the array."""
METHODS = "methods `state` and `load`"


class NoState(Exception):
    """The state of an object cannot be stored; the message says why."""


@runtime_checkable
class HasState(Protocol):
    """A Python object whose state can be stored."""

    def state(self) -> Any:
        """Plain data. A single Gymnasium environment may return any plain data.

        Every other object returns a list with one entry for each of its environments, in order. For a function, this is one entry.
        """
        ...

    def load(self, states: Any, /) -> None:
        """Continue from data that `state` returned. The object has just been made and reset, or has been used before."""
        ...


def has_state(obj: Any) -> bool:
    """Return True if the class of an object has the methods `state` and `load`.

    It is not enough that the object has attributes with these names: the environments of Gymnasium often have an array `state`.
    """
    return all(callable(getattr(type(obj), name, None)) for name in ("state", "load"))


@dataclass(frozen=True, kw_only=True)
class SiteStates:
    """The states of one Python object at one site."""

    number: int
    """The number of the object in the plan."""
    first: int
    """The number of the object's first environment."""
    states: Sequence[Any]
    """The states of its environments, in order."""


@dataclass(frozen=True, kw_only=True)
class HostStates:
    """The states of all Python objects of a run, at one boundary."""

    objects: Mapping[int, Sequence[Any]]
    """For each object, by its number in the plan: the states of all its environments, in order."""
    lost: tuple[str, ...] = ()
    """For each object whose state cannot be stored, one sentence that says why."""

    @classmethod
    def gathered(cls, parts: Iterable[SiteStates], lost: Iterable[str]) -> "HostStates":
        """Put the states of all sites in the order of the environments. An object is left out if its state is missing at a site."""
        lost, objects = tuple(dict.fromkeys(lost)), {}
        incomplete = set()
        for part in sorted(parts, key=lambda part: (part.number, part.first)):
            states = objects.setdefault(part.number, [])
            if len(states) != part.first:
                incomplete.add(part.number)
            states += part.states
        assert lost or not incomplete, incomplete
        return cls(objects={n: states for n, states in objects.items() if n not in incomplete}, lost=lost)

    def check(self, sizes: Mapping[int, int]) -> None:
        """Raise RunError unless there is a state for every environment of every object.

        `sizes` holds the number of environments of each object, by the number of the object.
        """
        if self.lost:
            raise RunError(
                f"The state of the Python objects was not stored completely: {' '.join(self.lost)}",
                fix=f"Give these objects the {METHODS}, and train again.",
            )
        found = {number: len(states) for number, states in self.objects.items()}
        if found != dict(sizes):
            raise RunError(
                f"The stored states do not fit the plan: they are those of {_sizes(found)}, but the plan has {_sizes(sizes)}.",
                fix="Use the algorithm, the environment and the number of environments of the run that stored them.",
            )


def _sizes(sizes: Mapping[int, int]) -> str:
    objects = "1 object" if len(sizes) == 1 else f"{len(sizes)} objects"
    return f"{objects} with {', '.join(map(str, sizes.values())) or 'no'} environments"


def plain(data: Any, what: str) -> Any:
    """A copy of plain data. Raises EnvError if the data is not plain; `what` names the object for the message."""
    tree, arrays = encode(data, what)
    return decode(tree, arrays)


def encode(data: Any, what: str) -> tuple[Any, list[np.ndarray]]:
    """Plain data as a tree that JSON can hold, and copies of its arrays. Raises EnvError if the data is not plain."""
    arrays: list[np.ndarray] = []
    return _encode(data, what, "$", arrays), arrays


def _encode(data: Any, what: str, path: str, arrays: list[np.ndarray]) -> Any:
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is list:
        return [_encode(item, what, f"{path}[{i}]", arrays) for i, item in enumerate(data)]
    if type(data) is dict and all(type(key) is str and key != ARRAY for key in data):
        return {key: _encode(item, what, f"{path}.{key}", arrays) for key, item in data.items()}
    if type(data) is np.ndarray and _is_known(data):
        arrays.append(np.array(data, data.dtype.newbyteorder("=")))
        return {ARRAY: len(arrays) - 1}
    kind = f"an array of {data.dtype}" if type(data) is np.ndarray else f"a {type(data).__name__}"
    raise EnvError(
        f"`state` of {what} returned {kind} at `{path}`, which is not plain data.",
        fix="Use None, bool, int, float, str, numpy arrays of numbers, lists, and dicts with strings as keys. "
        "Convert a tuple to a list, and a numpy number with `.item()`.",
    )


def _is_known(array: np.ndarray) -> bool:
    try:
        name_of(array.dtype)
    except KeyError:
        return False
    return True


def decode(tree: Any, arrays: Sequence[np.ndarray]) -> Any:
    """The inverse of `encode`. Raises ValueError if an array is missing."""
    if isinstance(tree, list):
        return [decode(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if ARRAY not in tree:
        return {key: decode(item, arrays) for key, item in tree.items()}
    number = tree[ARRAY]
    if type(number) is not int or not 0 <= number < len(arrays):
        raise ValueError(f"there is no array {number!r}")
    return arrays[number].copy()
