"""The only file that uses `jax._src` or undocumented parameters of equations.

Everything here was checked with JAX 0.10 and 0.12. `tests/test_compat.py` lists what Choreo relies on.
"""

import functools
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec
import jax.extend.core.primitives
import jax.random
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe
from jax._src.lib import _jax
from jax.extend import source_info_util
from jax.extend.backend import register_backend_factory


@dataclass(frozen=True)
class Vmap:
    """One `jax.vmap` around a call, seen from inside the call."""

    axis_name: str | None
    """The name in `vmap(axis_name=...)`; None if there is none."""
    size: int
    """The length of the mapped axis."""
    in_axes: tuple[int | None, ...]
    """The mapped axis of each argument; None if the argument is not mapped."""


def enclosing_vmaps(leaves: Sequence[Any]) -> tuple[Vmap, ...]:
    """The vmaps around the current call, innermost first. The list ends at the first other transformation (grad, jit, scan)."""
    vmaps = []
    trace = _core.trace_ctx.trace
    while isinstance(trace, _batching.BatchTrace):
        axes, inner = [], []
        for x in leaves:
            ours = isinstance(x, _batching.BatchTracer) and x._trace.tag is trace.tag
            axes.append(x.batch_dim if ours else None)  # pyright: ignore[reportAttributeAccessIssue]
            inner.append(x.val if ours else x)  # pyright: ignore[reportAttributeAccessIssue]
        if not all(axis is None or isinstance(axis, int) for axis in axes):
            break  # a ragged axis: a list that is too short is better than a wrong entry
        name = trace.axis_data.name
        vmaps.append(Vmap(name if isinstance(name, str) else None, trace.axis_data.size, tuple(axes)))
        leaves, trace = inner, trace.parent_trace
    return tuple(vmaps)


def bound_axis_names() -> tuple[str, ...]:
    """The names of the mapped axes in scope.

    These names tell `all_reduce` whether there are shards. The names are part of jit's cache key. A context variable of Choreo
    would not be part of the key, so jit could reuse a program that was traced without shards.
    """
    return tuple(n for n in jec.unsafe_get_axis_names_DO_NOT_USE() if isinstance(n, str))


def trace_context() -> Hashable:
    """The settings on which a trace depends, in addition to the function and the types of its arguments.

    These settings are those in the key of JAX's cache of traces (precision, x64, promotion of dtypes, bound axis names, meshes,
    user contexts, and more), and the default generator of random keys, which JAX's key leaves out.
    """
    return (_config.trace_context(), bound_axis_names(), _config.default_prng_impl.value)


