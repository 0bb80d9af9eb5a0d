"""The costs of a plan, as data: messages and bytes between groups, and the size of the largest matrix product or convolution.

    Costs          communication of `init`, communication of `iterate`, largest product
    Communication  the crossings of one program, in the order of its steps
    Crossing       one transfer between two groups: how often, in how many messages, how many bytes

The printer and the drawing read these values, so that they show the same numbers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.extend.core as jec

from choreo import _compat
from choreo.graph.edges import is_path
from choreo.graph.graph import Graph
from choreo.graph.ir import nbytes_of
from choreo.partition.program import Loop, Move, Program, Ref, Slot, Transfer, walk
from choreo.types import GroupName


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One transfer of a program, with its size."""

    src: GroupName
    dst: GroupName
    moves: tuple[Move, ...]
    """The values that cross. Each label is the user's name for the value, or "" if the value has no name."""
    times: int
    """How often the transfer happens while the program runs once."""
    num_messages: int
    """Messages each time: one for every pair (sender, receiver) in which the receiver gets something from the sender."""
    nbytes: int
    """Bytes each time, over all messages."""

    @property
    def message_nbytes(self) -> int:
        """Mean size of a message, rounded up."""
        return -(-self.nbytes // self.num_messages)

    @property
    def total_messages(self) -> int:
        """Messages while the program runs once."""
        return self.times * self.num_messages

    @property
    def total_nbytes(self) -> int:
        """Bytes while the program runs once."""
        return self.times * self.nbytes


@dataclass(frozen=True)
class Communication:
    """Everything that crosses between groups while a program runs once."""

    crossings: tuple[Crossing, ...]

    @property
    def num_messages(self) -> int:
        return sum(crossing.total_messages for crossing in self.crossings)

    @property
    def nbytes(self) -> int:
        return sum(crossing.total_nbytes for crossing in self.crossings)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a plan that are known before it runs."""

    init: Communication
    iterate: Communication
    largest_product: int
    """Multiplications in the largest matrix product or convolution of one iteration."""


def communication(program: Program, processes: Mapping[GroupName, int], *, num_workers: int = 1) -> Communication:
    """The messages and bytes of a program. `processes`: how many processes each group has.

    With merge="any", `num_workers` is the number of workers, and `program` is the program of the learner and of one worker. This
    program runs once for each worker.
    """
    processes = processes if num_workers == 1 else dict.fromkeys(processes, 1)
    names = _slot_names(program)
    crossings = [
        _crossing(step, times, names, processes, num_workers)
        for step, times in walk(program.steps)
        if isinstance(step, Transfer)
    ]
    return Communication(tuple(crossings))


def _crossing(
    transfer: Transfer, times: int, names: Mapping[Slot, str], processes: Mapping[GroupName, int], num_workers: int
) -> Crossing:
    senders, receivers = processes[transfer.src], processes[transfer.dst]
    pairs = {pair for move in transfer.moves for pair in _pairs(move, senders, receivers)}
    nbytes = sum(nbytes_of(move.aval) * (receivers if move.dst_axis is None else 1) for move in transfer.moves)
    return Crossing(
        src=transfer.src,
        dst=transfer.dst,
        moves=tuple(replace(move, label=names.get(move.src) or _user_label(move)) for move in transfer.moves),
        times=times,
        num_messages=len(pairs) * num_workers,
        nbytes=nbytes * num_workers,
    )


def _pairs(move: Move, senders: int, receivers: int) -> Iterator[tuple[int, int]]:
    """The pairs (sender, receiver) between which a message goes. Each of the two holds a block of the value, or the whole."""
    have, want = move.src_axis if senders > 1 else None, move.dst_axis if receivers > 1 else None
    for r in range(receivers):
        for s in range(senders):
            overlap = s * receivers < (r + 1) * senders and r * senders < (s + 1) * receivers
            own = s == r * senders // receivers  # each receiver gets a whole value from one sender only
            if own if have is None else overlap or have != want:
                yield s, r


def _user_label(move: Move) -> str:
    return move.label if is_path(move.label) else ""


def _slot_names(program: Program) -> dict[Slot, str]:
    """The user's names for values in slots. Leaves of the carry and metrics have names, also where loops pass them on."""
    names: dict[Slot, str] = {}

    def name(ref: Ref | None, label: str | None) -> None:
        if isinstance(ref, Slot) and label:
            names.setdefault(ref, label)

    for port in (*program.ins, *program.outs):
        for ref, _ in port.held.values():
            name(ref, port.name)
    for step, _ in walk(program.steps):
        if isinstance(step, Loop):
            for part in step.parts.values():
                for inner, outer, *_ in (*part.consts, *part.carry, *part.xs, *part.slices):
                    name(inner, names.get(outer) if isinstance(outer, Slot) else None)
                for inner, _, after, last in part.carry:
                    name(inner, names.get(last) if last is not None else None)
                    name(after, names.get(inner))
    return names


def largest_product(graph: Graph) -> int:
    """The number of multiplications in the largest matrix product or convolution. If it is small, XLA needs only one thread."""
    return max(_products(op.eqn for op in graph.body.ops), default=0)


def _products(eqns: Iterable[jec.JaxprEqn]) -> Iterator[int]:
    for eqn in eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            yield _multiplications(eqn)
        for inner in _compat.inner_jaxprs(eqn):
            yield from _products(inner.jaxpr.eqns)


def _multiplications(eqn: jec.JaxprEqn) -> int:
    """The number of elements of the result, times the number of terms that are summed up for each element."""
    shapes: list[Any] = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]  # pyright: ignore[reportAttributeAccessIssue]
    left, right, result = shapes
    if eqn.primitive.name == "dot_general":
        (summed, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(left[axis] for axis in summed)
    else:
        terms = math.prod(right) // right[eqn.params["dimension_numbers"].rhs_spec[0]]
    return math.prod(result) * terms
