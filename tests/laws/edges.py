"""Programs at the edges of what JAX knows: leaves, containers, statics that compare equal, shapes that depend on E.

Each is an ordinary small algorithm on `Pond` with one odd thing in it. `Edge` makes an algorithm of two functions; the
functions take all sizes from `env`, so that one program runs at many.
"""

import collections
import enum
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import choreo
from choreo.loops import Position, rollout

Init = Callable[[Any, jax.Array], Any]
Iterate = Callable[[Any, Any, jax.Array], tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class Edge:
    """An algorithm made of two functions."""

    start: Init
    step: Iterate

    def init(self, env, key):
        return self.start(env, key)

    def iterate(self, env, carry, key):
        return self.step(env, carry, key)


@choreo.fragment("actor")
def act(w, s):
    return w * jnp.tanh(s)


@choreo.fragment("actor")
def act_and_hand_over(w, s, x):
    """One environment: what comes with it crosses to the learner as it is."""
    return w * jnp.tanh(s), x


@choreo.fragment("learner")
def learn(w, *xs):
    return w - choreo.all_reduce(sum(0.05 * jnp.mean(jnp.tanh(x) ** 2) for x in xs))


@choreo.fragment("learner")
def keep(x):
    return x


def acts(w, s):
    return jax.vmap(act, (None, 0))(w, s)


# Leaves


def fold(key):
    return jax.random.fold_in(key, 3)


def opposite(x):
    return jnp.logical_not(x)


def up(x):
    return x + np.ones((), x.dtype)


def scaled(x):
    """For types without arithmetic of their own."""
    return (x.astype(jnp.float32) * 0.5).astype(x.dtype)


def toggled(x):
    return (1 - x.astype(jnp.int32)).astype(x.dtype)


def wide(names: str) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    return {name: (jnp.arange(3).astype(name), up) for name in names.split()}


ARRAYS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    **wide("int8 int16 int32 uint8 uint16 uint32 float16 float32 bfloat16 complex64"),
    "bool": (jnp.array([True, False, True]), opposite),
    "int4": (jnp.array([0, 1, 0], jnp.int4), toggled),
    "uint4": (jnp.array([0, 1, 0], jnp.uint4), toggled),
    "float8_e4m3fn": (jnp.array([0.5, 1.0, 2.0], jnp.float8_e4m3fn), scaled),
    "float8_e5m2": (jnp.array([0.5, 1.0, 2.0], jnp.float8_e5m2), scaled),
    "float8_e4m3b11fnuz": (jnp.array([0.5, 1.0, 2.0], jnp.float8_e4m3b11fnuz), scaled),
    "scalar": (jnp.float32(0.5), up),
    "weak float": (jnp.asarray(0.5), lambda x: x + 1),
    "zero-size": (jnp.zeros((0, 3)), up),
    "zero-size at the end": (jnp.zeros((3, 0), jnp.int32), up),
    "numpy array": (np.arange(3, dtype=np.float32), up),
    "numpy array of int8": (np.arange(3, dtype=np.int8), up),
    "numpy float64": (np.linspace(0.0, 1.0, 3), up),
    "numpy bfloat16": (np.ones(3, ml_dtypes.bfloat16), up),
    "negative zero": (jnp.array([-0.0, 0.0]), jnp.negative),
    "not a number": (jnp.array([jnp.nan, jnp.inf, -jnp.inf]), jnp.negative),
    "key": (jax.random.key(1), fold),
    "key rbg": (jax.random.key(1, impl="rbg"), fold),
    "key unsafe_rbg": (jax.random.key(1, impl="unsafe_rbg"), fold),
    "key threefry": (jax.random.key(1, impl="threefry2x32"), fold),
    "keys": (jax.random.split(jax.random.key(1), 3), jax.vmap(fold)),
    "old-style key": (jax.random.PRNGKey(1), fold),
}
"""A leaf, and how an iteration changes it."""

