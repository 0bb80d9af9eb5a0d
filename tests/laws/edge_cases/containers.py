"""Programs with odd containers (pytrees): for the carry, for arguments and results of fragments, and for metrics.

If Choreo confused the order of the leaves in a container, it would swap values without an error. Choreo must also keep the type
of the container.
"""

import collections
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import choreo
from laws.edge_cases.program import act, acts, learn, state_and_weights
from partition.ponds import Functions


class Pair(NamedTuple):
    """State and weights."""

    s: Any
    w: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "s"], meta_fields=["note"])
@dataclass(frozen=True)
class Registered:
    """A registered dataclass whose leaves are in a different order than its fields."""

    s: Any
    w: Any
    note: Any = "note"


class Module(eqx.Module):
    """A module with arrays, a static field and a function."""

    s: Any
    w: Any
    power: Any = eqx.field(static=True, default=1)
    squash: Callable[[Any], Any] = jnp.tanh


@jax.tree_util.register_pytree_node_class
class ReversedNode:
    """A user's own pytree node: its children have no names, and are in a different order than its fields."""

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
    "a user's pytree node": (ReversedNode, lambda c: (c.s, c.w)),
    "None among the leaves": (
        lambda s, w: {"none": None, "s": s, "also": (None, [None]), "w": w},
        lambda c: (c["s"], c["w"]),
    ),
    "empty containers among the leaves": (lambda s, w: [(), {}, [], w, ((), s)], lambda c: (c[4][1], c[3])),
    "int keys": (lambda s, w: {10: s, 9: {2: w}, 100: None}, lambda c: (c[10], c[9][2])),
    "tuple keys": (lambda s, w: {(1, "a"): s, (0, "b"): w}, lambda c: (c[1, "a"], c[0, "b"])),
    "nested": (
        lambda s, w: collections.OrderedDict(z=[{"b": (s,)}, None], a=Pair(Registered(w, ()), Module(None, 3))),
        lambda c: (c["z"][0]["b"][0], c["a"].s.s),
    ),
    "Partial": (lambda s, w: jax.tree_util.Partial(act, w, s), lambda c: (c.args[1], c.args[0])),
    "functions and strings among the leaves": (
        lambda s, w: {"f": jnp.tanh, "name": "pond", "s": s, "w": w, "dtype": jnp.float32},
        lambda c: (c["s"], c["w"]),
    ),
}
"""By name: the function that puts the state and the weights into a container, and the function that takes them out again."""


def in_container(name: str) -> Functions:
    """The whole carry is in the container. If Choreo confused the order of the leaves, it would swap state and weights."""
    make, take = CONTAINERS[name]

    def init(env, key):
        return make(env.reset(env.keys(key)), jnp.linspace(0.5, 1.5, env.width))

    def iterate(env, c, key):
        s, w = take(c)
        s = env.step(s, acts(w, s))
        return make(s, learn(w, s)), {"m": jnp.mean(s)}

    return Functions(init, iterate)


def through_fragments(name: str) -> Functions:
    """The container is a result of the actor, and an argument and a result of the learner."""
    make, take = CONTAINERS[name]

    def iterate(env, c, key):
        @choreo.fragment("actor")
        def act_in(w, s):
            return make(w * jnp.tanh(s), s)

        @choreo.fragment("learner")
        def learn_from(w, given):
            action, s = take(given)
            return make(w - 0.05 * jnp.mean(jnp.tanh(action) ** 2), jnp.mean(s))

        given = (
            jax.vmap(act_in, (None, 0))(c["w"], c["s"]) if name not in WITHOUT_VMAP else act_in(c["w"][None], c["s"])
        )
        s = env.step(c["s"], take(given)[0])
        w, mean = take(learn_from(c["w"], given))
        return {"s": s, "w": w}, {"m": mean}

    return Functions(state_and_weights, iterate)


WITHOUT_VMAP = {"Partial", "functions and strings among the leaves", "Equinox module", "nested"}
"""Containers with leaves that are not arrays, which `vmap` does not accept."""


class Metrics(NamedTuple):
    """Two metrics that are not in alphabetical order."""

    zeta: Any
    alpha: Any


class UserDict(dict):
    """A user's subclass of dict, which JAX treats as a leaf."""


METRICS: dict[str, Callable[[Any, Any], Any]] = {
    "OrderedDict": lambda s, w: collections.OrderedDict(zeta=jnp.mean(s), alpha=jnp.max(w), middle=jnp.min(s)),
    "defaultdict": lambda s, w: collections.defaultdict(float, zeta=jnp.mean(s), alpha=jnp.max(w)),
    "dict out of order": lambda s, w: {"zeta": jnp.mean(s), "alpha": jnp.max(w), "Z": jnp.min(s), "a": jnp.min(w)},
    "NamedTuple": lambda s, w: Metrics(jnp.mean(s), jnp.max(w)),
    "a user's subclass of dict": lambda s, w: UserDict(zeta=jnp.mean(s), alpha=jnp.max(w)),
    "nested": lambda s, w: {"zeta": {"b": jnp.mean(s)}, "alpha": jnp.max(w)},
    "list": lambda s, w: [jnp.mean(s), jnp.max(w)],
    "no metrics": lambda s, w: {},
    "None": lambda s, w: None,
    "None as a metric": lambda s, w: {"zeta": None, "alpha": jnp.max(w)},
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
    "one value twice": lambda s, w: dict.fromkeys(["b", "a"], jnp.mean(s)),
    "elements of the carry": lambda s, w: {"w": w[0], "s": s[0, 0]},
    "zero-size": lambda s, w: {"z": s[:0], "alpha": jnp.max(w)},
    "a function": lambda s, w: {"f": jnp.tanh, "alpha": jnp.max(w)},
    "a string": lambda s, w: {"f": "word", "alpha": jnp.max(w)},
}
"""The metrics that `iterate` returns, computed from the state and the weights."""
METRICS_THAT_RUN = {
    "OrderedDict", "defaultdict", "dict out of order", "no metrics", "Python numbers", "NumPy numbers", "types",
    "one value twice", "elements of the carry",
}  # fmt: skip
"""Metrics that Choreo must accept. Choreo is allowed to refuse the others, which are not flat dicts of ordinary numbers."""


def with_metrics(name: str) -> Functions:
    """A program with the metrics `METRICS[name]`. If Choreo sorted names but not values, metrics would get wrong names."""

    def iterate(env, c, key):
        s = env.step(c["s"], acts(c["w"], c["s"]))
        w = learn(c["w"], s)
        return {"s": s, "w": w}, METRICS[name](s, w)

    return Functions(state_and_weights, iterate)
