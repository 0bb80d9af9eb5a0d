"""From plain JAX functions to graphs.

The traced program of `iterate` is the reference: everything that a site computes is derived from it. `init` is also evaluated
abstractly for twice as many environments: the axis of a leaf that becomes twice as long is the proposed env axis of this leaf.
The proof, equation by equation, is in `inference.py`.
"""

import functools
import importlib.util
import itertools
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jec
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

import choreo.roles
from choreo import _compat
from choreo.errors import AlgorithmError, PartitionError
from choreo.graph.graph import Graph
from choreo.graph.ir import Body, Op, Operand, Value
from choreo.graph.verify import verify
from choreo.partition import carry
from choreo.partition.program import Axis
from choreo.roles import SHARD_AXIS, Call, Reduction, find_call, find_declaration, shard_numbers, traced_anew
from choreo.types import PyTree, Role

LIBRARIES = """brax chex craftax diffrax distrax equinox flashbax flax gymnax haiku jaxmarl jumanji lineax mctx mujoco
mujoco_playground navix optax optimistix pgx rlax"""
for _library in LIBRARIES.split():
    _found = importlib.util.find_spec(_library)  # messages name the user's line, never a line in these libraries
    for _folder in (_found.submodule_search_locations or ()) if _found else ():
        source_info_util.register_exclusion(_folder)


@dataclass(frozen=True, eq=False)
class Traced:
    """An algorithm on an environment, traced."""

    init: Graph
    """key -> carry"""
    iterate: Graph
    """carry, key, iteration -> carry, metrics"""
    carry_axes: tuple[Axis, ...]
    """The proposed env axis of each leaf of the carry."""
    carry: PyTree
    """The form of the carry (`carry.py`): types in place of arrays, and the static leaves."""
    metrics: dict[str, jax.ShapeDtypeStruct]
    """The types of the metrics; with several shards, those of one shard."""
    reductions: dict[str, Reduction]
    """How each metric is reduced over the shards, as `choreo.metric` declared."""
    num_envs: int
    shards: int = 1
    """The number of shards. With several, the env axis of every array of `iterate` is divided: [shard, env]."""
    indivisible: AlgorithmError | None = None
    """With merge="any": the error if a leaf of the carry cannot be divided among workers. `plan_traced` raises
    it only if neither `partition` nor `iterate_of_one_worker` has raised an error."""


