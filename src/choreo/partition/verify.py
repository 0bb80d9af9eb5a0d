"""Check the rules of a program. The main rule: in the global order, no site reads a slot before the slot is written."""

from choreo.partition.program import Constant, HostCall, Loop, Program, Ref, Segment, Slot, Step, Transfer
from choreo.types import GroupName

Held = dict[GroupName, set[Slot]]
"""The slots that have been written, at each group."""


def verify_program(program: Program) -> Program:
    """Return the program, or raise an AssertionError that names the broken rule: a bug in Choreo, not in the user's code."""
    held: Held = {}
    for port in program.ins:
        for group, (ref, _) in port.held.items():
            _define(held, group, ref)
    _verify_steps(program.steps, held, f"`{program.name}`")
    for port in program.outs:
        assert port.held, f"`{program.name}`: no group holds the output `{port.name}`"
        for group, (ref, _) in port.held.items():
            _check(held, group, ref, f"output `{port.name}` of `{program.name}`")
    return program


def _verify_steps(steps: tuple[Step, ...], held: Held, where: str) -> None:
    for step in steps:
        if isinstance(step, Segment):
            for given in step.ins:
                _check(
                    held, step.group, given.slot, f"{where}, segment `{step.name}` of `{step.group}` ({given.label})"
                )
            for slot in step.outs:
                _define(held, step.group, slot)
        elif isinstance(step, Transfer):
            assert step.src != step.dst, f"{where}: `{step.src}` sends to itself"
            for move in step.moves:
                _check(held, step.src, move.src, f"{where}, transfer {step.src} -> {step.dst} of {move.label}")
                _define(held, step.dst, move.dst)
        elif isinstance(step, HostCall):
            for ref in step.ins:
                _check(held, step.group, ref, f"{where}, host call `{step.name}`")
            for slot in step.outs:
                if slot is not None:
                    _define(held, step.group, slot)
        else:
            _verify_loop(step, held, where)


def _verify_loop(loop: Loop, held: Held, where: str) -> None:
    inside: Held = {}
    for group, part in loop.parts.items():
        for slot, ref, *_ in (*part.consts, *part.carry, *part.xs, *part.slices):
            _check(held, group, ref, f"{where}, input of a loop at `{group}`")
            _define(inside, group, slot)
    _verify_steps(loop.body, inside, f"{where}, loop")
    for group, part in loop.parts.items():
        for _, _, after, last in part.carry:
            _check(inside, group, after, f"{where}, carry of a loop at `{group}`")
            if last is not None:
                _define(held, group, last)
        for ref, slot, _ in part.ys:
            _check(inside, group, ref, f"{where}, stacked result of a loop at `{group}`")
            _define(held, group, slot)


def _define(held: Held, group: GroupName, ref: Ref) -> None:
    assert isinstance(ref, Slot)
    held.setdefault(group, set()).add(ref)


def _check(held: Held, group: GroupName, ref: Ref, where: str) -> None:
    assert isinstance(ref, Constant) or ref in held.get(group, set()), (
        f"{where}: slot {ref} is read before it is written"
    )
