"""A plan as text: what `print(choreo.plan(...))` shows before anything runs.

Who computes what, in order; what crosses, how often and how large; and what may be relied on. Reads nothing but the
plan, so that a plan that came by pickle prints the same.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from choreo import _compat
from choreo.graph.edges import is_path
from choreo.graph.printer import WIDTH, count, describe, format_bytes, table, wrap
from choreo.layouts.base import Group
from choreo.partition.program import HostCall, Loop, Move, Program, Ref, Segment, Slot, Step, Transfer, groups_of, walk
from choreo.types import GroupName

if TYPE_CHECKING:
    from choreo.plans.plan import Plan
else:  # plan.py imports this module
    Plan = Any


def format_plan(plan: Plan) -> str:
    """Sites, fragments, what crosses, bytes, the promise, warnings; at most 100 columns."""
    lines = [title(plan), *wrap(f"{plan.layout.name}: {plan.layout!r}", WIDTH), ""]
    for group in plan_groups(plan):
        steps = _format_steps(plan, plan.iterate.steps, group.name, "    ")
        lines += [f"{group.name}: {where(plan, group)}", *(steps or ["    nothing"]), ""]
    lines += [*_format_crossings(plan), ""]
    lines += wrap(promise(plan), WIDTH)
    for warning in plan.warnings:
        lines += ["", *wrap(f"Warning: {warning}", WIDTH)]
    return "\n".join(lines)


def title(plan: Plan) -> str:
    """`PPO on jax:CartPole-v1, 16 environments, 4 learner shards`"""
    shards = f", {count(plan.shards, 'learner shard')}" if plan.shards > 1 else ""
    return f"{plan.title}, {count(plan.num_envs, 'environment')}{shards}"


def plan_groups(plan: Plan) -> list[Group]:
    """The groups that have something to do."""
    return [group for group in plan.layout.groups if group.name in plan.sites.replicas]


def num_replicas(plan: Plan, group: GroupName) -> int:
    """How many sites the layout asks for. With `exact` there may be more blocks than that: several share a site."""
    found = next(g for g in plan.layout.groups if g.name == group)
    return found.replicas or (plan.replicas(group) if found.axis else 1)


def where(plan: Plan, group: Group) -> str:
    """`2 replicas, 4 environments each, on cpu`, or with shards `2 replicas, 8 environments each, 2 shards each`"""
    n, size = num_replicas(plan, group.name), plan.sites.size(group.name)
    words = ["1 site", f"all {count(plan.num_envs, 'environment')}"]
    if n == 1 and plan.num_workers > 1:
        words = ["1 site", f"{count(plan.num_envs // plan.num_workers, 'environment')} at a time"]
    elif n > 1:
        words = [f"{n} replicas", f"{count(plan.num_envs // n, 'environment')} each"]
    if group.axis:
        words = [count(n, "replica"), f"{count(plan.sites.along_axis // n, group.axis)} each"]
    elif plan.shards > 1:
        words += [f"{count(plan.shards // n, 'shard')} each" if n > 1 else f"all {plan.shards} shards"]
    elif size and size.block != plan.num_envs // n:
        words += [f"in blocks of {size.block}"]
    return ", ".join([*words, *_devices(plan, group)])


def _devices(plan: Plan, group: Group) -> list[str]:
    """On what a group computes, and how that is divided among several devices."""
    if group.devices == 1:
        return [f"on {group.device}"] if group.device else []
    shared = f"{count(plan.shards // group.devices, 'shard')} on each" if plan.shards > 1 else "divided by the compiler"
    return [f"on {group.devices} {group.device + ' ' if group.device else ''}devices", shared]


def _format_steps(plan: Plan, steps: Iterable[Step], group: GroupName, indent: str) -> list[str]:
    lines: list[str] = []
    for step in steps:
        if group not in groups_of(step):
            continue
        if isinstance(step, Loop):
            inner = _format_steps(plan, step.body, group, indent + "│   ")
            lines += [f"{indent}{step.length} x", *inner] if inner else []
        elif isinstance(step, Transfer):
            sends = step.src == group
            lines.append(indent + (f"send to {step.dst}" if sends else f"receive from {step.src}{age(step)}"))
        else:
            lines.append(indent + ", ".join([step_name(step), *step_notes(plan, step)]))
    return lines


def age(transfer: Transfer) -> str:
    """`, up to 4 updates old`, if what crosses may be out of date."""
    return f", up to {count(transfer.lag, 'update')} old" if transfer.lag else ""


def step_name(step: Segment | HostCall) -> str:
    """The fragments in a step."""
    return f"{step.name} (Python on the host)" if isinstance(step, HostCall) else step.name.replace("+", ", ")


def step_notes(plan: Plan, step: Segment | HostCall) -> list[str]:
    """`all-reduce over 4 replicas`, or `2 devices`, if values are combined while it runs."""
    if isinstance(step, HostCall) or not step.combines:
        return []
    devices = next(group.devices for group in plan.layout.groups if group.name == step.group)
    over = f"{devices} devices" if devices > 1 else count(num_replicas(plan, step.group), "replica")
    return [f"all-reduce over {over}"]


@dataclass(frozen=True)
class Crossing:
    """One transfer, as it is spoken of."""

    src: GroupName
    dst: GroupName
    what: str
    times: int
    """How often per iteration."""
    num_messages: int
    """Each time: one for every pair of sites that have something for each other."""
    nbytes: int
    """Each time, over all messages."""


def crossings(plan: Plan, program: Program) -> Iterator[Crossing]:
    """Every transfer of a program, in order."""
    names = slot_names(program)
    # With merge="any", `iterate` is the program of one worker and of who learns from it, and there are several.
    num_workers = plan.num_workers if program is plan.iterate else 1
    for step, times in walk(program.steps):
        if isinstance(step, Transfer):
            senders, receivers = (1 if num_workers > 1 else num_replicas(plan, group) for group in (step.src, step.dst))
            pairs = {pair for move in step.moves for pair in _pairs(move, senders, receivers)}
            nbytes = sum(_nbytes(move.aval) * (receivers if move.dst_axis is None else 1) for move in step.moves)
            what = describe(_Named(names.get(move.src) or _own(move.label), move) for move in step.moves)
            yield Crossing(step.src, step.dst, what, times, len(pairs) * num_workers, nbytes * num_workers)


def _pairs(move: Move, senders: int, receivers: int) -> Iterator[tuple[int, int]]:
    """Which sender has something for which receiver: both hold contiguous blocks."""
    have, want = move.src_axis if senders > 1 else None, move.dst_axis if receivers > 1 else None
    for r in range(receivers):
        for s in range(senders):
            overlap = s * receivers < (r + 1) * senders and r * senders < (s + 1) * receivers
            own = s == r * senders // receivers  # what all senders hold, each sends to receivers of its own
            if own if have is None else overlap or have != want:
                yield s, r


def _nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * (8 if _compat.is_key(aval.dtype) else aval.dtype.itemsize)


@dataclass(frozen=True)
class _Named:
    label: str
    value: Any
    """Has an aval."""


def _own(label: str) -> str:
    return label if is_path(label) else ""


def slot_names(program: Program) -> dict[Slot, str]:
    """Slots by the user's names for what they hold: leaves of the carry and metrics, also inside of loops."""
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