PYTHON: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "int": (0, lambda x: x + 1),
    "negative int": (-3, lambda x: x * 2),
    "float": (0.5, lambda x: x + 0.25),
    "float -0.0": (-0.0, lambda x: -x),
    "bool": (False, lambda x: jnp.logical_not(x) if isinstance(x, jax.Array) else not x),
    "complex": (1j, lambda x: x * 1j),
    "numpy float32": (np.float32(0.5), lambda x: x + np.float32(1)),
    "numpy int8": (np.int8(1), lambda x: x + np.int8(1)),
    "numpy bool": (np.bool_(True), opposite),
    "numpy float64 scalar": (np.float64(0.5), lambda x: x + 1),
}
"""Numbers that are no arrays: an iteration changes them, too."""


def fresh(x):
    """An array of its own: JAX gives equal constants one buffer."""
    if isinstance(x, np.ndarray):
        return x.copy()
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def with_leaf(leaf: Any, change: Callable[[Any], Any]) -> Edge:
    """The leaf kept, changed, twice in `init` (the same object), swapped, given out twice; and per environment, handed over."""
    arrays = isinstance(leaf, (jax.Array, np.ndarray))

    def rows(env):
        """One for each environment, each another if there is a way to change it."""
        return jnp.stack([jnp.asarray(leaf), jnp.asarray(change(jnp.asarray(leaf)))])[jnp.arange(env.num_envs) % 2]

    def init(env, key):
        carry = {
            "s": env.reset(env.keys(key)),
            "w": jnp.linspace(0.5, 1.5, env.width),
            "kept": leaf,
            "alias": leaf,
            "moved": fresh(leaf),
            "this": fresh(leaf),
            "that": change(fresh(leaf)),
            "first": leaf,
            "second": leaf,
        }
        return carry | ({"rows": rows(env)} if arrays else {})

    def iterate(env, c, key):
        after = dict(c)
        if arrays:
            a, x = jax.vmap(act_and_hand_over, (None, 0, 0))(c["w"], c["s"], c["rows"])
            after["rows"] = jax.vmap(change)(x)
        else:
            a = acts(c["w"], c["s"])
        s = env.step(c["s"], a)
        after |= {"s": s, "w": learn(c["w"], s), "moved": change(c["moved"]), "this": c["that"], "that": c["this"]}
        after["first"] = after["second"] = change(c["second"])
        return after, {"m": jnp.mean(s)}

    return Edge(init, iterate)


def counting(steps: Callable[[Any], Any], first: Any) -> Edge:
    """The learner reads a leaf that each iteration changes: frozen at its first value, the weights are wrong."""

    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.linspace(0.5, 1.5, env.width), "n": first}

    def iterate(env, c, key):
        s = env.step(c["s"], acts(c["w"], c["s"]))
        rate = 0.1 / (1.0 + jnp.asarray(c["n"]).astype(jnp.float32))
        return {"s": s, "w": c["w"] - rate * learn(c["w"], s), "n": steps(c["n"])}, {"n": c["n"], "rate": rate}

    return Edge(init, iterate)


COUNTERS: dict[str, Edge] = {
    "int": counting(lambda n: n + 1, 0),
    "float": counting(lambda n: n + 0.5, 0.0),
    "bool that flips": counting(lambda n: jnp.logical_not(n) if isinstance(n, jax.Array) else not n, False),
    "bool by a select": counting(lambda n: jnp.where(n, False, True), False),
    "int that becomes an array": counting(lambda n: jnp.asarray(n) + 1, 0),
    "numpy int": counting(lambda n: n + np.int32(1), np.int32(0)),
    "numpy array": counting(lambda n: n + np.int32(1), np.array(0, np.int32)),
    "in a fragment": counting(choreo.fragment("learner")(lambda n: n + 1), 0),
    "in an actor": counting(choreo.fragment("actor")(lambda n: n + 1), 0),
}


def chained() -> Edge:
    """One Python number changes only because another one did."""

    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.ones(env.width), "a": 0, "b": 0, "c": 0}

    def iterate(env, c, key):
        s = env.step(c["s"], acts(c["w"], c["s"]))
        late = jnp.asarray(c["c"]).astype(jnp.float32)
        after = {"s": s, "w": learn(c["w"], s) + 0.1 * late, "a": c["a"] + 1, "b": c["a"] + 0, "c": c["b"] + 0}
        return after, {"c": c["c"]}

    return Edge(init, iterate)


