"""Static values that compare equal, but differ in type or bits: 1, 1.0 and True; 0.0 and -0.0.

A static value is anything in the arguments of a fragment that is not an array. Choreo caches the programs of fragments by their
static values. If this cache compared them with `==`, a call with 1.0 would get the program for 1.
"""

import collections
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import choreo
from laws.edge_cases.program import acts, learn
from partition.ponds import Functions


class Level(enum.IntEnum):
    """An enum whose members compare equal to integers."""

    ONE = 1
    ZERO = 0


class AlwaysEqual:
    """Compares equal to every other object of its class, whatever its value."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, AlwaysEqual)

    def __hash__(self):
        return 0


class Number(int):
    """A user's subclass of int."""


def reveal(value, x):
    """Return arrays that show the type and the bits of the static value."""
    if isinstance(value, AlwaysEqual):
        value = value.value
    word = f"{type(value).__name__} {value!r}"
    kind = sum(ord(letter) * (i + 1) for i, letter in enumerate(word)) % 1009
    exact = jnp.full_like(x, kind)
    if isinstance(value, (bool, int, float, complex)) and not isinstance(value, enum.Enum):
        with jax.numpy_dtype_promotion("standard"):
            return exact, x * value, jnp.full((2,), value)
    return (exact,)


@dataclass(frozen=True)
class Frozen:
    """A dataclass like an algorithm: the static value is a field of `self`."""

    value: Any

    @choreo.fragment("actor")
    def call(self, x):
        return reveal(self.value, x)

    def plain(self, x):
        return reveal(self.value, x)


@dataclass(frozen=True)
class Wrapper:
    """A dataclass around the static value."""

    inner: Any


class StaticField(eqx.Module):
    """The value is a static field of a module."""

    x: jax.Array
    value: Any = eqx.field(static=True)


class LeafField(eqx.Module):
    """The value is a leaf of a module."""

    x: jax.Array
    value: Any


class Tagged(NamedTuple):
    """The value is an entry of a tuple."""

    x: Any
    value: Any


@jax.tree_util.register_pytree_node_class
class NodeWithAux:
    """A user's own pytree node with the value as its auxiliary data."""

    def __init__(self, x, value):
        self.x, self.value = x, value

    def tree_flatten(self):
        return (self.x,), (self.value,)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], aux[0])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["value"])
@dataclass(frozen=True)
class RegisteredValue:
    """The value is a meta field of a registered dataclass."""

    x: Any
    value: Any


@choreo.fragment("actor")
def by_position(value, x):
    return reveal(value, x)


@choreo.fragment("actor")
def by_keyword(x, *, value):
    return reveal(value, x)


@choreo.fragment("actor")
def by_field(given):
    return reveal(given.value, given.x)


@choreo.fragment("actor")
def by_inner(given, x):
    return reveal(given.inner, x)


@choreo.fragment("actor")
def by_inner_inner(given, x):
    return reveal(given.inner.inner, x)


@choreo.fragment("actor")
def by_dict_key(given):
    ((value, x),) = given.items()
    return reveal(value, x)


@choreo.fragment("actor")
def by_call(f, x):
    return f(x)


@choreo.fragment("actor")
def by_set(values, x):
    (value,) = values
    return reveal(value, x)


@choreo.fragment("actor")
def return_the_static(value, x):
    """Return the static value itself, which is not an array."""
    return x, value


def use_the_returned_static(v, x):
    y, value = return_the_static(v, x)
    return reveal(value, y)


def plain_keyword(x, value):
    return reveal(value, x)


HOLDERS: dict[str, Callable[[Any, jax.Array], Any]] = {
    "argument": by_position,
    "keyword": lambda v, x: by_keyword(x, value=v),
    "self": lambda v, x: Frozen(v).call(x),
    "in a dataclass": lambda v, x: by_inner(Wrapper(v), x),
    "in a dataclass in a dataclass": lambda v, x: by_inner_inner(Wrapper(Wrapper(v)), x),
    "in a tuple in a dataclass": lambda v, x: by_set(Wrapper((v,)).inner, x),
    "in a registered dataclass": lambda v, x: by_field(RegisteredValue(x, v)),
    "static field": lambda v, x: by_field(StaticField(x, v)),
    "leaf field": lambda v, x: by_field(LeafField(x, v)),
    "NamedTuple": lambda v, x: by_field(Tagged(x, v)),
    "auxiliary data": lambda v, x: by_field(NodeWithAux(x, v)),
    "dict key": lambda v, x: by_dict_key({v: x}),
    "OrderedDict key": lambda v, x: by_dict_key(collections.OrderedDict([(v, x)])),
    "partial": lambda v, x: by_call(functools.partial(reveal, v), x),
    "partial with a keyword": lambda v, x: by_call(functools.partial(plain_keyword, value=v), x),
    "jax partial": lambda v, x: by_call(jax.tree_util.Partial(reveal, v), x),
    "bound method": lambda v, x: by_call(Frozen(v).plain, x),
    "closure": lambda v, x: by_call(lambda x: reveal(v, x), x),
    "frozenset": lambda v, x: by_set(frozenset([v]), x),
    "returned by the fragment": use_the_returned_static,
}
"""Places of a static value in a call of a fragment."""


EQUALS: dict[str, tuple[Any, ...]] = {
    "one": (1, 1.0, True, 1 + 0j, Level.ONE, Number(1), Fraction(1)),
    "zero": (0.0, -0.0, 0, False, Level.ZERO),
    "complex zero": (complex(0.0, 0.0), complex(-0.0, 0.0), complex(0.0, -0.0)),
    "tuples": ((1, 2), (1.0, 2), (True, 2), Tagged(1, 2)),
    "nested tuples": (((0.0,), 1), ((-0.0,), 1), ((0,), True)),
    "objects that say they are equal": (AlwaysEqual(1), AlwaysEqual(2.0), AlwaysEqual(True)),
    "strings and their subclasses": ("a", enum.StrEnum("Letters", {"A": "a"}).A),  # pyright: ignore[reportAttributeAccessIssue]
    "dtypes": (np.dtype("float32"), jnp.float32, np.float32),
}
"""Groups of values that compare equal, but for which `reveal` gives different results."""

NUMBERS = ("one", "zero", "complex zero")
"""The groups of `EQUALS` that consist of numbers."""


def with_static(value: Any, holder: str) -> Functions:
    """A program that calls a mapped fragment with the static value. The result is added to the states that the actor reads."""

    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.ones(env.width)}

    def iterate(env, c, key):
        seen = jax.vmap(lambda x: HOLDERS[holder](value, x))(c["s"])
        s = env.step(c["s"], acts(c["w"], c["s"] + 0.001 * seen[0]))
        return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(seen[0])}

    return Functions(init, iterate)
