"""What a segment computes, as data that one interpreter evaluates.

    OpsCode     ops of the graph, in program order: inputs, constants -> pieces of values
    JoinedCode  two codes, one after the other
    DrawCode    draws the random numbers of an `OpsCode`, for all steps of the loop around it
    RestCode    the rest of that `OpsCode`: it reads the numbers that were drawn for the current step

    evaluate(code, replica index, step of the loop, inputs) -> results

Codes are immutable. They refer to the ops of the graph and to how each op is evaluated, but not to the placement and the
needs from which they were made. A code is callable, so that JAX can trace and compile it: `jax.jit(code)(index, t, *inputs)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax

from choreo import _compat
from choreo.graph.ir import Op, Operand, Value
from choreo.partition.inferred import InferredEqn
from choreo.partition.lattice import Size, piece_type, slice_block
from choreo.partition.program import Axis, Input, Segment, Slot
from choreo.partition.reduce import combines
from choreo.partition.whole_equations import Pruned
from choreo.types import GroupName, Role


class SegmentCode(ABC):
    """What a segment computes: `code(replica index, step of the loop, *inputs) -> results`."""

    def __call__(self, index: Any, t: Any, *values: Any) -> list[Any]:
        return evaluate(self, index, t, values)

    @property
    @abstractmethod
    def ops(self) -> tuple[Op, ...]:
        """The ops of the graph that are evaluated, in order."""

    @property
    @abstractmethod
    def out_axes(self) -> tuple[Axis, ...]:
        """The axis along which each result is a block of the whole; None: the result is the same at every replica."""

    @property
    @abstractmethod
    def out_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The types of the results."""

    @property
    def name(self) -> str:
        """The names of the fragments in this code, joined by "+"; "glue" if there are none."""
        return "+".join(dict.fromkeys(_fragment_names(self.ops))) or "glue"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the fragments in this code, in order."""
        return tuple(dict.fromkeys(role for op in self.ops for role in sorted(op.roles)))

    @property
    def combines(self) -> bool:
        """Do the replicas combine values while the code runs?"""
        return False


@dataclass(frozen=True)
class CodeInput:
    """One piece of a value that a code reads."""

    value: Value
    axis: Axis
    """The axis along which the piece is a block of the value; None: the piece is the whole value."""
    stacked: bool
    """Does the given array hold one slice per step of the loop around the code? Then the code reads the current slice."""
    aval: Any
    """The type of the given array."""

    @property
    def outer_axis(self) -> Axis:
        """The axis along which the given array is a block of the whole."""
        return self.axis + 1 if self.stacked and self.axis is not None else self.axis


@dataclass(frozen=True, eq=False)
class OpStep:
    """One op of a code, and how it is evaluated."""

    op: Op
    wanted: tuple[frozenset[Axis], ...]
    """The pieces that are wanted of each result."""
    evaluation: InferredEqn | Pruned
    """At a replica: what was inferred about the op. At a site that sees all environments: the op without unwanted results."""


@dataclass(frozen=True, eq=False)
class OpsCode(SegmentCode):
    """Ops of the graph, in program order."""

    # JAX compiles the code under this name, so the name is part of a plan's fingerprint. The same holds for the other codes.
    __name__ = "segment"

    group: GroupName
    """The group that runs the code."""
    ins: tuple[CodeInput, ...]
    consts: Mapping[Value, Any]
    """Values that are known arrays."""
    steps: tuple[OpStep, ...]
    outs: tuple[tuple[Value, Axis], ...]
    """The pieces of values that the code returns."""
    size: Size | None
    """The size of the replica's block; None: the site sees all environments."""

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(step.op for step in self.steps)

    @property
    def out_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for _, axis in self.outs)

    @property
    def out_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(piece_type(value.aval, axis, self.size) for value, axis in self.outs)

    @property
    def combines(self) -> bool:
        return self.size is not None and any(combines(op.eqn) for op in self.ops)


@dataclass(frozen=True, eq=False)
class JoinedCode(SegmentCode):
    """Two codes in one call, the second after the first. The name and the roles are those of the first."""

    __name__ = "fn"

    first: SegmentCode
    num_first: int
    """How many inputs `first` has; these are the first inputs of the `JoinedCode`."""
    then: SegmentCode
    reads: tuple[int, ...]
    """For each input of `then`: its position in the list [all inputs of the `JoinedCode`, results of `first`]."""

    @property
    def ops(self) -> tuple[Op, ...]:
        return (*self.first.ops, *self.then.ops)

    @property
    def out_axes(self) -> tuple[Axis, ...]:
        return (*self.first.out_axes, *self.then.out_axes)

    @property
    def out_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (*self.first.out_avals, *self.then.out_avals)

    @property
    def name(self) -> str:
        return self.first.name

    @property
    def roles(self) -> tuple[Role, ...]:
        return self.first.roles


