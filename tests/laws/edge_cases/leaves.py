"""Programs with odd leaves in the carry: arrays of every dtype, random keys, Python and NumPy numbers, Equinox modules.

`test_edges.py` compares each program with the reference. This comparison fails if Choreo changes the dtype of a leaf, donates
memory that another leaf still uses, or reads the first value of a Python number in all iterations.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import choreo
from laws.edge_cases.program import acts, learn, state_and_weights
from partition.ponds import Functions


@choreo.fragment("actor")
def act_and_return(w, s, x):
    """Act for one environment. The second result is the leaf `x`, unchanged."""
    return w * jnp.tanh(s), x


def fold_key(key):
    return jax.random.fold_in(key, 3)


def flipped(x):
    return jnp.logical_not(x)


def plus_one(x):
    return x + np.ones((), x.dtype)


def halved(x):
    """Half of `x`, computed in float32 and converted back to the dtype of `x`."""
    return (x.astype(jnp.float32) * 0.5).astype(x.dtype)


def toggled(x):
    """`x` with each 0 changed to 1 and each 1 to 0, computed in int32 and converted back to the dtype of `x`."""
    return (1 - x.astype(jnp.int32)).astype(x.dtype)


def counting_up(names: str) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """For each dtype in `names`, the array [0, 1, 2]. Each iteration adds 1 to every element."""
    return {name: (jnp.arange(3).astype(name), plus_one) for name in names.split()}


ARRAYS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    **counting_up("int8 int16 int32 uint8 uint16 uint32 float16 float32 bfloat16 complex64"),
    "bool": (jnp.array([True, False, True]), flipped),
    "int4": (jnp.array([0, 1, 0], jnp.int4), toggled),
    "uint4": (jnp.array([0, 1, 0], jnp.uint4), toggled),
    "float8_e4m3fn": (jnp.array([0.5, 1.0, 2.0], jnp.float8_e4m3fn), halved),
    "float8_e5m2": (jnp.array([0.5, 1.0, 2.0], jnp.float8_e5m2), halved),
    "float8_e4m3b11fnuz": (jnp.array([0.5, 1.0, 2.0], jnp.float8_e4m3b11fnuz), halved),
    "scalar": (jnp.float32(0.5), plus_one),
    "weak float": (jnp.asarray(0.5), lambda x: x + 1),
    "zero-size": (jnp.zeros((0, 3)), plus_one),
    "zero-size, last axis": (jnp.zeros((3, 0), jnp.int32), plus_one),
    "numpy array": (np.arange(3, dtype=np.float32), plus_one),
    "numpy array of int8": (np.arange(3, dtype=np.int8), plus_one),
    "numpy float64": (np.linspace(0.0, 1.0, 3), plus_one),
    "numpy bfloat16": (np.ones(3, ml_dtypes.bfloat16), plus_one),
    "negative zero": (jnp.array([-0.0, 0.0]), jnp.negative),
    "not finite": (jnp.array([jnp.nan, jnp.inf, -jnp.inf]), jnp.negative),
    "key": (jax.random.key(1), fold_key),
    "key rbg": (jax.random.key(1, impl="rbg"), fold_key),
    "key unsafe_rbg": (jax.random.key(1, impl="unsafe_rbg"), fold_key),
    "key threefry": (jax.random.key(1, impl="threefry2x32"), fold_key),
    "keys": (jax.random.split(jax.random.key(1), 3), jax.vmap(fold_key)),
    "old-style key": (jax.random.PRNGKey(1), fold_key),
}
"""By name: a leaf that is an array, and the function with which an iteration changes it."""

PYTHON: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "int": (0, lambda x: x + 1),
    "negative int": (-3, lambda x: x * 2),
    "float": (0.5, lambda x: x + 0.25),
    "float -0.0": (-0.0, lambda x: -x),
    "bool": (False, lambda x: jnp.logical_not(x) if isinstance(x, jax.Array) else not x),
    "complex": (1j, lambda x: x * 1j),
    "numpy float32": (np.float32(0.5), lambda x: x + np.float32(1)),
    "numpy int8": (np.int8(1), lambda x: x + np.int8(1)),
    "numpy bool": (np.bool_(True), flipped),
    "numpy float64 scalar": (np.float64(0.5), lambda x: x + 1),
}
"""By name: a leaf that is a Python or NumPy number, and the function with which an iteration changes it. Choreo must not treat
such a leaf as a constant."""


def copy_of(x):
    """A copy of the leaf `x` with its own memory: donating the copy does not destroy `x`. A number needs no copy."""
    if isinstance(x, np.ndarray):
        return x.copy()
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def with_leaf(leaf: Any, change: Callable[[Any], Any]) -> Functions:
    """An algorithm that carries the leaf several times, so that a wrong donation or a wrong alias gives a wrong result.

    "kept", "alias"      the same object; neither of them changes
    "moved"              changes in each iteration
    "this", "that"       the leaf and the changed leaf; they swap places in each iteration
    "first", "second"    the same object; each iteration gives both the same new value
    "rows"               only if the leaf is an array: one leaf per environment, which is also an argument and a result of the actor
    """
    is_array = isinstance(leaf, (jax.Array, np.ndarray))

    def rows(env):
        """One leaf per environment, stacked. Every second environment has a changed leaf, so that the rows differ."""
        return jnp.stack([jnp.asarray(leaf), jnp.asarray(change(jnp.asarray(leaf)))])[jnp.arange(env.num_envs) % 2]

    def init(env, key):
        carry = state_and_weights(env, key) | {
            "kept": leaf,
            "alias": leaf,
            "moved": copy_of(leaf),
            "this": copy_of(leaf),
            "that": change(copy_of(leaf)),
            "first": leaf,
            "second": leaf,
        }
        return carry | ({"rows": rows(env)} if is_array else {})

    def iterate(env, c, key):
        after = dict(c)
        if is_array:
            a, x = jax.vmap(act_and_return, (None, 0, 0))(c["w"], c["s"], c["rows"])
            after["rows"] = jax.vmap(change)(x)
        else:
            a = acts(c["w"], c["s"])
        s = env.step(c["s"], a)
        after |= {"s": s, "w": learn(c["w"], s), "moved": change(c["moved"]), "this": c["that"], "that": c["this"]}
        after["first"] = after["second"] = change(c["second"])
        return after, {"m": jnp.mean(s)}

    return Functions(init, iterate)


def with_counter(step: Callable[[Any], Any], first: Any) -> Functions:
    """The step size depends on a leaf that changes. If the leaf kept its first value, the weights would be wrong."""

    def init(env, key):
        return state_and_weights(env, key) | {"n": first}

    def iterate(env, c, key):
        s = env.step(c["s"], acts(c["w"], c["s"]))
        rate = 0.1 / (1.0 + jnp.asarray(c["n"]).astype(jnp.float32))
        return {"s": s, "w": c["w"] - rate * learn(c["w"], s), "n": step(c["n"])}, {"n": c["n"], "rate": rate}

    return Functions(init, iterate)


def with_a_chain_of_changes() -> Functions:
    """Three Python numbers: "a" first changes in the first iteration, "b" in the second and "c" in the third."""

    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.ones(env.width), "a": 0, "b": 0, "c": 0}

    def iterate(env, c, key):
        s = env.step(c["s"], acts(c["w"], c["s"]))
        shift = jnp.asarray(c["c"]).astype(jnp.float32)
        after = {"s": s, "w": learn(c["w"], s) + 0.1 * shift, "a": c["a"] + 1, "b": c["a"] + 0, "c": c["b"] + 0}
        return after, {"c": c["c"]}

    return Functions(init, iterate)


def with_a_late_change() -> Functions:
    """In the first iteration, the flag stays False. A compiler that looks only at this iteration would take it for a constant."""

    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.ones(env.width), "n": jnp.int32(0), "late": False}

    def iterate(env, c, key):
        s = env.step(c["s"], acts(c["w"], c["s"]))
        w = learn(c["w"], s) * jnp.where(c["late"], 0.5, 1.0)
        return {"s": s, "w": w, "n": c["n"] + 1, "late": c["n"] >= 1}, {"late": c["late"]}

    return Functions(init, iterate)


COUNTERS: dict[str, Functions] = {
    "int": with_counter(lambda n: n + 1, 0),
    "float": with_counter(lambda n: n + 0.5, 0.0),
    "bool that flips": with_counter(lambda n: jnp.logical_not(n) if isinstance(n, jax.Array) else not n, False),
    "bool by jnp.where": with_counter(lambda n: jnp.where(n, False, True), False),
    "int that becomes an array": with_counter(lambda n: jnp.asarray(n) + 1, 0),
    "numpy int": with_counter(lambda n: n + np.int32(1), np.int32(0)),
    "numpy array": with_counter(lambda n: n + np.int32(1), np.array(0, np.int32)),
    "changed by the learner": with_counter(choreo.fragment("learner")(lambda n: n + 1), 0),
    "changed by an actor": with_counter(choreo.fragment("actor")(lambda n: n + 1), 0),
    "a chain of changes": with_a_chain_of_changes(),
    "a late change": with_a_late_change(),
}
"""Programs in which the weights depend on a Python or NumPy number that changes."""


def with_module(make: Callable[[jax.Array], Any], apply: Callable[..., Any]) -> Functions:
    """An Equinox module in the carry. Its Python leaves must stay Python values, because Equinox tests them with `if`."""

    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.ones(env.width), "net": make(jax.random.key(5))}

    def iterate(env, c, key):
        arrays, static = eqx.partition(c["net"], eqx.is_inexact_array)
        use = choreo.fragment("actor")(lambda arrays, s, key: apply(eqx.combine(arrays, static), s, key))
        a = jax.vmap(use, (None, 0, 0))(arrays, c["s"], env.keys(key))
        s = env.step(c["s"], a)
        arrays = choreo.fragment("learner")(lambda a, s: jax.tree.map(lambda x: x - 0.01 * jnp.mean(s), a))(arrays, s)
        return {"s": s, "w": learn(c["w"], s), "net": eqx.combine(arrays, static)}, {"m": jnp.mean(s)}

    return Functions(init, iterate)


MODULES: dict[str, Functions] = {
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
"""Programs with an Equinox module in the carry."""