def changing_only_later() -> Edge:
    """The first iteration gives the flag back as it was."""

    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.ones(env.width), "n": jnp.int32(0), "late": False}

    def iterate(env, c, key):
        s = env.step(c["s"], acts(c["w"], c["s"]))
        w = learn(c["w"], s) * jnp.where(c["late"], 0.5, 1.0)
        return {"s": s, "w": w, "n": c["n"] + 1, "late": c["n"] >= 1}, {"late": c["late"]}

    return Edge(init, iterate)


COUNTERS |= {"a chain": chained(), "changes only later": changing_only_later()}


def with_module(make: Callable[[jax.Array], Any], apply: Callable[..., Any]) -> Edge:
    """An Equinox module in the carry, whose Python leaves and functions must stay what they are."""

    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.ones(env.width), "net": make(jax.random.key(5))}

    def iterate(env, c, key):
        arrays, static = eqx.partition(c["net"], eqx.is_inexact_array)
        use = choreo.fragment("actor")(lambda arrays, s, key: apply(eqx.combine(arrays, static), s, key))
        a = jax.vmap(use, (None, 0, 0))(arrays, c["s"], env.keys(key))
        s = env.step(c["s"], a)
        arrays = choreo.fragment("learner")(lambda a, s: jax.tree.map(lambda x: x - 0.01 * jnp.mean(s), a))(arrays, s)
        return {"s": s, "w": learn(c["w"], s), "net": eqx.combine(arrays, static)}, {"m": jnp.mean(s)}

    return Edge(init, iterate)


MODULES: dict[str, Edge] = {
    "Dropout": with_module(
        lambda key: [eqx.nn.Linear(3, 3, key=key), eqx.nn.Dropout(0.5)],
        lambda net, s, key: net[1](net[0](s), key=key),
    ),
    "MLP": with_module(lambda key: eqx.nn.MLP(3, 3, 4, 1, key=key), lambda net, s, key: net(s)),
    "MultiheadAttention": with_module(
        lambda key: eqx.nn.MultiheadAttention(1, 3, key=key), lambda net, s, key: net(*[s[None]] * 3)[0]
    ),
    "LayerNorm": with_module(lambda key: eqx.nn.LayerNorm(3), lambda net, s, key: net(s)),
}


# Containers


class Pair(NamedTuple):
    s: Any
    w: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "s"], meta_fields=["note"])
@dataclass(frozen=True)
class Registered:
    """Its leaves are in another order than its fields."""

    s: Any
    w: Any
    note: Any = "note"


class Module(eqx.Module):
    s: Any
    w: Any
    power: Any = eqx.field(static=True, default=1)
    squash: Callable[[Any], Any] = jnp.tanh


@jax.tree_util.register_pytree_node_class
class Turned:
    """A node of the user's, without names, and its children the other way round."""

    def __init__(self, s, w):
        self.s, self.w = s, w

    def tree_flatten(self):
        return (self.w, self.s), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[1], children[0])


def ordered(s, w):
    return collections.OrderedDict([("w", w), ("s", s)])


def defaulted(s, w):
    found = collections.defaultdict(list)
    found |= {"w": w, "s": s}
    return found


CONTAINERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "dict": (lambda s, w: {"w": w, "s": s}, lambda c: (c["s"], c["w"])),
    "OrderedDict": (ordered, lambda c: (c["s"], c["w"])),
    "defaultdict": (defaulted, lambda c: (c["s"], c["w"])),
    "tuple": (lambda s, w: (w, s), lambda c: (c[1], c[0])),
    "list": (lambda s, w: [w, s], lambda c: (c[1], c[0])),
    "NamedTuple": (Pair, tuple),
    "registered dataclass": (Registered, lambda c: (c.s, c.w)),
    "Equinox module": (Module, lambda c: (c.s, c.w)),
    "a node of the user's": (Turned, lambda c: (c.s, c.w)),
    "None beside": (lambda s, w: {"none": None, "s": s, "also": (None, [None]), "w": w}, lambda c: (c["s"], c["w"])),
    "empty beside": (lambda s, w: [(), {}, [], w, ((), s)], lambda c: (c[4][1], c[3])),
    "int keys": (lambda s, w: {10: s, 9: {2: w}, 100: None}, lambda c: (c[10], c[9][2])),
    "tuple keys": (lambda s, w: {(1, "a"): s, (0, "b"): w}, lambda c: (c[1, "a"], c[0, "b"])),
    "nested": (
        lambda s, w: collections.OrderedDict(z=[{"b": (s,)}, None], a=Pair(Registered(w, ()), Module(None, 3))),
        lambda c: (c["z"][0]["b"][0], c["a"].s.s),
    ),
    "Partial": (lambda s, w: jax.tree_util.Partial(act, w, s), lambda c: (c.args[1], c.args[0])),
    "functions and strings beside": (
        lambda s, w: {"f": jnp.tanh, "name": "pond", "s": s, "w": w, "dtype": jnp.float32},
        lambda c: (c["s"], c["w"]),
    ),
}
"""How to put the state and the weights into one, and how to get them out."""