def _format_crossings(plan: Plan) -> list[str]:
    found, first = list(crossings(plan, plan.iterate)), list(crossings(plan, plan.init))
    at_start = f"At the start {format_bytes(sum(c.nbytes * c.times for c in first))} cross." if first else ""
    if not found:
        return [f"Nothing crosses. {at_start}".rstrip()]
    rows = [
        [f"{c.src} -> {c.dst}", c.what, _messages(c), format_bytes(-(-c.nbytes // c.num_messages)),
         format_bytes(c.nbytes * c.times)] for c in found
    ]  # fmt: skip
    total = sum(c.nbytes * c.times for c in found)
    messages = sum(c.times * c.num_messages for c in found)
    sentence = f"Per iteration {count(messages, 'message')}, {format_bytes(total)}. {at_start}"
    head = ["what crosses", "", "messages", "each", "per iteration"]
    return [*table(head, rows, align="<<>>>", flexible=1), sentence.rstrip()]


def _messages(crossing: Crossing) -> str:
    return f"{crossing.times} x {crossing.num_messages}" if crossing.times > 1 else f"{crossing.num_messages}"


def promise(plan: Plan) -> str:
    """Which level of the law holds."""
    words = _relaxed(plan) if plan.layout.is_relaxed else _lockstep(plan)
    host = any(isinstance(step, HostCall) for program in (plan.init, plan.iterate) for step, _ in walk(program.steps))
    python = " Python fragments must themselves give the same results again." if host else ""
    names = ", ".join(f"`{name}`" for name in plan.trusted)
    vouched = f" That environments do not meet in a fragment is trusted, not proved: {names}." if names else ""
    return f"Promise: {words}{python}{vouched}"


def _lockstep(plan: Plan) -> str:
    shards = f"vmap(iterate) over {plan.shards} learner shards" if plan.shards > 1 else "jax.jit(iterate)"
    if plan.layout.exact:
        return (
            f"bit for bit what {shards} computes (on CPU), for any number of replicas (exact=True): "
            "the blocks in which environments are computed do not depend on it."
        )
    replicated = any(num_replicas(plan, group.name) > 1 for group in plan_groups(plan))
    divided = any(group.devices > 1 for group in plan_groups(plan))
    if not replicated and not divided and plan.shards == 1:
        return f"bit for bit what {shards} computes (on CPU), since nothing is replicated."
    why = "replicas" if replicated else "devices" if divided else "shards computed together"
    can_be = replicated and plan.shards == 1 and plan.layout.axis is None
    exact = "; exact=True makes it bit for bit" if can_be else ""
    return (
        f"what {shards} computes, up to rounding ({why} have other shapes): 1e-5 in float32 "
        f"over 3 iterations, equal in distribution over thousands{exact}."
    )


def _relaxed(plan: Plan) -> str:
    """What remains where sites do not wait for each other."""
    lag, apart = plan.layout.max_lag, []
    if lag:
        apart += [f"what a worker reads is at most {count(lag, 'update')} old (max_lag={lag})"]
    if plan.layout.merge == "any":
        apart += ['whoever learns takes each worker\'s part as it arrives (merge="any")']
    return (
        f"{', and '.join(apart)}. Results depend on who was faster; versions read and order of arrival are logged, and "
        "replayed in one process the log gives the same parameters."
    )
