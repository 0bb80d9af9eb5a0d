"""The marks that a user puts on an algorithm: `@fragment(role)`, `host_fragment(...)`, `all_reduce(x)`, `metric(x)`.

A mark does not change what a function computes. A fragment is a `jax.jit` whose name Choreo recognises in the traced
program, so the mark survives `vmap`, `scan`, `grad` and `remat`. Arguments that are not arrays (`self`, an activation
function inside an Equinox module, a flag) are passed on as in a plain call.

    @fragment("actor")     ->   jit[name=choreo:actor:act:3]
    def act(self, ...)

The number at the end, 3, is the number of a `Call`. This record holds the un-vmapped program and the vmaps around the call.
"""

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.custom_batching
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend import source_info_util

from choreo._compat import Vmap, bound_axis_names, enclosing_vmaps, is_tracing, struct_of, trace_context
from choreo.errors import AlgorithmError
from choreo.host import HostFn, HostMethod, HostObjects
from choreo.host.states import METHODS, NoState, has_state
from choreo.static_key import ARRAY, NoKey, Recent, StaticForm, in_order, is_array, orders_of, split_static
from choreo.types import PyTree, Role

source_info_util.register_exclusion(__file__)

PREFIX = "choreo"
"""Names of fragments in a traced program begin with this."""
REDUCE_PREFIX = "choreo_all_reduce:"
"""Names of `all_reduce` in a traced program begin with this."""
METRIC_PREFIX = "choreo_metric:"
"""Names of `metric` in a traced program begin with this."""
SHARD_AXIS = "choreo_shard"
"""The name of the axis of learner shards, over which `all_reduce` reduces."""


@dataclass(eq=False)
class Call:
    """How a fragment was called: facts, such as the vmaps around the call, that the traced program does not contain."""

    role: Role
    """The role of the fragment."""
    name: str
    """The name of the fragment."""
    in_avals: tuple[Any, ...]
    """Un-vmapped types of the arrays among the arguments."""
    vmaps: tuple[Vmap, ...]
    """The vmaps around the call, innermost first."""
    host: HostFn | None = None
    """For a host fragment: the Python function on numpy arrays that a site calls."""
    independent: bool = False
    """Whether the user guarantees that, under `vmap`, no environment depends on another environment."""
    out_names: list[str] = field(default_factory=list)
    """The path of each result in the tree that the function returns (`[1].reward`); filled in when the function is traced."""
    out_orders: tuple[tuple[Any, ...], ...] = ()
    """The keys of each dict that the function returns, in the function's order; filled in when the function is traced."""
    jaxpr: jec.ClosedJaxpr | None = None
    """For a call under `vmap`: the un-vmapped program, traced at the time of the call. Arrays in, arrays out."""


unmarked = jax.make_user_context(False)
"""Within `with unmarked(True):` every fragment calls its plain function. Unlike a global variable, this setting is part of
jit's cache key."""

MOST_FORMS = 512
"""The largest number of compiled functions that a fragment keeps, so that calls with many different sizes do not fill the
memory."""
MOST_CALLS = 2**16
"""The largest number of `Call` records that are kept. It is large, because traced programs refer to records by their numbers, and
because a record is small."""

_forms_of_this_trace: contextvars.ContextVar["dict[Fragment, Recent[tuple[Any, Call]]] | None"] = (
    contextvars.ContextVar("choreo_of_this_trace", default=None)
)
"""Within `traced_anew`: the compiled functions of each fragment. Elsewhere None: then the functions are in `Fragment.forms`."""


@contextlib.contextmanager
def traced_anew() -> Iterator[None]:
    """Within this context, fragments do not use earlier traces, because an object, a global variable or a closure that a fragment
    reads may have changed."""
    token = _forms_of_this_trace.set({})
    try:
        yield
    finally:
        _forms_of_this_trace.reset(token)


_numbers = itertools.count()
_calls: Recent[Call] = Recent(MOST_CALLS)