def struct_of(aval: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """The type `aval` as an argument for `make_jaxpr`. A weak type stays weak. `shape` replaces the shape, if given."""
    shape = aval.shape if shape is None else shape
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def is_tracing() -> bool:
    """Is the current code being traced or mapped?"""
    return not _core.trace_state_clean()


def bind(eqn: jec.JaxprEqn, params: dict[str, Any], values: Sequence[Any]) -> list[Any]:
    """Apply an equation's primitive to these operands and parameters, under the equation's name stack and context."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def eval_jaxpr(closed: jec.ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr for these inputs, equation by equation."""
    return _core.eval_jaxpr(closed.jaxpr, closed.consts, *values)


def prune(closed: jec.ClosedJaxpr, used_outs: Sequence[bool]) -> tuple[jec.ClosedJaxpr, tuple[bool, ...]]:
    """Return a jaxpr with only the equations and inputs that its used outputs need, and whether each input is kept."""
    jaxpr, used_ins = _pe.dce_jaxpr(closed.jaxpr, list(used_outs))
    return jec.ClosedJaxpr(jaxpr, closed.consts), tuple(used_ins)


def split_known(closed: jec.ClosedJaxpr, known: Sequence[bool]) -> tuple[jec.ClosedJaxpr, jec.ClosedJaxpr, list[Any]]:
    """Split a jaxpr by partial evaluation. Returns two jaxprs, `first` and `rest`, and the types of the values between them.

    `first` needs only the known inputs. The whole jaxpr computes `rest(*first(*known inputs), *other inputs)`.
    """
    first, rest, _, types = _pe.partial_eval_jaxpr_nounits(closed, [not each for each in known], instantiate=True)
    return first, rest, types


def _own_primitives() -> dict[str, set[jec.Primitive]]:
    """JAX's own primitives, by name. They are global variables of JAX's modules."""
    found: dict[str, set[jec.Primitive]] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(_PRIMITIVE_MODULES):
            for value in vars(module).values():
                if isinstance(value, jec.Primitive):
                    found.setdefault(value.name, set()).add(value)
    return found


_PRIMITIVE_MODULES = (
    "jax.extend.core.primitives", "jax._src.ad_checkpoint", "jax._src.ad_util", "jax._src.core",
    "jax._src.custom_derivatives", "jax._src.dispatch", "jax._src.interpreters.ad", "jax._src.lax.", "jax._src.pjit",
    "jax._src.prng", "jax._src.random",
)  # fmt: skip
_OWN = _own_primitives()


def primitives(names: Iterable[str]) -> frozenset[jec.Primitive]:
    """JAX's own primitives with these names; never a user's `Primitive("add")`. Names that this JAX lacks are skipped."""
    return frozenset(primitive for name in names for primitive in _OWN.get(name, ()))


_BATCHING_RULES = dict(_batching.fancy_primitive_batchers)
"""A copy of the batching rules, made when Choreo was imported."""


def has_own_batching_rule(primitive: jec.Primitive) -> bool:
    """Does the primitive still have JAX's own batching rule? Any code can register a different one."""
    rule = _batching.fancy_primitive_batchers.get(primitive)
    return rule is _BATCHING_RULES.get(primitive) and (rule is None or _is_from_jax(rule))


def _is_from_jax(rule: Any) -> bool:
    """Are this function, and all functions that it closes over, defined in JAX?"""
    if isinstance(rule, functools.partial):
        return all(_is_from_jax(part) for part in (rule.func, *rule.args, *rule.keywords.values()) if callable(part))
    # Look at `__globals__` first, because `functools.wraps` copies `__module__` from the function that is wrapped.
    module = getattr(rule, "__globals__", {}).get("__name__") or getattr(rule, "__module__", None) or ""
    if not module.startswith("jax."):
        return False
    cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    return all(_is_from_jax(part) for part in cells if callable(part) and not isinstance(part, type))


def call_name(eqn: jec.JaxprEqn) -> str | None:
    """The name of the jitted function that an equation calls; None if the equation does not call one."""
    return eqn.params["name"] if eqn.primitive in _JIT else None


_JIT = primitives(["jit", "pjit"])
INLINED = {
    # Primitives that only wrap a program, with the name of the parameter that holds the program. Evaluating the program gives
    # the same values as the call.
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
    "custom_lin": "call_jaxpr",
}
_INLINED = {primitive: param for name, param in INLINED.items() for primitive in primitives([name])}


def inner_jaxpr(eqn: jec.JaxprEqn) -> jec.ClosedJaxpr | None:
    """The program that a wrapping call evaluates; None for every other equation."""
    param = _INLINED.get(eqn.primitive)
    if param is None or param not in eqn.params:
        return None
    return _closed(eqn.params[param])


def _closed(jaxpr: Any) -> jec.ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, jec.ClosedJaxpr) else jec.ClosedJaxpr(jaxpr, ())


def inner_jaxprs(eqn: jec.JaxprEqn) -> Iterator[jec.ClosedJaxpr]:
    """All jaxprs among the parameters of an equation."""
    for param in eqn.params.values():
        for item in param if isinstance(param, (tuple, list)) else (param,):
            if isinstance(item, jec.ClosedJaxpr):
                yield item
            elif isinstance(item, jec.Jaxpr):
                yield jec.ClosedJaxpr(item, ())


def impure_primitive(eqn: jec.JaxprEqn) -> str | None:
    """The name of the first impure primitive in an equation; None if all primitives in it are pure.

    The result of an impure primitive is not a function of its operands. A primitive is impure if it has an effect and a
    result: `io_callback` is impure, but not `jax.debug.print`, which has no result. `rng_uniform` is also impure: it has
    a hidden state that JAX does not list as an effect.
    """
    if eqn.primitive in _RNG_UNIFORM:
        return eqn.primitive.name
    inner = list(inner_jaxprs(eqn))
    if not inner:
        return eqn.primitive.name if eqn.effects and eqn.outvars else None
    return next((name for each in inner if (name := _impure_in(each.jaxpr))), None)


@functools.lru_cache(maxsize=4096)
def _impure_in(jaxpr: jec.Jaxpr) -> str | None:
    return next((name for eqn in jaxpr.eqns if (name := impure_primitive(eqn))), None)


_RNG_UNIFORM = primitives(["rng_uniform"])