@dataclass(frozen=True, eq=False)
class DrawCode(SegmentCode):
    """The random numbers that a code draws, for all steps of the loop around it."""

    __name__ = "draw"

    of: OpsCode
    """The code that uses the numbers."""
    drawing: Pruned
    """(replica index, step, *keys of all steps) -> the numbers of one step, and None for each value that is not drawn."""
    length: int
    """How many steps the loop has."""

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.of.ops

    @property
    def out_axes(self) -> tuple[Axis, ...]:
        return (None,) * len(self.out_avals)

    @property
    def out_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        avals: list[Any] = [var.aval for var in self.drawing.closed.jaxpr.outvars]
        return tuple(jax.ShapeDtypeStruct((self.length, *aval.shape), aval.dtype) for aval in avals)

    @property
    def name(self) -> str:
        return "draws"


@dataclass(frozen=True, eq=False)
class RestCode(SegmentCode):
    """A code without its draws. Its first inputs are the drawn numbers of all steps."""

    __name__ = "go_on"

    of: OpsCode
    """The code with its draws."""
    undrawn: Pruned
    """(replica index, step) -> the values that `rest` needs and that depend on no key; None for each value that was drawn."""
    rest: jec.ClosedJaxpr
    """(drawn numbers and results of `undrawn`, merged in the order in which `rest` takes them, *other inputs) -> results"""

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.of.ops

    @property
    def out_axes(self) -> tuple[Axis, ...]:
        return self.of.out_axes

    @property
    def out_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.of.out_avals


def as_segment(code: SegmentCode, group: GroupName, ins: Sequence[Input], outs: Sequence[Slot]) -> Segment:
    """The step of a program that evaluates the code. The step repeats facts about the code, because
    workers get no `SegmentCode`."""
    return Segment(
        group, code.name, tuple(ins), tuple(outs), code.out_avals, code,
        roles=code.roles, out_axes=code.out_axes, combines=code.combines,
    )  # fmt: skip


def evaluate(code: SegmentCode, index: Any, t: Any, values: Sequence[Any]) -> list[Any]:
    """The results of a code at replica `index`, in step `t` of the loop around it. `values`: the arrays of its inputs."""
    match code:
        case OpsCode():
            return _evaluate_ops(code, index, t, values)
        case JoinedCode():
            results = evaluate(code.first, index, t, values[: code.num_first])
            known = [*values, *results]
            return [*results, *evaluate(code.then, index, t, [known[position] for position in code.reads])]
        case DrawCode():
            keys = values
            steps = jnp.arange(code.length, dtype=jnp.int32)
            drawn = jax.vmap(lambda t: code.drawing.run(_used(code.drawing, [index, t, *keys])))(steps)
            return [numbers for numbers in drawn if numbers is not None]
        case RestCode():
            undrawn = code.undrawn.run(_used(code.undrawn, [index, t]))
            num_drawn = code.undrawn.wanted.count(False)
            drawn = (lax.dynamic_index_in_dim(x, t, 0, keepdims=False) for x in values[:num_drawn])
            known = [x if want else next(drawn) for x, want in zip(undrawn, code.undrawn.wanted, strict=True)]
            return _compat.eval_jaxpr(code.rest, [*known, *values[num_drawn:]])
    raise AssertionError(f"the interpreter does not know the code {type(code).__name__}")


def _evaluate_ops(code: OpsCode, index: Any, t: Any, values: Sequence[Any]) -> list[Any]:
    size = code.size
    held: dict[Value, dict[Axis, Any]] = {value: {None: array} for value, array in code.consts.items()}
    for given, array in zip(code.ins, values, strict=True):
        # This check runs only while JAX traces. Without the check, JAX would silently compile the segment again for an array of
        # a different type.
        assert (array.shape, array.dtype) == (given.aval.shape, given.aval.dtype), (
            f"`{given.value.label}` arrives at `{code.group}` as {array.dtype}{list(array.shape)}, but the plan says {given.aval}"
        )
        array = lax.dynamic_index_in_dim(array, t, 0, keepdims=False) if given.stacked else array
        held.setdefault(given.value, {})[given.axis] = array

    def piece(operand: Operand, axis: Axis) -> Any:
        if not isinstance(operand, Value):
            return operand.val
        pieces = held[operand]
        if axis not in pieces:
            assert size is not None
            pieces[axis] = slice_block(pieces[None], axis, index, size)
        return pieces[axis]

    for step in code.steps:
        op, evaluation = step.op, step.evaluation
        results: list[dict[Axis, Any]]
        if isinstance(evaluation, Pruned):
            whole = [piece(v, None) for v, used in zip(op.ins, evaluation.used, strict=True) if used]
            results = [{None: result} for result in evaluation.run(whole)]
        else:
            assert size is not None
            results = evaluation.emit(lambda i, axis, op=op: piece(op.ins[i], axis), step.wanted, index, size)
        held.update((value, pieces) for value, pieces in zip(op.outs, results, strict=True) if value)
    return [piece(value, axis) for value, axis in code.outs]


def _used(pruned: Pruned, values: Sequence[Any]) -> list[Any]:
    """The inputs that a pruned program uses. Unused inputs at the end may be missing in `values`."""
    return [value for value, use in zip(values, pruned.used, strict=False) if use]


def _fragment_names(ops: Iterable[Op]) -> list[str]:
    names = []
    for op in ops:
        if op.call:
            names.append(op.call.name)
        elif op.body:
            names.append(f"{op.body.length} x ({'+'.join(dict.fromkeys(_fragment_names(op.body.ops)))})")
        elif op.roles:
            names.append(op.name)
    return names