def find_call(name: str | None) -> Call | None:
    """The record of the fragment call with this jit name; None if a jit with this name is not a fragment."""
    if name is None or not name.startswith(f"{PREFIX}:"):
        return None
    return _calls.get(int(name.rsplit(":", 1)[1]), lambda: _forgotten(name))


def without_number(name: str) -> str:
    """The name under which a jitted function is compiled.

    The number of the call, which grows with every trace, is left out, so that equal programs have equal names.
    """
    return name if not name.startswith(f"{PREFIX}:") else ".".join(name.split(":")[1:-1])


def _forgotten(name: str) -> NoReturn:
    raise AlgorithmError(
        f"The record of the fragment `{name}` is no longer kept: the program was traced too long ago.",
        fix="Trace the program again.",
    )


def fragment(role: Role, *, independent: bool = False) -> Callable[[Callable[..., Any]], "Fragment"]:
    """Mark a function as work of `role`.

    >>> import choreo, jax.numpy as jnp
    >>> @choreo.fragment("actor")
    ... def act(params, obs): return jnp.tanh(params * obs)
    >>> float(act(jnp.float32(0.0), jnp.float32(1.0)))
    0.0

    A fragment called under `jax.vmap` is replicated only if Choreo can prove that no environment in it depends on another.
    With `independent=True` you guarantee this yourself, for a fragment that Choreo cannot analyse (because of a callback or
    a `custom_vmap`). The plan then says "trusted, not proved", and `choreo check` searches for a counterexample.
    """
    if not isinstance(role, str) or not role or ":" in role or "+" in role:
        raise AlgorithmError(f"@fragment({role!r}) needs a role: a word such as \"actor\".",
                             fix='Write @choreo.fragment("actor").')  # fmt: skip
    return lambda fn: Fragment(fn, role, independent=independent)


class Fragment:
    """A function with a role. Calls with the same array types, static arguments, vmaps and JAX configuration share one
    compiled function."""

    def __init__(
        self,
        fn: Callable[..., Any],
        role: Role,
        *,
        name: str | None = None,
        host: HostFn | None = None,
        independent: bool = False,
    ):
        functools.update_wrapper(self, fn)
        self.fn, self.role, self.name, self.host = fn, role, name or getattr(fn, "__name__", "fragment"), host
        self.independent = independent
        self.forms: Recent[tuple[Any, Call]] = Recent(MOST_FORMS)

    def __get__(self, obj: Any, owner: type | None = None) -> "Callable[..., Any]":
        return self if obj is None else functools.partial(self, obj)

    def __repr__(self) -> str:
        return f"<fragment {self.name} of {self.role}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if unmarked.value:
            return self.fn(*args, **kwargs)
        # Within a trace, NumPy values stay constants: a JAX array would keep only 32 bits of a 64-bit number.
        arrays, form = split_static(args, kwargs, keep_numpy=is_tracing() and self.host is None)
        avals = tuple(jax.typeof(x) for x in arrays)
        vmaps = enclosing_vmaps(arrays)
        try:
            key = (form.key, avals, vmaps, trace_context())
        except NoKey as error:
            raise AlgorithmError(
                f"Fragment `{self.name}` was called with a `{type(error.value).__name__}`, which is neither an array nor hashable.",
                fix="Pass arrays, or values that can be dictionary keys (a frozen dataclass, a tuple, a function).",
            ) from error
        jitted, record = self._forms().get(key, lambda: self._new_form(form, avals, vmaps))
        out = jitted(*arrays)
        if vmaps and record.jaxpr is None:
            # Record the program now. Later, when a plan needs the program, the JAX configuration (a precision, for example) may
            # have changed. JAX has just traced the function, so `trace` returns the cached program.
            record.jaxpr = jitted.trace(*(struct_of(aval) for aval in avals)).jaxpr
        out = jax.tree.map(
            lambda x: x.value if isinstance(x, _Static) else x, out, is_leaf=lambda x: isinstance(x, _Static)
        )
        return in_order(out, record.out_orders) if record.out_orders else out

    def _forms(self) -> "Recent[tuple[Any, Call]]":
        own = _forms_of_this_trace.get()
        return self.forms if own is None else own.setdefault(self, Recent(MOST_FORMS))

    def _new_form(self, form: StaticForm, avals: tuple[Any, ...], vmaps: tuple[Vmap, ...]) -> tuple[Any, Call]:
        def call(*arrays):
            args, kwargs = form.join(arrays)
            out = self.fn(*args, **kwargs)
            record.out_orders = tuple(orders_of(out))
            out = jax.tree.map(lambda x: x if is_array(x) else _Static(x), out)
            record.out_names[:] = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(out)]
            return out

        host = self.host.at(form, avals) if isinstance(self.host, HostFunction) else self.host
        record = Call(self.role, self.name, avals, vmaps, host, self.independent)
        number = next(_numbers)
        _calls.get(number, lambda: record)
        call.__name__ = call.__qualname__ = f"{PREFIX}:{self.role}:{self.name}:{number}"
        return jax.jit(call), record