@traced_anew()
def trace(algo: Any, env: Any, shards: int = 1) -> Traced:
    """Trace `init` and `iterate`. Runs no environment and computes no arrays."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise PartitionError(
            "jax.disable_jit() is on, and hides fragments from the tracer.",
            fix="Do not use jax.disable_jit() while Choreo traces; to debug, use jax.debug.print or call algo.iterate yourself.",
        )
    key = jax.eval_shape(lambda: jax.random.key(0))
    first = carry.form_of(lambda key: algo.init(env, key), key)
    env_axes = _env_axes(algo, env, first, key, shards)
    form, iterate = carry.settle(
        type(algo).__name__, first, lambda form: _trace_iterate(algo, env, first, form, env_axes, shards)
    )
    names = carry.names_of(form)
    init_jaxpr = jax.make_jaxpr(lambda key: carry.leaves_of(algo.init(env, key), form))(key)
    return Traced(
        init=build("init", init_jaxpr, ["key"], names, env.num_envs, num_carry=0),
        iterate=build("iterate", iterate.jaxpr, [*names, "key", "iteration"], [*names, *iterate.metrics],
                      env.num_envs, num_carry=len(names)),
        carry_axes=_axes_of_arrays(form, env_axes),
        carry=form,
        metrics=iterate.metrics,
        reductions=_reductions(type(algo).__name__, iterate),
        num_envs=env.num_envs,
        shards=shards,
    )  # fmt: skip


@dataclass(frozen=True)
class Iteration(carry.TracedOnce):
    """`iterate`, traced for a carry of one form."""

    metrics: dict[str, jax.ShapeDtypeStruct]
    """The types of the metrics; with several shards, those of one shard."""


def _trace_iterate(
    algo: Any, env: Any, first: PyTree, form: PyTree, env_axes: Sequence[Axis], shards: int
) -> Iteration:
    """The program `carry, key, iteration -> carry, metrics` for a carry of a given form; `first`: the form that `init` returns."""
    found: list[tuple[PyTree, frozenset[int], dict[str, jax.ShapeDtypeStruct]]] = []
    axes = _axes_of_arrays(form, env_axes)

    def iterate(env, leaves, key):
        before = carry.with_leaves(form, leaves)
        after, metrics = _pair(algo, algo.iterate(env, before, key))
        metrics, new = _by_name(algo, metrics), carry.as_form(after)
        changed = carry.changed_leaves(type(algo).__name__, first, carry.as_form(before), new)
        found.append((new, changed, carry.as_form(metrics)))
        return carry.leaves_of(after, form), list(metrics.values())

    def one_iteration(leaves, key, iteration):
        return iterate(env, leaves, jax.random.fold_in(key, iteration))

    given = carry.types_of(form)
    if shards > 1:
        one_iteration = _sharded(algo, env, iterate, shards, axes, carry.names_of(form))
        given = [split_shards(leaf, axis, shards) for leaf, axis in zip(given, axes, strict=True)]
    key, iteration = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), np.int32)
    jaxpr = jax.make_jaxpr(one_iteration)(given, key, iteration)
    ((after, changed, metrics),) = found
    return Iteration(jaxpr, after, changed, metrics)


def _sharded(algo: Any, env: Any, iterate: Callable, shards: int, carry_axes: tuple[Axis, ...], names: list[str]):
    """One iteration of all shards: `vmap` of `iterate` on the environments of each shard, with the shard's own key."""
    iterate_all = functools.partial(iterate, env)
    env = env.with_num_envs(env.num_envs // shards)

    def one_iteration(leaves, key, iteration):
        def one_shard(leaves, key):
            after, metrics = iterate(env, leaves, key)
            _check_equal(algo, shards, carry_axes, names, after)
            return after, metrics

        key = jax.random.fold_in(key, iteration)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, shard_numbers(shards))
        try:
            return jax.vmap(one_shard, (list(carry_axes), 0), (list(carry_axes), 0), axis_name=SHARD_AXIS)(leaves, keys)
        except (TypeError, ValueError) as error:
            merges = [functools.partial(merge_shards, axis=axis) for axis in carry_axes]
            whole = [jax.eval_shape(merge, leaf) for merge, leaf in zip(merges, leaves, strict=True)]
            jax.eval_shape(iterate_all, whole, key)  # if `iterate` also fails without shards, this raises that error
            raise _fails_in_a_shard(algo, env.num_envs, shards, error) from error

    return one_iteration


def _fails_in_a_shard(algo: Any, num_envs: int, shards: int, error: Exception) -> AlgorithmError:
    """JAX's error, in a message that mentions the shards, because JAX's own message does not."""
    ours = (os.path.dirname(__file__), choreo.roles.__file__, os.sep + "site-packages" + os.sep)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in ours)]
    return AlgorithmError(
        f"With {shards} learner shards, `{type(algo).__name__}.iterate` is given {num_envs} environments at a time, not all "
        f"{shards * num_envs}, and fails: {str(error).splitlines()[0]}",
        at=f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else None,
        fix="Take the number of environments from the environment that `iterate` is given (env.num_envs) or from shapes. "
        "Or use one shard.",
    )


def split_shards(leaf: Any, axis: Axis, shards: int) -> Any:
    """A leaf of the carry with its env axis divided among shards: [env] becomes [shard, env]."""
    if axis is None:
        return leaf
    shape = (*leaf.shape[:axis], shards, leaf.shape[axis] // shards, *leaf.shape[axis + 1 :])
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)
    return leaf.reshape(shape)


