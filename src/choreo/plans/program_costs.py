"""Reads the costs of a program from its steps, that is, from what the interpreter evaluates (`partition/code.py`).

A segment is traced as a replica evaluates it. So the FLOPs are those of a replica's block of environments.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import jax.extend.core as jec
import numpy as np

from choreo import _compat
from choreo.graph.edges import is_path
from choreo.graph.ir import nbytes_of
from choreo.partition.program import HostCall, Loop, Move, Program, Ref, Segment, Slot, Transfer, walk
from choreo.partition.reduce import REPLICA_AXIS
from choreo.plans.costs import Crossing, ProgramCosts, StepCost
from choreo.plans.export import array_type
from choreo.plans.flops import count_flops, largest_product
from choreo.plans.step_times import step_numbers
from choreo.types import GroupName


@dataclass(frozen=True, kw_only=True)
class GroupSites:
    """How many sites of one group run a program."""

    processes: int
    """How many processes the group has."""
    replicas: int
    """How many replicas the group has; a process runs an equal number of them."""
    rounds: int = 1
    """With merge="any": how often the group runs its steps in one iteration. The learner runs them once for each worker."""

    @property
    def blocks(self) -> int:
        """How many replicas run in each process."""
        return self.replicas // self.processes


def program_costs(program: Program, sites: Mapping[GroupName, GroupSites], *, num_workers: int = 1) -> ProgramCosts:
    """The costs of a program.

    With merge="any", `num_workers` is the number of workers, and `program` is the program of the learner and of one worker. This
    program runs once for each worker.
    """
    numbers, names = step_numbers(program), _slot_names(program)
    processes = {group: own.processes if num_workers == 1 else 1 for group, own in sites.items()}
    steps: list[StepCost] = []
    crossings: list[Crossing] = []
    for step, times in walk(program.steps):
        if isinstance(step, Segment):
            steps.append(_segment(step, numbers[id(step), step.group], times, sites[step.group]))
        elif isinstance(step, HostCall):
            steps.append(_host_call(step, numbers[id(step), step.group], times, sites[step.group]))
        elif isinstance(step, Transfer):
            ends = numbers[id(step), step.src], numbers[id(step), step.dst]
            crossings.append(_crossing(step, ends, times, names, processes, num_workers))
    return ProgramCosts(name=program.name, steps=tuple(steps), crossings=tuple(crossings))


def segment_jaxpr(segment: Segment, replicas: int) -> jec.Jaxpr:
    """What one replica of a segment evaluates, without equations that no result needs: XLA removes these too.

    `replicas`: how many replicas the segment's group has.
    """
    scalar = jax.ShapeDtypeStruct((), np.int32)
    axes = [(REPLICA_AXIS, replicas)] if segment.combines else None
    closed = jax.make_jaxpr(segment.fn, axis_env=axes)(scalar, scalar, *(given.aval for given in segment.ins))
    needed, _ = _compat.prune(closed, [True] * len(closed.jaxpr.outvars))
    return needed.jaxpr


def _segment(step: Segment, number: int, times: int, sites: GroupSites) -> StepCost:
    jaxpr, blocks = segment_jaxpr(step, sites.replicas), sites.blocks
    flops = count_flops(jaxpr).times(blocks)
    read = [nbytes_of(given.aval) // (max(given.aval.shape[0], 1) if given.stacked else 1) for given in step.ins]
    return StepCost(
        group=step.group,
        name=step.name,
        roles=step.roles,
        on_host=False,
        number=number,
        replicas=sites.processes,
        blocks=blocks,
        times=times * sites.rounds,
        flops=flops.number,
        flops_at_least=flops.at_least,
        largest_product=largest_product(jaxpr),
        input_nbytes=blocks * sum(read),
        output_nbytes=blocks * sum(nbytes_of(aval) for aval in step.out_avals),
    )


def _host_call(step: HostCall, number: int, times: int, sites: GroupSites) -> StepCost:
    return StepCost(
        group=step.group,
        name=step.name,
        roles=(),
        on_host=True,
        number=number,
        replicas=sites.processes,
        blocks=sites.blocks,
        times=times * sites.rounds,
        flops=None,
        flops_at_least=False,
        largest_product=0,
        input_nbytes=None,
        output_nbytes=None,
    )


def _crossing(
    transfer: Transfer,
    numbers: tuple[int, int],
    times: int,
    names: Mapping[Slot, str],
    processes: Mapping[GroupName, int],
    num_workers: int,
) -> Crossing:
    senders, receivers = processes[transfer.src], processes[transfer.dst]
    pairs = {pair for move in transfer.moves for pair in _pairs(move, senders, receivers)}
    nbytes = sum(nbytes_of(move.aval) * (receivers if move.dst_axis is None else 1) for move in transfer.moves)
    return Crossing(
        src=transfer.src,
        dst=transfer.dst,
        src_number=numbers[0],
        dst_number=numbers[1],
        moves=tuple(
            replace(move, label=names.get(move.src) or _user_label(move), aval=array_type(move.aval))
            for move in transfer.moves
        ),
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
    """The user's names for values in slots. Leaves of the carry and metrics have names, and so have the slots in which a loop
    holds them."""
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
