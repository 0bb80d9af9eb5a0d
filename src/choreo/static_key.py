"""When are two static values the same? The key under which a traced function is kept.

Python calls 1, 1.0 and True equal, and 0.0 and -0.0, but a program traced with one of them is wrong for the other. A key is
equal only for values of the same types and the same bits; a wrong hit would be a silent wrong result, while a miss costs a
trace. So: structural through plain data, and everything that is not plain data is only equal to itself.

    1.0                     (float, b"...")
    Cfg(rate=1, act=relu)   (Cfg, ("rate", (int, 1)), ("act", Same(relu)))
"""

import collections
import copyreg
import dataclasses
import functools
import struct
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import gymnasium
import jax
import jax.core
import numpy as np

T = TypeVar("T")

_BY_VALUE = (int, bool, str, bytes, type(None), type(Ellipsis), type)
"""Types whose values are equal only if they are the same, once the type is part of the key."""


_HOLD_A_VALUE = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset, np.ndarray, np.generic, jax.Array)
"""A subclass of these is more than its fields."""


class NoKey(TypeError):
    """A value that is no plain data, and can change: neither its parts nor its identity tell what it is."""

    def __init__(self, value: Any):
        super().__init__(f"a `{type(value).__name__}` is not hashable")
        self.value = value


class Same:
    """Equal to another only if both hold the very same object, which it keeps alive: a new one cannot take its id."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def static_key(x: Any) -> Hashable:
    """A key that is equal for two values only if no program can tell them apart. Raises NoKey if there is none.

    >>> static_key(1) == static_key(1), static_key(1) == static_key(True), static_key(0.0) == static_key(-0.0)
    (True, False, False)
    """
    return _key(x, (), strict=True)


def tree_key(tree: Any) -> Hashable:
    """The key of a `PyTreeDef`, whose own `==` compares auxiliary data (static fields, names of a dict) by `==`.

    What is not hashable is only equal to itself here, as it is to JAX, which takes such data.
    """
    data = tree.node_data()
    if data is None:
        return ("leaf", tree.num_leaves)  # `None` is a node without leaves
    kind, aux = data
    return (kind, _key(aux, (), strict=False), tuple(tree_key(child) for child in tree.children()))


def _key(x: Any, within: tuple[int, ...], *, strict: bool) -> Hashable:
    """`within`: ids of the containers around `x`; one that holds itself has no finite structure."""
    kind = type(x)
    if kind in _BY_VALUE:
        return (kind, x)
    if kind is float:
        return (kind, struct.pack("<d", x))
    if kind is complex:
        return (kind, struct.pack("<dd", x.real, x.imag))
    if isinstance(x, np.generic) or kind is np.ndarray:
        # By content: unlike a JAX array, a NumPy array can change.
        if not x.dtype.hasobject:
            return (kind, x.dtype, x.shape, x.tobytes())
    elif isinstance(x, jax.Array | gymnasium.Space) and not isinstance(x, jax.core.Tracer):
        return Same(x)  # not hashable, but neither changes
    parts = None if id(x) in within else _parts(x)
    if parts is None:
        if strict and kind.__hash__ is None:
            raise NoKey(x)
        return Same(x)
    within = (*within, id(x))
    return (kind, *(_key(part, within, strict=strict) for part in parts))


def _parts(x: Any) -> tuple[Any, ...] | None:
    """What a value is made of, if it is plain data of a kind we know; its type is told apart already."""
    kind = type(x)
    if kind in (tuple, list) or (isinstance(x, tuple) and hasattr(kind, "_fields") and not getattr(x, "__dict__", {})):
        return tuple(x)
    if isinstance(x, dict) and kind in (dict, collections.OrderedDict, collections.defaultdict):
        return (getattr(x, "default_factory", None), *(part for item in x.items() for part in item))
    if isinstance(x, slice):
        return (x.start, x.stop, x.step)
    if isinstance(x, functools.partial) and kind is functools.partial:
        return (x.func, x.args, x.keywords, vars(x))
    if isinstance(x, types.MethodType):
        return (x.__func__, x.__self__)
    if dataclasses.is_dataclass(x) and not isinstance(x, _HOLD_A_VALUE):
        # Also what is no field: `__post_init__` may keep something under another name, a base class in a slot.
        names = dict.fromkeys([*(f.name for f in dataclasses.fields(x)), *copyreg._slotnames(kind)])  # pyright: ignore[reportAttributeAccessIssue]
        return (tuple((name, getattr(x, name, Same)) for name in names), getattr(x, "__dict__", {}))
    return None


class Recent(Generic[T]):
    """A cache that forgets the least recently used key beyond `size` keys."""

    def __init__(self, size: int):
        self.size = size
        self.values: collections.OrderedDict[Hashable, T] = collections.OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key in self.values:
            self.values.move_to_end(key)
            return self.values[key]
        value = self.values[key] = make()
        if len(self.values) > self.size:
            self.values.popitem(last=False)
        return value


def cache(fn: Callable[..., T]) -> Callable[..., T]:
    """`functools.cache` for static arguments given by position, told apart by `static_key` instead of `==`."""
    known: Recent[T] = Recent(256)

    @functools.wraps(fn)
    def call(*args: Any) -> T:
        return known.get(static_key(args), lambda: fn(*args))

    return call


def jit(fn: Callable[..., T]) -> Callable[..., T]:
    """`jax.jit` of a function on pytrees whose leaves need not be arrays: one compiled function per static form.

    What Equinox's `filter_jit` does, except that this one tells a static 1 from a static 1.0.
    """
    compiled: Recent[Callable[..., T]] = Recent(256)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> T:
        arrays, form = split_static(args, kwargs)

        def one(*arrays: Any) -> T:
            args, kwargs = form.join(arrays)
            return fn(*args, **kwargs)

        return compiled.get(form.key, lambda: jax.jit(one))(*arrays)

    return call


class ARRAY:
    """Stands where an array goes among the static leaves."""


class StaticForm(NamedTuple):
    """The arguments of a call, without their arrays."""

    tree: Any
    leaves: tuple[Any, ...]
    """`ARRAY` where an array goes."""
    orders: tuple[tuple[Any, ...], ...]
    """The keys of each dict, in their order: JAX sorts them, and a function may go through them."""

    @property
    def key(self) -> Hashable:
        return (tree_key(self.tree), static_key(self.leaves), static_key(self.orders))

    def join(self, arrays: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these arrays."""
        rest = iter(arrays)
        tree = jax.tree.unflatten(self.tree, [next(rest) if x is ARRAY else x for x in self.leaves])
        return in_order(tree, self.orders) if self.orders else tree