def merge_shards(leaf: Any, axis: Axis) -> Any:
    """The inverse of `split_shards`: [shard, env] becomes [env]."""
    if axis is None:
        return leaf
    rows = leaf.shape[axis] * leaf.shape[axis + 1]  # not -1, which is ambiguous for an array without elements
    return leaf.reshape(*leaf.shape[:axis], rows, *leaf.shape[axis + 2 :])


def _check_equal(algo: Any, shards: int, carry_axes: tuple[Axis, ...], names: list[str], after: list[Any]) -> None:
    """Refuse a leaf that has no env axis and differs between shards. All shards share one copy of a leaf without an env axis."""
    (vmap, *_) = _compat.enclosing_vmaps(after)
    for name, axis, mapped in zip(names, carry_axes, vmap.in_axes, strict=True):
        if axis is None and mapped is not None:
            raise AlgorithmError(
                f"With {shards} learner shards, `{type(algo).__name__}.iterate` would return a different `{carry.named(name)}` on "
                f"each shard. `{carry.named(name)}` has no env axis, so it must be the same on all shards.",
                fix="Combine the values from which it is computed (gradients, statistics): choreo.all_reduce(x). Or use one shard.",
            )


def _pair(algo: Any, result: Any) -> tuple[PyTree, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise AlgorithmError(f"`{type(algo).__name__}.iterate` returned {type(result).__name__}, not (carry, metrics).",
                             fix="End it with `return carry, metrics`.")  # fmt: skip
    return result


def _by_name(algo: Any, metrics: Any) -> dict[str, jax.Array]:
    """The metrics, sorted by name. A mapping may have any order, and JAX orders different kinds of mappings differently."""
    if not isinstance(metrics, Mapping):
        raise _no_metrics(algo, f"returns metrics as a {type(metrics).__name__}")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise _no_metrics(algo, f"returns a metric whose name is {name!r}, which is not a string")
        if not eqx.is_array_like(value):
            raise _no_metrics(algo, f"returns a metric `{name}` that is a {type(value).__name__}, not a number")
    arrays = {}
    for name in sorted(metrics):
        try:
            array = arrays[name] = jnp.asarray(metrics[name])
        except OverflowError as error:
            raise AlgorithmError(f"The metric `{name}` of `{type(algo).__name__}` is {metrics[name]}, which is too large for an "
                                 "array of integers.", fix="Return it as a float.") from error  # fmt: skip
        if _compat.is_key(array.dtype):
            raise AlgorithmError(f"The metric `{name}` of `{type(algo).__name__}` is a random key, not a number.",
                                 fix="Leave it out, or return jax.random.key_data of it.")  # fmt: skip
    return arrays


def _no_metrics(algo: Any, what: str) -> AlgorithmError:
    return AlgorithmError(
        f"`{type(algo).__name__}.iterate` {what}; it must return its metrics as a flat dict of arrays.",
        fix='For example `return carry, {"loss": loss}`.',
    )


def _reductions(algo_name: str, iterate: Iteration) -> dict[str, Reduction]:
    """How each metric is reduced over the learner shards, as the algorithm declared."""
    first = len(iterate.jaxpr.jaxpr.outvars) - len(iterate.metrics)
    found = {name: _declared_reduction(iterate.jaxpr, first + i) for i, name in enumerate(iterate.metrics)}
    for name, reduction in found.items():
        if reduction.weight and found.get(reduction.weight, Reduction()).op != "sum":
            raise AlgorithmError(
                f"The metric `{name}` of `{algo_name}` is weighted by `{reduction.weight}`, but `iterate` returns no metric "
                f'`{reduction.weight}` with reduce="sum".',
                fix=f'Return it as well: {{"{reduction.weight}": choreo.metric(count, reduce="sum")}}.',
            )
    return found


def _declared_reduction(closed: jec.ClosedJaxpr, position: int) -> Reduction:
    """The reduction that `choreo.metric` declared for the output at `position`; the declaration may be inside of calls."""
    var = closed.jaxpr.outvars[position]
    eqn = next((eqn for eqn in closed.jaxpr.eqns if any(out is var for out in eqn.outvars)), None)
    # If a number is the same on all shards, the vmap over shards adds a broadcast.
    while eqn is not None and eqn.primitive is jec.primitives.broadcast_in_dim_p:
        (var, *_) = eqn.invars
        eqn = next((eqn for eqn in closed.jaxpr.eqns if any(out is var for out in eqn.outvars)), None)
    if eqn is None:
        return Reduction()
    if declared := find_declaration(_compat.call_name(eqn)):
        return declared
    inner = _compat.inner_jaxpr(eqn)
    return (
        _declared_reduction(inner, [out is var for out in eqn.outvars].index(True))
        if inner is not None
        else Reduction()
    )


def _env_axes(algo: Any, env: Any, form: PyTree, key: Any, shards: int) -> list[Axis]:
    """For each leaf of the carry: the axis of length `num_envs` that doubles if the number of environments doubles; None if there
    is not exactly one such axis."""
    twice = carry.form_of(lambda key: algo.init(env.with_num_envs(2 * env.num_envs), key), key)
    pairs = list(zip(jax.tree.leaves(form), jax.tree.leaves(twice), strict=False))
    if jax.tree.structure(form) != jax.tree.structure(twice) or any(
        carry.is_type(one) != carry.is_type(two) for one, two in pairs
    ):
        raise AlgorithmError(
            f"`{type(algo).__name__}.init` returns a carry whose structure depends on the number of environments.",
            fix="Let the number of environments change shapes only: one array with an env axis in place of many arrays.",
        )
    axes = []
    for (path, _), (one, two) in zip(jax.tree_util.tree_leaves_with_path(form), pairs, strict=True):
        if not carry.is_type(one):
            axes.append(None)
            continue
        lengths = enumerate(zip(one.shape, two.shape, strict=False))
        found = [d for d, pair in lengths if pair == (env.num_envs, 2 * env.num_envs)]
        axes.append(found[0] if len(found) == 1 and len(one.shape) == len(two.shape) else None)
        if shards > 1 and axes[-1] is None and one.shape != two.shape:
            raise AlgorithmError(
                f"`carry{jax.tree_util.keystr(path)}` of `{type(algo).__name__}` is {carry.leaf_text(one)} for {env.num_envs} "
                f"environments and {carry.leaf_text(two)} for {2 * env.num_envs}. To divide it among {shards} shards, Choreo needs "
                f"exactly one axis of length {env.num_envs}.",
                fix="Give the leaf an axis for environments, as in [num_envs, 4] in place of [4 * num_envs], or a shape that "
                "does not depend on the number of environments. Or use one shard.",
            )
    return axes


def _axes_of_arrays(form: PyTree, env_axes: Sequence[Axis]) -> tuple[Axis, ...]:
    pairs = zip(jax.tree.leaves(form), env_axes, strict=True)
    return tuple(axis for leaf, axis in pairs if carry.is_type(leaf))


def build(name: str, closed: jec.ClosedJaxpr, in_names: Sequence[str], out_names: Sequence[str], num_envs: int,
          *, num_carry: int) -> Graph:  # fmt: skip
    """The graph of a traced function. Calls around fragments are inlined; scans with fragments in them get a body."""
    body = _Builder().body(closed, num_consts=0, num_carry=num_carry, labels=in_names)
    return verify(Graph(name, body, tuple(in_names), tuple(out_names), num_envs), after="build")


def roles_in(eqn: jec.JaxprEqn) -> frozenset[Role]:
    """The roles of the outermost fragments in an equation."""
    call = find_call(_compat.call_name(eqn))
    if call:
        return frozenset([call.role])
    return frozenset(role for inner in _compat.inner_jaxprs(eqn) for e in inner.jaxpr.eqns for role in roles_in(e))


class _Builder:
    def __init__(self):
        self.numbers = itertools.count()

    def value(self, aval: Any, label: str) -> Value:
        return Value(next(self.numbers), aval, label)

    def body(self, closed: jec.ClosedJaxpr, *, labels: Sequence[str] | None = None, at: str = "", **shape: Any) -> Body:
        labels = labels or [""] * len(closed.jaxpr.invars)
        ins = tuple(self.value(v.aval, label) for v, label in zip(closed.jaxpr.invars, labels, strict=True))
        ops: list[Op] = []
        consts: dict[Value, Any] = {}
        outs = self.inline(closed, ins, ops, consts, at)
        return Body(ins, tuple(ops), tuple(outs), consts, **shape)

    def inline(
        self, closed: jec.ClosedJaxpr, args: Sequence[Operand], ops: list[Op], consts: dict, at: str
    ) -> list[Operand]:
        """Append the ops of a jaxpr to `ops`, and its constants to `consts`; return its outputs."""
        jaxpr = closed.jaxpr
        known: dict[Any, Operand] = dict(zip(jaxpr.invars, args, strict=True))
        for var, array in zip(jaxpr.constvars, closed.consts, strict=True):
            known[var] = self.value(var.aval, "constant")
            consts[known[var]] = array

        def read(var: Any) -> Operand:
            if not isinstance(var, jec.Literal):
                return known[var]
            if not np.shape(var.val):
                return var
            # With `jax_use_simplified_jaxpr_constants`, arrays are literals. A constant can be divided, a literal cannot.
            constant = self.value(var.aval, "constant")
            consts[constant] = var.val
            return constant

        for eqn in jaxpr.eqns:
            operands = tuple(read(v) for v in eqn.invars)
            line = _compat.where(eqn) or at
            roles, call, inner = roles_in(eqn), find_call(_compat.call_name(eqn)), _compat.inner_jaxpr(eqn)
            # The call that declares a metric returns its operand. The graph leaves out this call: `_reductions` reads the
            # declaration from the jaxpr.
            if find_declaration(_compat.call_name(eqn)):
                known[eqn.outvars[0]] = operands[0]
                continue
            if roles and not call and inner is not None:
                known.update(zip(eqn.outvars, self.inline(inner, operands, ops, consts, line), strict=True))
                continue
            body = None
            if roles and eqn.primitive is jec.primitives.scan_p:
                p = _compat.scan_params(eqn)
                names = [v.label if isinstance(v, Value) else "" for v in operands]
                body = self.body(p.body, labels=names, at=line, num_consts=p.num_consts, num_carry=p.num_carry,
                                 length=p.length, reverse=p.reverse)  # fmt: skip
            labels = _out_labels(eqn, call, body)
            forwarded = _forwarded(inner) if inner is not None else {}
            outs: list[Value | None] = []
            for position, var in enumerate(eqn.outvars):
                if position in forwarded:
                    # A call may return an operand unchanged. Read the operand itself, so that parameters are not sent for nothing.
                    known[var] = operands[forwarded[position]]
                    outs.append(None)
                elif isinstance(var, jec.DropVar):
                    outs.append(None)
                else:
                    value = self.value(var.aval, labels[position])
                    known[var] = value
                    outs.append(value)
            ops.append(Op(eqn, operands, tuple(outs), roles, call, body, line))
        return [read(v) for v in jaxpr.outvars]


def _out_labels(eqn: jec.JaxprEqn, call: Call | None, body: Body | None) -> list[str]:
    """Labels for people: `step_one[1].reward` for a result of a fragment. A scan that returns this result uses the same label."""
    if call and len(call.out_names) == len(eqn.outvars):  # a differentiated fragment has more results
        return [call.name + name for name in call.out_names]
    if body:
        return [v.label if isinstance(v, Value) else "" for v in (*body.carry_ins, *body.ys)]
    return [call.name if call else eqn.primitive.name] * len(eqn.outvars)


def _forwarded(inner: jec.ClosedJaxpr) -> dict[int, int]:
    """The outputs of a call that are its inputs, unchanged: position of output -> position of input."""
    ins = {var: i for i, var in enumerate(inner.jaxpr.invars)}
    return {o: ins[v] for o, v in enumerate(inner.jaxpr.outvars) if not isinstance(v, jec.Literal) and v in ins}