def in_container(name: str) -> Edge:
    make, take = CONTAINERS[name]

    def init(env, key):
        return make(env.reset(env.keys(key)), jnp.linspace(0.5, 1.5, env.width))

    def iterate(env, c, key):
        s, w = take(c)
        s = env.step(s, acts(w, s))
        return make(s, learn(w, s)), {"m": jnp.mean(s)}

    return Edge(init, iterate)


def through_fragments(name: str) -> Edge:
    """The container is an argument and a result of fragments."""
    make, take = CONTAINERS[name]

    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.linspace(0.5, 1.5, env.width)}

    def iterate(env, c, key):
        @choreo.fragment("actor")
        def act_in(w, s):
            return make(w * jnp.tanh(s), s)

        @choreo.fragment("learner")
        def learn_from(w, given):
            action, s = take(given)
            return make(w - 0.05 * jnp.mean(jnp.tanh(action) ** 2), jnp.mean(s))

        given = jax.vmap(act_in, (None, 0))(c["w"], c["s"]) if name not in PLAIN_ONLY else act_in(c["w"][None], c["s"])
        s = env.step(c["s"], take(given)[0])
        w, mean = take(learn_from(c["w"], given))
        return {"s": s, "w": w}, {"m": mean}

    return Edge(init, iterate)


PLAIN_ONLY = {"Partial", "functions and strings beside", "Equinox module", "nested"}
"""`vmap` takes no leaves that are not arrays."""


class Metrics(NamedTuple):
    zeta: Any
    alpha: Any


class Names(dict):
    """A user's dict: to JAX, a leaf."""


METRICS: dict[str, Callable[[Any, Any], Any]] = {
    "OrderedDict": lambda s, w: collections.OrderedDict(zeta=jnp.mean(s), alpha=jnp.max(w), middle=jnp.min(s)),
    "defaultdict": lambda s, w: collections.defaultdict(float, zeta=jnp.mean(s), alpha=jnp.max(w)),
    "dict out of order": lambda s, w: {"zeta": jnp.mean(s), "alpha": jnp.max(w), "Z": jnp.min(s), "a": jnp.min(w)},
    "NamedTuple": lambda s, w: Metrics(jnp.mean(s), jnp.max(w)),
    "dict of the user's": lambda s, w: Names(zeta=jnp.mean(s), alpha=jnp.max(w)),
    "nested": lambda s, w: {"zeta": {"b": jnp.mean(s)}, "alpha": jnp.max(w)},
    "list": lambda s, w: [jnp.mean(s), jnp.max(w)],
    "none at all": lambda s, w: {},
    "None": lambda s, w: None,
    "None within": lambda s, w: {"zeta": None, "alpha": jnp.max(w)},
    "int keys": lambda s, w: {2: jnp.mean(s), 10: jnp.max(w)},
    "Python numbers": lambda s, w: {"i": 3, "f": 0.5, "b": True, "alpha": jnp.max(w)},
    "NumPy numbers": lambda s, w: {"i": np.int8(3), "f": np.float32(0.5), "b": np.bool_(True), "a": np.arange(3)[1]},
    "types": lambda s, w: {
        "bool": jnp.any(s > 0),
        "int": jnp.sum(s > 0),
        "uint8": jnp.max(s > 0).astype(jnp.uint8),
        "f16": jnp.mean(s).astype(jnp.float16),
        "int8": jnp.int8(-3),
    },
    "bfloat16": lambda s, w: {"bf16": jnp.max(s).astype(jnp.bfloat16), "alpha": jnp.max(w)},
    "float8": lambda s, w: {"f8": jnp.max(s).astype(jnp.float8_e4m3fn), "alpha": jnp.max(w)},
    "int4": lambda s, w: {"i4": jnp.max(s > 0).astype(jnp.int4), "alpha": jnp.max(w)},
    "complex": lambda s, w: {"c": lax.complex(jnp.mean(s), jnp.max(s)), "alpha": jnp.max(w)},
    "key": lambda s, w: {"key": jax.random.key(3), "alpha": jnp.max(w)},
    "the same twice": lambda s, w: dict.fromkeys(["b", "a"], jnp.mean(s)),
    "carried": lambda s, w: {"w": w[0], "s": s[0, 0]},
    "zero-size": lambda s, w: {"z": s[:0], "alpha": jnp.max(w)},
    "a function": lambda s, w: {"f": jnp.tanh, "alpha": jnp.max(w)},
    "a string": lambda s, w: {"f": "word", "alpha": jnp.max(w)},
}
METRICS_THAT_RUN = {
    "OrderedDict", "defaultdict", "dict out of order", "none at all", "Python numbers", "NumPy numbers", "types",
    "the same twice", "carried",
}  # fmt: skip
"""What else is no flat dict of numbers may be refused."""