def split_static(args: Any, kwargs: Any, *, keep_numpy: bool = False) -> tuple[list[Any], StaticForm]:
    """The arrays among the arguments of a call, and all the rest. With `keep_numpy` those of NumPy are among the rest."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    kinds = jax.Array if keep_numpy else (jax.Array, np.ndarray, np.generic)
    arrays = [x for x in leaves if isinstance(x, kinds)]
    static = tuple(ARRAY if isinstance(x, kinds) else x for x in leaves)
    return arrays, StaticForm(tree, static, tuple(orders_of((args, kwargs))))


def orders_of(tree: Any) -> Iterator[tuple[Any, ...]]:
    """The keys of each dict in a tree, in their order."""
    for leaf in jax.tree.leaves(tree, is_leaf=_is_sorted_by_jax):
        if _is_sorted_by_jax(leaf):
            yield tuple(leaf)
            for value in leaf.values():
                yield from orders_of(value)


def in_order(tree: Any, orders: Iterable[tuple[Any, ...]]) -> Any:
    """A tree whose dicts have their keys in these orders."""
    rest = iter(orders)

    def ordered(leaf: Any) -> Any:
        if not _is_sorted_by_jax(leaf):
            return leaf
        keys = next(rest)
        if type(leaf) is dict:
            return {key: each(leaf[key]) for key in keys}
        return collections.defaultdict(leaf.default_factory, {key: each(leaf[key]) for key in keys})

    def each(tree: Any) -> Any:
        return jax.tree.map(ordered, tree, is_leaf=_is_sorted_by_jax)

    return each(tree)


def _is_sorted_by_jax(x: Any) -> bool:
    return type(x) in (dict, collections.defaultdict)


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))
