"""The pass that draws random numbers for all steps of a loop at once, before the loop.

A loop around Python environments calls a compiled function in every step. This function can spend half of its time on random
numbers: DQN's `act` takes 155 us with them and 70 us without. So everything that depends only on the keys of the steps is
computed for all steps at once, and the function in the loop reads the slice of the current step:

    128 x  act(params, obs, keys[t])        ->        noise = draw(keys);  128 x  act(params, obs, noise[t])

The numbers are the same, because Threefry gives the same numbers for a key with and without `vmap`. Draws from keys of
other generators stay in the loop.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from choreo import _compat
from choreo.partition.code import DrawCode, JoinedCode, OpsCode, RestCode, SegmentCode, as_segment
from choreo.partition.program import HostCall, Input, Loop, LoopPart, Program, Segment, Slot, Step, walk
from choreo.partition.whole_equations import Pruned

DRAWS = {"random_bits", "threefry2x32"}
"""The primitives that draw."""


def draw_ahead(program: Program) -> Program:
    """The program after this pass: if a loop calls Python, its random numbers are drawn before the loop.

    Loops inside of other loops stay unchanged.
    """
    slots = itertools.count(1 + max(_slots(program), default=0))
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Loop) and any(isinstance(inner, HostCall) for inner in step.body):
            before, step = _before_and_loop(step, slots)
            if steps and isinstance(glue := steps[-1], Segment) and not glue.roles:
                steps.pop()
                before = [glue, *before]
            for segment in before:
                _append(steps, segment)
        steps.append(step)
    return replace(program, steps=tuple(steps))


def _append(steps: list[Step], segment: Segment) -> None:
    """Append a segment. If the last step is a segment of the same group, join the two: one call in place of two."""
    last = steps[-1] if steps else None
    if isinstance(last, Segment) and last.group == segment.group and not (last.combines or segment.combines):
        steps[-1] = _both(last, segment)
    else:
        steps.append(segment)


def _both(first: Segment, then: Segment) -> Segment:
    """Two segments of a group in one call."""
    known = {given.slot for given in first.ins} | set(first.outs)
    ins = (*first.ins, *(given for given in then.ins if given.slot not in known))
    position = {slot: i for i, slot in enumerate([*(given.slot for given in ins), *first.outs])}
    reads = tuple(position[given.slot] for given in then.ins)
    code = JoinedCode(_code(first), len(first.ins), _code(then), reads)
    return as_segment(code, first.group, ins, (*first.outs, *then.outs))


def _code(segment: Segment) -> SegmentCode:
    assert isinstance(segment.fn, SegmentCode)
    return segment.fn


def _before_and_loop(loop: Loop, slots: Iterator[Slot]) -> tuple[list[Segment], Loop]:
    """The segments that draw, and the loop that reads the numbers; `slots`: unused slots."""
    before: list[Segment] = []
    body: list[Step] = []
    parts = dict(loop.parts)
    for step in loop.body:
        divided = _divide(step, parts[step.group], loop.length, slots) if isinstance(step, Segment) else None
        if divided is None:
            body.append(step)
            continue
        draws, step, drawn = divided
        part = parts[step.group]
        parts[step.group] = replace(part, xs=(*part.xs, *drawn))
        before.append(draws)
        body.append(step)
    return before, replace(loop, parts=parts, body=tuple(body))


def _divide(segment: Segment, part: LoopPart, length: int, slots: Iterator[Slot]) -> Any:
    """Return (segment that draws, segment without draws, slots of the numbers inside and outside of the loop).

    None if nothing can be drawn before the loop.
    """
    outside = dict(part.xs)
    of_keys = [given.stacked and isinstance(outside[given.slot], Slot) and _is_threefry(given) for given in segment.ins]
    if segment.combines or not any(of_keys):
        return None
    code = segment.fn
    assert isinstance(code, OpsCode), "segments in loops are never joined"
    number = jax.ShapeDtypeStruct((), jnp.int32)
    whole = jax.make_jaxpr(code)(number, number, *(given.aval for given in segment.ins))
    known, rest, types = _compat.split_known(whole, [True, True, *of_keys])
    if whole.effects or not DRAWS & set(_primitives(known)):
        return None
    is_drawn = [any(Pruned.of(known, _only(i, types)).used[2:]) for i in range(len(types))]
    drawing = DrawCode(code, Pruned.of(known, is_drawn), length)
    undrawn = Pruned.of(known, [not drawn for drawn in is_drawn])
    pairs = [(next(slots), next(slots)) for _ in drawing.out_avals]
    keys = [replace(given, slot=outside[given.slot], stacked=False)
            for given, is_key in zip(segment.ins, of_keys, strict=True) if is_key]  # fmt: skip
    kept = [given for given, is_key in zip(segment.ins, of_keys, strict=True) if not is_key]
    drawn = [
        Input(inside, True, aval, None, "drawn") for (inside, _), aval in zip(pairs, drawing.out_avals, strict=True)
    ]
    draws = as_segment(drawing, segment.group, keys, [outside for _, outside in pairs])
    after = as_segment(RestCode(code, undrawn, rest), segment.group, [*drawn, *kept], segment.outs)
    return draws, after, pairs


def _only(i: int, among: list[Any]) -> list[bool]:
    return [i == j for j in range(len(among))]


def _is_threefry(given: Input) -> bool:
    return _compat.is_key(given.aval.dtype) and _compat.is_threefry(given.aval.dtype)


def _primitives(closed: jec.ClosedJaxpr) -> Iterator[str]:
    for eqn in closed.jaxpr.eqns:
        yield eqn.primitive.name
        for inner in _compat.inner_jaxprs(eqn):
            yield from _primitives(inner)


def _slots(program: Program) -> Iterator[Slot]:
    """Every slot that is written to."""
    for port in program.ins:
        yield from (slot for slot, _ in port.held.values() if isinstance(slot, Slot))
    for step, _ in walk(program.steps):
        if isinstance(step, Loop):
            for part in step.parts.values():
                yield from (slot for slot, *_ in (*part.consts, *part.carry, *part.xs, *part.slices))
                yield from (last for *_, last in part.carry if last is not None)
                yield from (slot for _, slot, _ in part.ys)
        elif isinstance(step, Segment | HostCall):
            yield from (slot for slot in step.outs if slot is not None)
        else:
            yield from (move.dst for move in step.moves)