def with_metrics(name: str) -> Edge:
    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.linspace(0.5, 1.5, env.width)}

    def iterate(env, c, key):
        s = env.step(c["s"], acts(c["w"], c["s"]))
        w = learn(c["w"], s)
        return {"s": s, "w": w}, METRICS[name](s, w)

    return Edge(init, iterate)


# Statics that compare equal, but differ


class Level(enum.IntEnum):
    ONE = 1
    ZERO = 0


class Same:
    """Equal to every other of its kind."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Same)

    def __hash__(self):
        return 0


class Number(int):
    """A user's number."""


def use(value, x):
    """A result in which type and bits of the value show."""
    if isinstance(value, Same):
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
    value: Any

    @choreo.fragment("actor")
    def call(self, x):
        return use(self.value, x)

    def plain(self, x):
        return use(self.value, x)


@dataclass(frozen=True)
class Outer:
    inner: Any


class Holder(eqx.Module):
    x: jax.Array
    value: Any = eqx.field(static=True)


class Leafy(eqx.Module):
    x: jax.Array
    value: Any


class Tagged(NamedTuple):
    x: Any
    value: Any


@jax.tree_util.register_pytree_node_class
class Noted:
    """A node of the user's with the value as its auxiliary data."""

    def __init__(self, x, value):
        self.x, self.value = x, value

    def tree_flatten(self):
        return (self.x,), (self.value,)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], aux[0])


@choreo.fragment("actor")
def by_position(value, x):
    return use(value, x)


@choreo.fragment("actor")
def by_keyword(x, *, value):
    return use(value, x)


@choreo.fragment("actor")
def by_field(given):
    return use(given.value, given.x)


@choreo.fragment("actor")
def by_inner(given, x):
    return use(given.inner, x)


@choreo.fragment("actor")
def by_inner_inner(given, x):
    return use(given.inner.inner, x)


@choreo.fragment("actor")
def by_dict_key(given):
    ((value, x),) = given.items()
    return use(value, x)


@choreo.fragment("actor")
def by_call(f, x):
    return f(x)


@choreo.fragment("actor")
def by_set(values, x):
    (value,) = values
    return use(value, x)


@choreo.fragment("actor")
def gives_back(value, x):
    """The value itself is a result that is no array."""
    return x, value


def returned(v, x):
    y, value = gives_back(v, x)
    return use(value, y)