def host_fragment(role: Role, fn: Callable[..., PyTree], out_spec: PyTree, *, name: str | None = None) -> Fragment:
    """Make any Python function a fragment: a simulator, a robot, a PyTorch network.

    `fn` takes and returns pytrees of numpy arrays; `out_spec` is a pytree of `jax.ShapeDtypeStruct` for its results.
    Inside a compiled program, `fn` runs as a callback; at a separate site, Choreo calls `fn` directly. If `fn` keeps state,
    it must take a token (an array) and return the next token, so that its calls stay in order.
    """
    specs, out_tree = jax.tree.flatten(out_spec)
    host = HostFunction(name or getattr(fn, "__name__", "host"), fn, tuple(specs), out_tree)

    def call(*args, **kwargs):
        leaves, in_tree = jax.tree.flatten((args, kwargs))
        out = io_callback(functools.partial(host.on_leaves, in_tree), host.specs, *leaves)
        return jax.tree.unflatten(out_tree, out)

    return Fragment(call, role, name=host.name, host=host)


@dataclass(frozen=True, eq=False)
class HostFunction:
    """Wraps a user's function on pytrees of numpy arrays, so that it can be called with a flat list of leaves.

    It can be pickled and sent to a worker.
    """

    name: str
    """The name for messages."""
    fn: Callable[..., PyTree]
    """The user's function."""
    specs: tuple[jax.ShapeDtypeStruct, ...]
    """Types of the results."""
    out_tree: Any
    """Tree of the results."""
    form: StaticForm | None = None
    """The arguments without their arrays; set by `at`."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the arguments that are arrays; set by `at`."""

    def at(self, form: StaticForm, avals: tuple[Any, ...]) -> "HostFunction":
        """The same function for calls with these static arguments and array types."""
        return replace(self, form=form, shapes=tuple(aval.shape for aval in avals))

    def __call__(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        assert self.form is not None, "call `at` first"
        if tuple(x.shape for x in arrays) != self.shapes:
            raise AlgorithmError(f"Host fragment `{self.name}` is called under jax.vmap, which cannot vectorise Python.",
                                 fix="Let it take and return whole batches, and call it without vmap.")  # fmt: skip
        rest = iter(arrays)
        # A Python number becomes an array of JAX's default type, as in a callback.
        leaves = [next(rest) if x is ARRAY else jax.numpy.asarray(x) for x in self.form.leaves]
        return self.on_leaves(self.form.tree, *leaves)

    def state(self) -> list[Any]:
        """The state of the user's function, if it is an object with the methods `state` and `load`. See `choreo.host.states`."""
        return [self._with_state().state()]

    def load(self, states: list[Any]) -> None:
        (state,) = states
        self._with_state().load(state)

    def _with_state(self) -> Any:
        if not has_state(self.fn):
            raise NoState(f"The function of the host fragment `{self.name}` has no {METHODS}")
        return self.fn

    def on_leaves(self, in_tree: Any, *leaves: Any) -> tuple[np.ndarray, ...]:
        # A callback receives JAX arrays. Computing with them inside the callback can deadlock, so convert them to NumPy.
        args, kwargs = jax.tree.unflatten(in_tree, [np.asarray(x) for x in leaves])
        out, tree = jax.tree.flatten(self.fn(*args, **kwargs))
        if tree != self.out_tree:
            raise AlgorithmError(f"Host fragment `{self.name}` returned {tree}, but its out_spec says {self.out_tree}.")
        out = tuple(np.array(x) for x in out)  # copies: a simulator may reuse its buffer for the next observation
        for x, spec in zip(out, self.specs, strict=True):
            if x.shape != spec.shape or x.dtype != spec.dtype:
                raise AlgorithmError(
                    f"Host fragment `{self.name}` returned {x.dtype}{list(x.shape)}, but its out_spec says "
                    f"{spec.dtype}{list(spec.shape)}.",
                    fix="Correct the out_spec, or convert the results of the function.",
                )
        return out


def host_method(role: Role, method: HostMethod) -> Fragment:
    """Turn a method of a Python object into a fragment. The method takes arrays (no pytrees) and returns a tuple of arrays.

    The first axis of each array is the env axis.

    Unlike a `host_fragment`, this fragment can be replicated: each site makes an object for its own environments. Inside a
    compiled program, the method runs as a callback, on an object that this process keeps.
    """
    return Fragment(functools.partial(_called_back, method), role, name=method.method, host=method)


def _called_back(method: HostMethod, *leaves: jax.Array) -> tuple[jax.Array, ...]:
    """Call a host method from a compiled program."""
    specs = tuple(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in method.outs)

    def here(*leaves: Any) -> tuple[np.ndarray, ...]:
        objects = _host_objects.setdefault(method.num_envs, HostObjects())
        return objects.bind(method)(*(np.asarray(x) for x in leaves))

    call = jax.custom_batching.custom_vmap(lambda *leaves: io_callback(here, specs, *leaves))

    @call.def_vmap
    def for_shards(shards, in_batched, *leaves):
        """Make one call for the environments of all learner shards."""
        rows = [
            x if mapped else jnp.broadcast_to(x[None], (shards, *x.shape))
            for x, mapped in zip(leaves, in_batched, strict=True)
        ]
        results = _called_back(method.of_shards(shards), *(x.reshape(-1, *x.shape[2:]) for x in rows))
        return tuple(x.reshape(shards, -1, *x.shape[1:]) for x in results), (True,) * len(results)

    return call(*leaves)


_host_objects: dict[int, HostObjects] = {}
"""The objects for callbacks of compiled programs, by number of environments."""


def all_reduce(x: PyTree, op: Literal["mean", "sum", "max"] = "mean") -> PyTree:
    """Combine a pytree over the learner shards. With one shard, the result is `x`, in the type that several shards would give.

    >>> import choreo
    >>> choreo.all_reduce({"grad": 1.5})
    {'grad': 1.5}
    """
    if op not in _REDUCERS:
        raise AlgorithmError(f"all_reduce(op={op!r}) is not known.", fix='Use "mean", "sum" or "max".')
    leaves, tree = jax.tree.flatten(x)
    if SHARD_AXIS in bound_axis_names():
        results = reducer(op)(*leaves)
    else:
        results = [_as_reduced(leaf, op) for leaf in leaves]
        if all(result is leaf for result, leaf in zip(results, leaves, strict=True)):
            return x
    return in_order(jax.tree.unflatten(tree, results), orders_of(x))


def num_shards() -> int:
    """The number of learner shards, within `iterate`; elsewhere, 1."""
    return jax.lax.axis_size(SHARD_AXIS) if SHARD_AXIS in bound_axis_names() else 1


def _as_reduced(leaf: Any, op: str) -> Any:
    """`leaf` in the type that a reduction returns: a sum of bools is an integer, a mean of integers is a float."""
    if not is_array(leaf) or not (leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.integer)):
        return leaf
    if op == "mean":
        return jnp.asarray(leaf, jnp.result_type(float))
    return jnp.asarray(leaf, jnp.int32) if op == "sum" and leaf.dtype == bool else leaf