def rename_calls(eqn: jec.JaxprEqn, rename: Callable[[str], str]) -> jec.JaxprEqn:
    """The equation with `rename` applied to the name of the jitted function that it calls, and to the names of all jitted functions
    inside of that function."""
    changed = {key: new for key, old in eqn.params.items() if (new := _renamed(old, rename)) is not old}
    if eqn.primitive in _JIT and (name := rename(eqn.params["name"])) != eqn.params["name"]:
        changed["name"] = name
    return eqn.replace(params=eqn.params | changed) if changed else eqn


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(value, jec.ClosedJaxpr):
        inner = rename_in(value.jaxpr, rename)
        return value if inner is value.jaxpr else jec.ClosedJaxpr(inner, value.consts)
    if isinstance(value, jec.Jaxpr):
        return rename_in(value, rename)
    if isinstance(value, tuple):
        items = [_renamed(item, rename) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


@functools.lru_cache(maxsize=4096)
def rename_in(jaxpr: jec.Jaxpr, rename: Callable[[str], str]) -> jec.Jaxpr:
    """The jaxpr with `rename` applied to the name of every jitted function."""
    eqns = [rename_calls(eqn, rename) for eqn in jaxpr.eqns]
    return jaxpr if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)) else jaxpr.replace(eqns=eqns)


@dataclass(frozen=True)
class ScanParams:
    """The parameters of a `lax.scan` equation."""

    body: jec.ClosedJaxpr
    """The loop's body: consts, carry, one slice of xs -> carry, one slice of ys."""
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int | bool


def scan_params(eqn: jec.JaxprEqn) -> ScanParams:
    p = eqn.params
    if "ft_in" in p:  # JAX 0.12
        num_consts, num_carry, _ = (len(part) for part in p["ft_in"].unpack())
    else:
        num_consts, num_carry = p["num_consts"], p["num_carry"]
    return ScanParams(_closed(p["jaxpr"]), num_consts, num_carry, p["length"], p["reverse"], p["unroll"])


@dataclass(frozen=True)
class WhileParams:
    """The parameters of a `lax.while_loop` equation."""

    cond: jec.ClosedJaxpr
    body: jec.ClosedJaxpr
    num_cond_consts: int
    num_body_consts: int


def while_params(eqn: jec.JaxprEqn) -> WhileParams:
    p = eqn.params
    return WhileParams(_closed(p["cond_jaxpr"]), _closed(p["body_jaxpr"]), p["cond_nconsts"], p["body_nconsts"])


def innermost(compiled: Any) -> Callable[..., Any]:
    """The function inside `compiled`, which skips JAX's checks in Python. The checks take 3 us of a call of 32 us.

    Call `compiled` once before you call `innermost`: the inner function exists only after the first call.
    """
    return compiled._call


def where(eqn: jec.JaxprEqn) -> str:
    """The user's line from which an equation was traced: `my_ppo.py:88:13 (act)`; empty if the line is not known."""
    line = source_info_util.summarize(eqn.source_info)
    return "" if line.startswith("<") or line == "unknown" else line


def is_written_by_jax(closed: jec.ClosedJaxpr) -> bool:
    """Is `closed` the program of a function of JAX? JAX caches traces, so its source lines may belong to an earlier caller."""
    file = closed.jaxpr.debug_info.func_filename
    return file is not None and file.startswith(_JAX_FOLDER)


_JAX_FOLDER = os.path.dirname(jax.__file__) + os.sep


def clients_exist() -> bool:
    """Has JAX initialised its backends already?"""
    return _xla_bridge.backends_are_initialized()


def use_gloo_at(address: str) -> None:
    """Let the CPU devices of several processes run collectives with Gloo, which listens only at this address.

    Call this function after `jax.distributed.initialize` and before JAX initialises its backends. By default, Gloo
    listens at the address of the host's name, which other machines may be able to reach.
    """

    def make_client() -> Any:
        client = _distributed.global_state.client
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address)
        return _xla_bridge.make_cpu_client(collectives=gloo)

    register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def key_impl(dtype: Any) -> str:
    """The name of the random generator to which a dtype of keys belongs."""
    return dtype._impl.name


def is_threefry(dtype: Any) -> bool:
    """Is this the dtype of the keys of JAX's own Threefry generator? A user's generator with the same name does not count."""
    return dtype._impl is _THREEFRY


_THREEFRY = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype._impl


def is_key(dtype: Any) -> bool:
    """Is this a dtype of random keys?"""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