HOLDERS: dict[str, Callable[[Any, jax.Array], Any]] = {
    "argument": by_position,
    "keyword": lambda v, x: by_keyword(x, value=v),
    "self": lambda v, x: Frozen(v).call(x),
    "in a dataclass": lambda v, x: by_inner(Outer(v), x),
    "in a dataclass in a dataclass": lambda v, x: by_inner_inner(Outer(Outer(v)), x),
    "in a tuple in a dataclass": lambda v, x: by_set(Outer((v,)).inner, x),
    "in a registered dataclass": lambda v, x: by_field(RegisteredValue(x, v)),
    "static field": lambda v, x: by_field(Holder(x, v)),
    "field": lambda v, x: by_field(Leafy(x, v)),
    "NamedTuple": lambda v, x: by_field(Tagged(x, v)),
    "auxiliary data": lambda v, x: by_field(Noted(x, v)),
    "dict key": lambda v, x: by_dict_key({v: x}),
    "OrderedDict key": lambda v, x: by_dict_key(collections.OrderedDict([(v, x)])),
    "partial": lambda v, x: by_call(functools.partial(use, v), x),
    "partial with a keyword": lambda v, x: by_call(functools.partial(plain_keyword, value=v), x),
    "jax partial": lambda v, x: by_call(jax.tree_util.Partial(use, v), x),
    "bound method": lambda v, x: by_call(Frozen(v).plain, x),
    "closure": lambda v, x: by_call(lambda x: use(v, x), x),
    "frozenset": lambda v, x: by_set(frozenset([v]), x),
    "given back": returned,
}
"""Where a static may stand in a call of a fragment."""


def plain_keyword(x, value):
    return use(value, x)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["value"])
@dataclass(frozen=True)
class RegisteredValue:
    x: Any
    value: Any


EQUALS: dict[str, tuple[Any, ...]] = {
    "one": (1, 1.0, True, 1 + 0j, Level.ONE, Number(1), Fraction(1)),
    "zero": (0.0, -0.0, 0, False, Level.ZERO),
    "complex zero": (complex(0.0, 0.0), complex(-0.0, 0.0), complex(0.0, -0.0)),
    "tuples": ((1, 2), (1.0, 2), (True, 2), Tagged(1, 2)),
    "nested tuples": (((0.0,), 1), ((-0.0,), 1), ((0,), True)),
    "objects that say they are equal": (Same(1), Same(2.0), Same(True)),
    "strings and their subclasses": ("a", enum.StrEnum("Letters", {"A": "a"}).A),  # pyright: ignore[reportAttributeAccessIssue]
    "dtypes": (np.dtype("float32"), jnp.float32, np.float32),
}
"""Values of which neighbours compare equal."""

NUMBERS = ("one", "zero", "complex zero")


def iterating(value: Any, holder: str) -> Edge:
    """A whole program with the value in a mapped fragment."""

    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.ones(env.width)}

    def iterate(env, c, key):
        seen = jax.vmap(lambda x: HOLDERS[holder](value, x))(c["s"])
        s = env.step(c["s"], acts(c["w"], c["s"] + 0.001 * seen[0]))
        return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(seen[0])}

    return Edge(init, iterate)


# Shapes that depend on E


SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "E": lambda E: (E,),
    "E + 1": lambda E: (E + 1,),
    "2E": lambda E: (2 * E,),
    "ring of 4E": lambda E: (4 * E, 2),
    "E / 2": lambda E: (max(E // 2, 1),),
    "E E": lambda E: (E * E,),
    "[T, E]": lambda E: (3, E),
    "[E, T]": lambda E: (E, 3),
    "[E, E]": lambda E: (E, E),
    "[E, 2E]": lambda E: (E, 2 * E),
    "[2E, E]": lambda E: (2 * E, E),
    "[E, 1]": lambda E: (E, 1),
    "[1, E]": lambda E: (1, E),
    "[E, 0]": lambda E: (E, 0),
}


def with_shape(name: str) -> Edge:
    """A leaf of that shape, into which each iteration writes what the environments have, and from which it learns."""

    def init(env, key):
        leaf = jnp.zeros(SHAPES[name](env.num_envs))
        return {"s": env.reset(env.keys(key)), "w": jnp.linspace(0.5, 1.5, env.width), "leaf": leaf, "at": jnp.int32(0)}

    def iterate(env, c, key):
        E, size = env.num_envs, math.prod(SHAPES[name](env.num_envs))

        @choreo.fragment("learner")
        def learn_and_write(w, leaf, at, s):
            flat = leaf.reshape(-1)
            some = min(E, size)
            if some:
                flat = flat.at[(at + jnp.arange(some)) % size].set(jnp.tanh(s[:some, 0]))
            mean = jnp.sum(flat) / max(size, 1)
            return w - 0.1 * mean * jnp.tanh(w), flat.reshape(leaf.shape), at + E, mean

        s = env.step(c["s"], acts(c["w"], c["s"]))
        w, leaf, at, mean = learn_and_write(c["w"], c["leaf"], c["at"], s)
        return {"s": s, "w": w, "leaf": leaf, "at": at}, {"mean": mean, "filled": jnp.sum(leaf != 0)}

    return Edge(init, iterate)


def with_rows(name: str) -> Edge:
    """The same where every environment keeps its own rows, if the shape has an axis of E and no more."""

    def init(env, key):
        leaf = jnp.zeros(SHAPES[name](env.num_envs))
        return {"s": env.reset(env.keys(key)), "w": jnp.linspace(0.5, 1.5, env.width), "leaf": leaf}

    def iterate(env, c, key):
        s = env.step(c["s"], acts(c["w"], c["s"]))
        axis = {"E": 0, "[T, E]": 1, "[E, T]": 0, "[E, 1]": 0, "[1, E]": 1, "[E, 0]": 0}[name]
        shape = [env.num_envs if d == axis else 1 for d in range(c["leaf"].ndim)]
        leaf = 0.5 * c["leaf"] + s[:, 0].reshape(shape)
        w = learn(c["w"], s) + (0.1 * jnp.mean(leaf) if leaf.size else 0.0)
        return {"s": s, "w": w, "leaf": leaf}, {"first": jnp.sum(leaf)}

    return Edge(init, iterate)


ONE_AXIS = ("E", "[T, E]", "[E, T]", "[E, 1]", "[1, E]", "[E, 0]")


# E equal to something else


def state_and_weights(env, key):
    return {"s": env.reset(env.keys(key)), "w": jnp.linspace(0.5, 1.5, env.width)}


def square_and_weights(env, key):
    width = env.width
    return state_and_weights(env, key) | {"m": jnp.linspace(-0.3, 0.3, width * width).reshape(width, width)}


def dense(env, c, key):
    """Weights [width, width]: where width is E, nothing but the derivation tells which axis is which."""
    mapped = jax.vmap(choreo.fragment("actor")(lambda m, s: jnp.tanh(m @ s)), (None, 0))
    s = env.step(c["s"], mapped(c["m"], c["s"]))
    m = choreo.fragment("learner")(lambda m, s: m - 0.05 * (s.T @ s) / len(s))(c["m"], s)
    return {"s": s, "w": learn(c["w"], s), "m": m}, {"m": jnp.mean(m)}


def batched(env, c, key):
    """The actor sees all environments and their features in one product."""
    s = env.step(c["s"], choreo.fragment("actor")(lambda m, s: jnp.tanh(s @ m))(c["m"], c["s"]))
    return {"s": s, "w": learn(c["w"], s), "m": c["m"].T}, {"m": jnp.sum(s[0])}


def turned(env, c, key):
    """The state is turned, summed along its features, and turned back."""
    s = env.step(c["s"], jnp.cumsum(acts(c["w"], c["s"]).T, axis=0).T)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s[0])}


def turned_and_mixed(env, c, key):
    """The same along the environments."""
    s = env.step(c["s"], choreo.fragment("actor")(lambda w, s: jnp.cumsum((w * s).T, axis=1).T)(c["w"][None], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s[:, 0])}


def as_long_as_wide(env, c, key):
    """A rollout of as many steps as there are environments: [T, E, width] with T = E."""

    def step(s, t):
        s = env.step(s, acts(c["w"], s) + 0.01 * t)
        return s, s

    s, states = lax.scan(step, c["s"], jnp.arange(env.num_envs, dtype=jnp.float32))
    total = jnp.swapaxes(jnp.cumsum(states, axis=0), 0, 1)  # [E, T, width]
    return {"s": s, "w": learn(c["w"], total[:, -1])}, {"m": jnp.mean(total[0]), "n": jnp.mean(states[0])}


def per_environment_keys(env, c, key):
    draw = choreo.fragment("actor")(lambda s, k: jnp.tanh(s) + 0.1 * jax.random.normal(k, s.shape))
    s = env.step(c["s"], jax.vmap(draw)(c["s"], env.keys(key)))
    noise = jax.random.normal(key, (env.num_envs, env.width))
    return {"s": s, "w": learn(c["w"], s + 0.1 * noise)}, {"m": jnp.mean(s)}