_REDUCERS = {"mean": jax.lax.pmean, "sum": jax.lax.psum, "max": jax.lax.pmax}


@functools.cache
def reducer(op: str) -> Callable[..., list[jax.Array]]:
    """`all_reduce` on the leaves of a pytree, as a jit whose name Choreo recognises; the plan decides how replicas compute it."""

    def reduce(*leaves):
        return [_REDUCERS[op](leaf, SHARD_AXIS) for leaf in leaves]

    reduce.__name__ = reduce.__qualname__ = f"{REDUCE_PREFIX}{op}"
    return jax.jit(reduce)


SHARD_NUMBERS = "choreo_shard_numbers"
"""The name of `shard_numbers` in a traced program."""


def shard_numbers(shards: int) -> jax.Array:
    """The numbers 0 .. shards - 1, from a jit with the name SHARD_NUMBERS.

    In the traced program, Choreo recognises the shard axis by this jit: axis 0 of the result is the shard axis.
    """

    def numbers():
        return jnp.arange(shards)

    numbers.__name__ = numbers.__qualname__ = SHARD_NUMBERS
    return jax.jit(numbers)()


def find_reduction(name: str | None) -> str | None:
    """The operation ("mean") of the `all_reduce` that has this jit name; None if a jit with this name is not an `all_reduce`."""
    return name.removeprefix(REDUCE_PREFIX) if name is not None and name.startswith(REDUCE_PREFIX) else None


