"""The pass that decides donations: which results may take over the memory of an input, so that no replay buffer is copied.

A segment takes over the memory of an input if the segment is the last reader of the slot at its site, if nothing outside of the
program holds the array, and if a result has the same type. Inputs and outputs of a `Loop` are never donated, because a
slot inside the loop and a slot outside of it can hold the same array.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from choreo.partition.program import HostCall, Loop, Program, Segment, Slot, Step, Transfer
from choreo.types import GroupName


def donate(program: Program, *, num_carry: int) -> Program:
    """The program with its donations. The sites own the first `num_carry` inputs, and nothing else holds them."""
    groups = {group for port in [*program.ins, *program.outs] for group in port.held} | {
        step.group for step in program.steps if isinstance(step, Segment)
    }
    donated: dict[GroupName, set[Slot]] = {}
    steps = list(program.steps)
    for group in sorted(groups):
        live = {
            ref for port in program.outs for g, (ref, _) in port.held.items() if g == group and isinstance(ref, Slot)
        }
        never = {ref for port in program.ins[num_carry:] for g, (ref, _) in port.held.items() if g == group}
        never |= {  # a receiver that may lag reads the same version again until a newer one arrives
            move.dst for step in steps if isinstance(step, Transfer) and step.lag is not None for move in step.moves
        }
        never |= {
            slot for step in steps if isinstance(step, Loop) for slot in _read(step, group) | _written(step, group)
        }
        for i in reversed(range(len(steps))):
            step = steps[i]
            if isinstance(step, Segment) and step.group == group:
                step = steps[i] = replace(step, donated=_take_over(step, live | never))
                donated.setdefault(group, set()).update(step.ins[p].slot for p in step.donated)
            live |= _read(step, group)
    return replace(program, steps=tuple(_decide_copies(step, donated) for step in steps))


def _take_over(segment: Segment, keep: set) -> tuple[int, ...]:
    """The positions of the inputs whose memory a result can use; `keep`: slots whose memory is still needed."""
    free = Counter((aval.shape, str(aval.dtype)) for aval in segment.out_avals)
    taken = []
    for position, given in enumerate(segment.ins):
        shape_and_type = (given.aval.shape, str(given.aval.dtype))
        if not given.stacked and given.slot not in keep and free[shape_and_type] > 0:
            free[shape_and_type] -= 1
            taken.append(position)
    return tuple(taken)


def _decide_copies(step: Step, donated: dict[GroupName, set[Slot]]) -> Step:
    """Decide for each move of a transfer whether it copies. Other steps are returned unchanged.

    A move copies if the sender or the receiver donates the memory. Otherwise both share the array.
    """
    if not isinstance(step, Transfer):
        return step
    source, target = donated.get(step.src, set()), donated.get(step.dst, set())
    return replace(step, moves=tuple(replace(m, copied=m.src in source or m.dst in target) for m in step.moves))


def _read(step: Step, group: GroupName) -> set[Slot]:
    refs: Iterable = ()
    if isinstance(step, Segment) and step.group == group:
        refs = (given.slot for given in step.ins)
    elif isinstance(step, Transfer) and step.src == group:
        refs = (move.src for move in step.moves)
    elif isinstance(step, HostCall) and step.group == group:
        refs = step.ins
    elif isinstance(step, Loop) and group in step.parts:
        part = step.parts[group]
        refs = [pair[1] for pair in (*part.consts, *part.xs, *part.slices, *part.carry)]
    return {ref for ref in refs if isinstance(ref, Slot)}


def _written(step: Loop, group: GroupName) -> set[Slot]:
    if group not in step.parts:
        return set()
    part = step.parts[group]
    return {last for *_, last in part.carry if last is not None} | {slot for _, slot, _ in part.ys}
