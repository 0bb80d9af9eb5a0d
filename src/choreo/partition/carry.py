"""Which leaves of a carry are arrays, and which are static Python values.

    Train(w=array, updates=0, dropout=Dropout(p=0.5, inference=False))      what `init` returns
          float32[3]   int32[]            0.5          False                its form, if `iterate` changes `updates`

The *form of a carry* is the carry with a `jax.ShapeDtypeStruct` in place of each array. Only the form decides which leaves
count as arrays: a Python number in a carry counts as an array if the form has a type at the same place.

A Python leaf is static at first. If `iterate` returns it with the same type and bits, it stays static: by induction over
iterations, it never changes. A number that comes back with a different type or value becomes an array of the type that JAX
gives it, as in `jax.jit(iterate)`, and `iterate` is traced again. All other static leaves (functions, strings) must not change.
"""

import dataclasses
import itertools
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax

from choreo.errors import AlgorithmError
from choreo.static_key import is_array
from choreo.types import PyTree

NUMBERS = (bool, int, float, complex)
"""The Python types that JAX turns into arrays. Subclasses do not count: to a user, an enum is not a number."""

NEEDS_PYTHON = (
    jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError,
)  # fmt: skip
"""The errors that JAX raises where a traced array is used as a Python number or as a NumPy array."""


def form_of(make: Callable[..., PyTree], *args: Any) -> PyTree:
    """The form of the carry that `make` returns. `make` is traced, so no array is computed."""
    found = []
    # The function returns None to JAX, because a carry may have leaves that JAX does not accept as results.
    jax.eval_shape(lambda *args: found.append(as_form(make(*args))), *args)
    return found[0]


def as_form(carry: PyTree) -> PyTree:
    """The form of a carry. NumPy arrays and NumPy numbers count as arrays, Python numbers do not."""
    return jax.tree.map(lambda leaf: _type_of(leaf) if _is_numeric(leaf) else leaf, carry)


def leaves_of(carry: PyTree, form: PyTree) -> list[Any]:
    """The leaves of a carry that are arrays in its form, as JAX arrays."""
    pairs = zip(jax.tree.leaves(carry), jax.tree.leaves(form), strict=True)
    return [
        leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf, like.dtype) for leaf, like in pairs if is_type(like)
    ]


def with_leaves(form: PyTree, leaves: Sequence[Any]) -> PyTree:
    """The carry with these arrays, and with the static leaves of its form."""
    rest = iter(leaves)
    carry = jax.tree.map(lambda like: next(rest) if is_type(like) else like, form)
    assert next(rest, None) is None, "more leaves than the form has arrays"
    return carry


def types_of(form: PyTree) -> list[jax.ShapeDtypeStruct]:
    """The types of the arrays of a form, in order."""
    return [leaf for leaf in jax.tree.leaves(form) if is_type(leaf)]


def names_of(form: PyTree) -> list[str]:
    """The paths of the arrays of a form, in order: `train.params`, `['w']`."""
    return [path.lstrip(".") for path, leaf in _paths(form) if is_type(leaf)]


def named(name: str) -> str:
    """A path from `names_of`, for messages: `carry.train.params`, `carry['w']`."""
    return f"carry{name}" if name.startswith("[") else f"carry.{name}"


def may_change(form: PyTree) -> bool:
    """Can the form that fits every iteration (see `settle`) differ from this form, which `init` returns?"""
    return any(leaf.weak_type if is_type(leaf) else type(leaf) in NUMBERS for leaf in jax.tree.leaves(form))