class Reduction(NamedTuple):
    """How a metric with one number per learner shard becomes one number."""

    op: str = "mean"
    """"mean", "sum", "max" or "min"."""
    weight: str = ""
    """For a mean: the metric that counts the items (episodes, for example) in each shard's mean; "" for equal weights."""


def metric(x: Any, reduce: str = "mean", *, weight: str = "") -> jax.Array:
    """Declare how the numbers of all learner shards become one number; returns `x`. The default is the mean.

    For a mean, `weight` is the name of another metric, which counts the items in each shard's mean and has reduce="sum".
    Mark the number that `iterate` returns: the result of a calculation with a marked number is not marked.

    >>> import choreo
    >>> int(choreo.metric(3, reduce="sum")), float(choreo.metric(1.5, weight="episodes"))
    (3, 1.5)
    """
    if reduce not in _METRIC_REDUCTIONS:
        raise AlgorithmError(f"metric(reduce={reduce!r}) is not known.", fix='Use "mean", "sum", "max" or "min".')
    if weight and reduce != "mean":
        raise AlgorithmError(
            f"metric(reduce={reduce!r}, weight={weight!r}): only a mean has a weight.",
            fix="Leave out `weight`, or leave out `reduce`.",
        )
    return jnp.asarray(x) if unmarked.value else _declare(Reduction(reduce, weight))(x)


_METRIC_REDUCTIONS = ("mean", "sum", "max", "min")


@functools.cache
def _declare(reduction: Reduction) -> Callable[[Any], jax.Array]:
    """The identity, as a jit whose name holds the declaration."""

    def declared(x):
        return x

    declared.__name__ = declared.__qualname__ = f"{METRIC_PREFIX}{reduction.op}:{reduction.weight}"
    return jax.jit(declared)


def find_declaration(name: str | None) -> Reduction | None:
    """The reduction that `metric` declared, from the name of its jit; None for any other jit."""
    if name is None or not name.startswith(METRIC_PREFIX):
        return None
    op, _, weight = name.removeprefix(METRIC_PREFIX).partition(":")
    return Reduction(op, weight)


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["value"])
@dataclass(frozen=True)
class _Static:
    """A wrapper with which a jitted function returns a result that is not an array."""

    value: Any
    """The result."""
