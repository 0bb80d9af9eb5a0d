"""Cache keys of static values. Traced functions are cached under these keys.

In Python, 1, 1.0 and True are equal, and so are 0.0 and -0.0; but a program traced with one of them is wrong for the others.
Our keys are equal only for values of the same types and the same bits. A wrong cache hit would silently give a wrong result,
while a miss costs only one more trace. So plain data is compared by structure, and everything else by identity.

    value                   its key (simplified)
    1.0                     (float, the 8 bytes of 1.0)
    Cfg(rate=1, act=relu)   (Cfg, ("rate", (int, 1)), ("act", Same(relu)))      `Same` compares by identity
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
"""Types for which `==` is exact if both values have the same type."""


_HOLD_A_VALUE = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset, np.ndarray, np.generic, jax.Array)
"""Types whose values hold data. A dataclass that inherits from one of them holds this data in addition to its fields."""


class NoKey(TypeError):
    """Raised for a mutable value that is not plain data. Its identity cannot be the key, because the value can change. Its parts
    cannot be the key, because they are unknown."""

    def __init__(self, value: Any):
        super().__init__(f"a `{type(value).__name__}` is not hashable")
        self.value = value


class Same:
    """A key that compares by identity. It keeps the object alive, so that no new object can get the same id."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def static_key(x: Any) -> Hashable:
    """The key of `x`: equal keys mean that no program can distinguish the values. Raises NoKey if `x` has no key.

    >>> static_key(1) == static_key(1), static_key(1) == static_key(True), static_key(0.0) == static_key(-0.0)
    (True, False, False)
    """
    return _key(x, (), strict=True)


def tree_key(tree: Any) -> Hashable:
    """The key of a `PyTreeDef`. The `PyTreeDef` itself is no exact key: it compares auxiliary data (static fields) by `==`.

    Auxiliary data for which `static_key` raises NoKey is compared by identity here, because JAX accepts such data too.
    """
    data = tree.node_data()
    if data is None:
        return ("leaf", tree.num_leaves)
    kind, aux = data
    return (kind, _key(aux, (), strict=False), tuple(tree_key(child) for child in tree.children()))


def _key(x: Any, within: tuple[int, ...], *, strict: bool) -> Hashable:
    """The key of `x`; with `strict`, raises NoKey for a mutable value that is not plain data.

    `within`: ids of the containers around `x`. A container that contains itself has no finite structure, and is compared by
    identity.
    """
    kind = type(x)
    if kind in _BY_VALUE:
        return (kind, x)
    if kind is float:
        return (kind, struct.pack("<d", x))
    if kind is complex:
        return (kind, struct.pack("<dd", x.real, x.imag))
    if isinstance(x, np.generic) or kind is np.ndarray:
        # Compare by content and not by identity: a NumPy array is mutable, unlike a JAX array.
        if not x.dtype.hasobject:
            return (kind, x.dtype, x.shape, x.tobytes())
    elif isinstance(x, jax.Array | gymnasium.Space) and not isinstance(x, jax.core.Tracer):
        return Same(x)  # not hashable, but immutable
    parts = None if id(x) in within else _parts(x)
    if parts is None:
        if strict and kind.__hash__ is None:
            raise NoKey(x)
        return Same(x)
    within = (*within, id(x))
    return (kind, *(_key(part, within, strict=strict) for part in parts))


def _parts(x: Any) -> tuple[Any, ...] | None:
    """The parts of `x` if it is plain data of a known type, else None. The type is not among the parts: `_key` adds it."""
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
        # Include attributes that are not fields: `__post_init__` may set some, and a base class may have slots.
        names = dict.fromkeys([*(f.name for f in dataclasses.fields(x)), *copyreg._slotnames(kind)])  # pyright: ignore[reportAttributeAccessIssue]
        return (tuple((name, getattr(x, name, Same)) for name in names), getattr(x, "__dict__", {}))
    return None


class Recent(Generic[T]):
    """A cache of at most `size` entries that drops the least recently used one (LRU)."""

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
    """A cache like `functools.lru_cache(256)` for positional static arguments: `static_key` compares them instead of `==`."""
    known: Recent[T] = Recent(256)

    @functools.wraps(fn)
    def call(*args: Any) -> T:
        return known.get(static_key(args), lambda: fn(*args))

    return call


def jit(fn: Callable[..., T]) -> Callable[..., T]:
    """`jax.jit` for pytrees whose leaves need not be arrays: one compiled function for each set of static leaves.

    Equinox's `filter_jit` does the same, but it does not distinguish a static 1 from a static 1.0.
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
    """Placeholder for an array among the static leaves."""


class StaticForm(NamedTuple):
    """The arguments of a call, without their arrays."""

    tree: Any
    """The tree of (args, kwargs)."""
    leaves: tuple[Any, ...]
    """The leaves of the tree, with `ARRAY` in place of each array."""
    orders: tuple[tuple[Any, ...], ...]
    """The keys of each dict, in their original order: JAX sorts them, but a function may iterate over them."""

    @property
    def key(self) -> Hashable:
        return (tree_key(self.tree), static_key(self.leaves), static_key(self.orders))

    def join(self, arrays: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these arrays."""
        rest = iter(arrays)
        tree = jax.tree.unflatten(self.tree, [next(rest) if x is ARRAY else x for x in self.leaves])
        return in_order(tree, self.orders) if self.orders else tree


def split_static(args: Any, kwargs: Any, *, keep_numpy: bool = False) -> tuple[list[Any], StaticForm]:
    """The arrays among the arguments of a call, and the rest. With `keep_numpy`, NumPy arrays belong to the rest."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    kinds = jax.Array if keep_numpy else (jax.Array, np.ndarray, np.generic)
    arrays = [x for x in leaves if isinstance(x, kinds)]
    static = tuple(ARRAY if isinstance(x, kinds) else x for x in leaves)
    return arrays, StaticForm(tree, static, tuple(orders_of((args, kwargs))))


def orders_of(tree: Any) -> Iterator[tuple[Any, ...]]:
    """The keys of each dict in a tree, in the order of the dict."""
    for leaf in jax.tree.leaves(tree, is_leaf=_is_sorted_by_jax):
        if _is_sorted_by_jax(leaf):
            yield tuple(leaf)
            for value in leaf.values():
                yield from orders_of(value)


def in_order(tree: Any, orders: Iterable[tuple[Any, ...]]) -> Any:
    """The tree with the keys of its dicts in these orders, as `orders_of` returned them."""
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


def freeze(tree: Any) -> Any:
    """`tree` with arrays as its only leaves: all other leaves, such as an activation function, become part of the structure."""
    return jax.tree.map(lambda x: x if is_array(x) else Static(x), tree)


def thaw(frozen: Any) -> Any:
    """The inverse of `freeze`."""
    is_static = lambda x: isinstance(x, Static)  # noqa: E731
    return jax.tree.map(lambda x: x.value if is_static(x) else x, frozen, is_leaf=is_static)


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["value"])
@dataclasses.dataclass(frozen=True)
class Static:
    """Makes a leaf that is not an array part of the structure of a pytree."""

    value: Any