def is_type(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def typed_as(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The same array, weakly typed if and only if `like` is. Sites and checkpoints do not keep weak types."""
    if jax.typeof(leaf).weak_type == like.weak_type:
        return leaf
    return lax.convert_element_type_p.bind(leaf, new_dtype=leaf.dtype, weak_type=like.weak_type, sharding=None)


@dataclass(frozen=True)
class TracedOnce:
    """`iterate`, traced for a carry of one form."""

    jaxpr: jec.ClosedJaxpr
    after: PyTree
    """The form of the carry that `iterate` returns."""
    changed: frozenset[int]
    """The positions of the static leaves that `iterate` changes: see `changed_leaves`."""


TracedT = TypeVar("TracedT", bound=TracedOnce)


def settle(name: str, first: PyTree, trace: Callable[[PyTree], TracedT]) -> tuple[PyTree, TracedT]:
    """Return the form of the carry that fits every iteration, and `iterate` traced for this form.

    Numbers that change become arrays.

    `first`: the form that `init` returns; `trace`: traces `iterate` for a carry of a given form; `name`: the name of the
    algorithm, for messages.
    """
    form, program = first, trace(first)
    while program.changed:
        leaves, tree = jax.tree.flatten(form)
        form = tree.unflatten([_type_of(leaf) if i in program.changed else leaf for i, leaf in enumerate(leaves)])
        try:
            program = trace(form)
        except NEEDS_PYTHON as error:
            raise _needs_python(name, first, form, program.after) from error
    return _settle_weak(name, first, form, program, trace)


def _needs_python(name: str, first: PyTree, form: PyTree, after: PyTree) -> AlgorithmError:
    """The error for an `iterate` that changes a number and needs it as a Python number.

    `after`: the form that `iterate` returned while the number was still static.
    """
    rows = zip(_paths(first), jax.tree.leaves(form), jax.tree.leaves(after), strict=True)
    changed = [(path, old, new) for (path, old), now, new in rows if is_type(now) and not is_type(old)]
    said = ", ".join(
        f"`carry{path}` goes in as {leaf_text(old)} and comes back as {leaf_text(new)}" for path, old, new in changed
    )
    return AlgorithmError(
        f"`{name}.iterate` changes a number of the carry ({said}). Such a number is traced as an array, as in jax.jit(iterate); "
        "but `iterate` uses it as a Python number.",
        fix="In place of `if`, `not`, `and`, range() and the like, use jnp.where, jnp.logical_not, lax.fori_loop; or let "
        "`iterate` return the number unchanged.",
    )


def changed_leaves(name: str, first: PyTree, form: PyTree, after: PyTree) -> frozenset[int]:
    """The positions of the static leaves that come back as a different number or as an array. Raises if the form
    changes in any other way, weak types excepted.

    `form`: the form that goes into `iterate`; `after`: the form that comes back; `first`: the form that `init` returns,
    before any number became an array.
    """
    if not same_structure(jax.tree.structure(form), jax.tree.structure(after)):
        raise AlgorithmError(f"`{name}.iterate` must return a carry of the same structure as `init` returns.",
                             fix=f"init: {jax.tree.structure(form)}\niterate: {jax.tree.structure(after)}")  # fmt: skip
    changed = set()
    rows = zip(_paths(form), jax.tree.leaves(first), jax.tree.leaves(after), strict=True)
    for i, ((path, old), initial, new) in enumerate(rows):
        if is_type(old):
            _check_type(name, path, initial, old, new)
        elif not same(old, new):
            if type(old) not in NUMBERS or not (is_type(new) or type(new) in NUMBERS):
                raise AlgorithmError(
                    f"`{name}.iterate` must return a carry of the same form: `carry{path}` goes in as {leaf_text(old)} and comes "
                    f"back as {leaf_text(new)}.",
                    fix="Only arrays and numbers may change from one iteration to the next. Let `iterate` return this leaf "
                    "unchanged; or let the carry hold a number that selects one of several values.",
                )
            changed.add(i)
            _check_range(name, path, old)
    return frozenset(changed)


def _check_range(name: str, path: str, number: Any) -> None:
    try:
        _type_of(number)
    except OverflowError as error:
        raise AlgorithmError(
            f"`carry{path}` of `{name}` goes in as {leaf_text(number)} and changes, so that it becomes an array; but it is "
            "too large for JAX's default type of integers.",
            fix="Begin with a smaller number, or with a float; or let JAX compute in 64 bits (jax_enable_x64).",
        ) from error


def _check_type(name: str, path: str, initial: Any, old: jax.ShapeDtypeStruct, new: Any) -> None:
    given = _type_of(new) if type(new) in NUMBERS else new
    if is_type(given) and (old.shape, old.dtype) == (given.shape, given.dtype):
        return
    goes_in = leaf_text(old) if is_type(initial) else f"{leaf_text(initial)} ({leaf_text(old)})"
    comes_back = leaf_text(new)
    fix = "Make `init` and `iterate` agree on shape and dtype."
    if not is_type(initial):
        fix += (
            f" A number that changes becomes an array, and its type must stay the same: write {_example(given)} in `init`, or "
            "convert the number in `iterate`."
        )
    raise AlgorithmError(
        f"`{name}.iterate` must return a carry of the same form: `carry{path}` goes in as {goes_in} and comes back as "
        f"{comes_back}.",
        fix=fix,
    )


def _example(given: Any) -> str:
    return f"jnp.zeros({given.shape}, jnp.{given.dtype})" if is_type(given) else "an array"


def _settle_weak(name: str, first: PyTree, form: PyTree, program: TracedT,
                 trace: Callable[[PyTree], TracedT]) -> tuple[PyTree, TracedT]:  # fmt: skip
    """The form in which a leaf has a weak type only if the leaf is weak in every iteration, and the program traced for it.

    Weak types decide how JAX promotes dtypes. In `jax.jit(iterate)` a leaf can go in weak and come back strong, so that JAX
    traces the second iteration again, with different types. We trace `iterate` for every combination of weak and strong leaves
    that occurs, and for the form that we return. Raises if these programs differ.
    """
    seen: dict[tuple[bool, ...], TracedT] = {_weak(form): program}
    weak = after = _returned_weak(form, program.after)
    if after in seen:
        return form, program
    always_weak = tuple(a and b for a, b in zip(_weak(form), after, strict=True))
    path = next(path for (path, was), is_now in zip(_typed_paths(form), after, strict=True) if was.weak_type != is_now)
    try:
        while weak not in seen:
            seen[weak] = trace(_with_weak(form, weak))
            weak = _returned_weak(form, seen[weak].after)
            always_weak = tuple(a and b for a, b in zip(always_weak, weak, strict=True))
        if always_weak not in seen:
            seen[always_weak] = trace(_with_weak(form, always_weak))
    except (TypeError, ValueError) as error:  # JAX can refuse to promote a strong type where it promotes a weak one
        raise _depends_on_weak(name, path, _at(first, path), after) from error
    if len({describe(each.jaxpr) for each in seen.values()}) > 1:
        raise _depends_on_weak(name, path, _at(first, path), after)
    return _with_weak(form, always_weak), seen[always_weak]


def _depends_on_weak(name: str, path: str, initial: Any, after: Any) -> AlgorithmError:
    return AlgorithmError(
        f"`{name}.iterate` computes in different types from its second iteration on: `carry{path}` ({leaf_text(initial)}) "
        "goes in with a weak type, as Python numbers have, and comes back without it; or it goes in without a weak type and comes "
        "back with one.",
        fix="Give this leaf a dtype in `init`, as in "
        f"jnp.asarray({initial if not is_type(initial) else '...'}, jnp.float32), and let `iterate` return that dtype.",
    )


def _weak(form: PyTree) -> tuple[bool, ...]:
    return tuple(leaf.weak_type for leaf in types_of(form))


def _returned_weak(form: PyTree, after: PyTree) -> tuple[bool, ...]:
    pairs = zip(jax.tree.leaves(form), jax.tree.leaves(after), strict=True)
    return tuple((new if is_type(new) else _type_of(new)).weak_type for old, new in pairs if is_type(old))


def _with_weak(form: PyTree, weak: Sequence[bool]) -> PyTree:
    types = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=w) for t, w in zip(types_of(form), weak, strict=True)]
    return with_leaves(form, types)


def same(a: Any, b: Any) -> bool:
    """Are two static leaves the same? Compares numbers and strings by type and bits, everything else by identity."""
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if type(a) is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    return a == b if type(a) in (bool, int, str, bytes) else a is b


def same_leaf(a: Any, b: Any) -> bool:
    """Are two leaves of forms the same? Compares arrays by their types, and other leaves with `same`."""
    if is_type(a) and is_type(b):
        return (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
    return same(a, b)


def block_type(leaf: jax.ShapeDtypeStruct, axis: int | None, blocks: int) -> jax.ShapeDtypeStruct:
    """The type of one block of a leaf that is divided into `blocks` equal blocks along `axis`; if `axis` is None, the
    type of the whole leaf."""
    shape = tuple(n // blocks if d == axis else n for d, n in enumerate(leaf.shape))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)


def same_structure(a: Any, b: Any) -> bool:
    """Are two tree structures equal? Compares their static data by type and bits, because for `==`, 1, 1.0 and True are equal."""
    if a != b:
        return False
    pairs = zip(a.children(), b.children(), strict=True)
    return _same_data(a.node_data(), b.node_data()) and all(same_structure(x, y) for x, y in pairs)


def _same_data(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(_same_data(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping):
        return _same_data(list(a.items()), list(b.items()))
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return all(_same_data(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return same(a, b) if type(a) in NUMBERS else True  # `==` has compared the rest


def describe(closed: jec.ClosedJaxpr) -> str:
    """A program as text, without weak types. Programs with the same text compute the same results."""
    return "\n".join(_lines(closed.jaxpr, closed.consts))


def _lines(jaxpr: jec.Jaxpr, consts: Sequence[Any]) -> Iterator[str]:
    names: dict[Any, str] = {var: f"c{i}" for i, var in enumerate(jaxpr.constvars)}
    names |= {var: f"x{i}" for i, var in enumerate(jaxpr.invars)}
    numbers = itertools.count()

    def read(var: Any) -> str:
        if not isinstance(var, jec.Literal):
            return names[var]
        # A weakly typed literal is a Python number: NumPy would give it a different dtype, and different bits.
        return f"{_value(np.asarray(var.val, var.aval.dtype))}:{_bare(var.aval)}"  # pyright: ignore[reportAttributeAccessIssue]

    yield f"{[_bare(v.aval) for v in jaxpr.invars]} {[_value(const) for const in consts]}"
    for eqn in jaxpr.eqns:
        if _only_strengthens(eqn):
            names[eqn.outvars[0]] = read(eqn.invars[0])
            continue
        operands = [read(v) for v in eqn.invars]
        names |= {var: f"v{next(numbers)}" for var in eqn.outvars}
        params = [f"{key}={_param(value)}" for key, value in sorted(eqn.params.items()) if key != "weak_type"]
        yield f"{[(names[v], _bare(v.aval)) for v in eqn.outvars]} = {eqn.primitive}{params} {operands}"
    yield f"return {[read(v) for v in jaxpr.outvars]}"


def _only_strengthens(eqn: jec.JaxprEqn) -> bool:
    """Does the equation change no bits, but only whether the type is weak?"""
    if eqn.primitive is not lax.convert_element_type_p or eqn.params["sharding"] is not None:
        return False
    before: Any = eqn.invars[0].aval
    after: Any = eqn.outvars[0].aval
    return before.dtype == after.dtype


def _param(value: Any) -> str:
    if isinstance(value, jec.ClosedJaxpr):
        return "{" + describe(value) + "}"
    if isinstance(value, jec.Jaxpr):
        return "{" + "\n".join(_lines(value, ())) + "}"
    if isinstance(value, tuple | list):
        return f"({', '.join(_param(item) for item in value)})"
    return _value(value) if is_array(value) else _bare(value)


def _value(value: Any) -> str:
    """A constant as text that contains every bit."""
    if is_array(value) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return f"{np.shape(value)}{np.asarray(value).tobytes().hex()}"


def _bare(what: Any) -> str:
    """The text of an object, without weak types, memory addresses, and the numbers that Choreo gives to calls of fragments."""
    text = re.sub(r"weak_type=(True|False)|~| at 0x[0-9a-f]+", "", str(what))
    return re.sub(r"^(choreo:.*):\d+$", r"\1", text)


def _is_numeric(leaf: Any) -> bool:
    """Is the leaf an array that JAX accepts? False for Python numbers, and for NumPy arrays of strings or objects."""
    if isinstance(leaf, jax.Array):
        return True
    return is_array(leaf) and (jnp.issubdtype(leaf.dtype, np.number) or jnp.issubdtype(leaf.dtype, np.bool_))


def _type_of(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def leaf_text(leaf: Any) -> str:
    """A leaf of a form, for messages."""
    if is_type(leaf):
        return jax.typeof(leaf).str_short()
    if type(leaf) in (*NUMBERS, str):
        return f"the {type(leaf).__name__} {leaf!r}"
    return f"the function {leaf.__name__}" if hasattr(leaf, "__name__") else f"a {type(leaf).__name__}"


def _paths(tree: PyTree) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _typed_paths(form: PyTree) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    return [(path, leaf) for path, leaf in _paths(form) if is_type(leaf)]


def _at(tree: PyTree, path: str) -> Any:
    return dict(_paths(tree))[path]