def pairs(env, c, key):
    """All pairs of environments, summed at the learner."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    near = jnp.tanh(s @ s.T)
    return {"s": s, "w": learn(c["w"], near, near[0])}, {"m": jnp.mean(near[:, 0])}


def looked_up(env, c, key):
    """Each environment looks up its own number in a table of as many rows as there are environments."""
    table = jnp.linspace(-1.0, 1.0, env.num_envs * env.width).reshape(env.num_envs, env.width)
    look = choreo.fragment("actor")(lambda t, s: s + t[jnp.argmax(s) % len(t)])
    s = env.step(c["s"], jax.vmap(look, (None, 0))(table, c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


def memory_of_all(env, key):
    width = env.width
    return state_and_weights(env, key) | {
        "seen": jnp.zeros((env.num_envs, env.num_envs)),
        "v": jnp.zeros((width, width)),
    }


def squares_carried(env, c, key):
    """Squares of two meanings, in the carry: [E, E] of all pairs, and [width, width]."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    seen = 0.5 * c["seen"] + jnp.tanh(s @ s.T) * jnp.arange(env.num_envs, dtype=s.dtype)[None]
    v = 0.5 * c["v"] + jnp.tanh(s.T @ s)
    return {"s": s, "w": learn(c["w"], seen, v), "seen": seen, "v": v.T}, {"m": jnp.mean(seen[0]), "v": jnp.mean(v[0])}


SIZED: dict[str, Edge] = {
    fn.__name__.replace("_", " "): Edge(init, fn)
    for init, fn in (
        (square_and_weights, dense),
        (square_and_weights, batched),
        (state_and_weights, turned),
        (state_and_weights, turned_and_mixed),
        (state_and_weights, as_long_as_wide),
        (state_and_weights, per_environment_keys),
        (state_and_weights, pairs),
        (state_and_weights, looked_up),
        (memory_of_all, squares_carried),
    )
}
"""Programs that take every size from `env`."""


# Whole runs


class Learned(NamedTuple):
    weights: jax.Array
    updates: Any
    """A number of Python, to begin with."""
    notes: Any


class Whole(NamedTuple):
    train: Learned
    position: Position


@dataclass(frozen=True, kw_only=True)
class Learner:
    """REINFORCE in miniature, with all that is odd above at once: numbers of Python, containers, metrics out of order."""

    unroll: int = 4
    sign: Any = 1
    """1 balances the pole, 1.0 does not: a policy that looks at the type."""

    def init(self, env, key):
        env_state, obs = env.reset(env.keys(key))
        notes = collections.OrderedDict(z=jnp.zeros(4, jnp.bfloat16), a=(None, 0.5))
        return Whole(Learned(jnp.zeros((4, 2)), 0, notes), Position(env_state, obs))

    def policy(self, train):
        return train.weights

    @choreo.fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        if greedy:
            falls_right = obs[2] + obs[3] > 0
            return (falls_right if isinstance(self.sign, int) else ~falls_right).astype(jnp.int32), ()
        return jax.random.categorical(key, jnp.tanh(obs) @ params), ()

    def iterate(self, env, carry, key):
        position, trajectory, episodes = rollout(env, self.act, carry.train.weights, carry.position, key, self.unroll)
        train, loss = self.learn(carry.train, trajectory)
        metrics = collections.OrderedDict(zeta=loss, updates=carry.train.updates, **episodes)
        metrics["alpha"] = jnp.max(train.weights)
        return Whole(train, position), metrics

    @choreo.fragment("learner")
    def learn(self, train, trajectory):
        def loss(weights):
            log_pi = jax.nn.log_softmax(jnp.tanh(trajectory.obs) @ weights)
            return -jnp.mean(jnp.take_along_axis(log_pi, trajectory.action[..., None], axis=-1) * (1 + trajectory.obs))

        value, grad = jax.value_and_grad(loss)(train.weights)
        rate = 0.1 * (1.0 + jnp.asarray(train.updates).astype(jnp.float32))
        notes = collections.OrderedDict(z=train.notes["z"] + np.ones((), jnp.bfloat16), a=train.notes["a"])
        return Learned(train.weights - rate * grad, train.updates + 1, notes), value
