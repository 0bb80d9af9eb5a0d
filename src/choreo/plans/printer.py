"""A plan as text, as `print(choreo.plan(...))` shows it before anything runs.

The text shows the steps of every group, in order; the values that cross, how often and how large they are; and the promise:
which level of the law (`docs/law.md`) holds. The text depends only on the plan, so a pickled plan prints the same text.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from choreo.graph.text import WIDTH, count, describe, format_bytes, table, wrap
from choreo.layouts.base import Group
from choreo.partition.program import HostCall, Loop, Segment, Step, Transfer, groups_of, walk
from choreo.plans.costs import Crossing, StepCost
from choreo.plans.flops import format_flops
from choreo.types import GroupName

if TYPE_CHECKING:
    from choreo.plans.plan import Plan
else:  # plan.py imports this module
    Plan = Any


def format_plan(plan: Plan) -> str:
    """The groups with their steps, a table of the values that cross, the promise, and warnings. Lines have at most 100 columns,
    unless a name is very long."""
    lines = [title(plan), *wrap(f"{plan.layout.name}: {plan.layout!r}", WIDTH), ""]
    for group in plan_groups(plan):
        steps = _format_steps(plan, plan.iterate.steps, group.name, "    ")
        lines += [f"{group.name}: {where(plan, group)}", *(steps or ["    nothing"]), ""]
    lines += [*_format_communication(plan), ""]
    lines += wrap(promise(plan), WIDTH)
    for warning in plan.warnings:
        lines += ["", *wrap(f"Warning: {warning}", WIDTH)]
    return "\n".join(lines)


def title(plan: Plan) -> str:
    """The first line of a plan: `PPO on jax:CartPole-v1, 16 environments, 4 learner shards`."""
    shards = f", {count(plan.shards, 'learner shard')}" if plan.shards > 1 else ""
    return f"{plan.title}, {count(plan.num_envs, 'environment')}{shards}"


def plan_groups(plan: Plan) -> list[Group]:
    """The groups that have work to do."""
    return [group for group in plan.layout.groups if group.name in plan.sites.replicas]


def where(plan: Plan, group: Group) -> str:
    """The sites of a group: `2 replicas, 4 environments each, on cpu`, or `2 replicas, 8 environments each, 2 shards each`."""
    n, size = plan.processes(group.name), plan.sites.size(group.name)
    words = ["1 site", f"all {count(plan.num_envs, 'environment')}"]
    if n == 1 and plan.num_workers > 1:
        words = ["1 site", f"{count(plan.num_envs // plan.num_workers, 'environment')} at a time"]
    elif n > 1:
        words = [f"{n} replicas", f"{count(plan.num_envs // n, 'environment')} each"]
    if group.axis:
        words = [count(n, "replica"), f"{count(plan.sites.lengths[group.axis] // n, group.axis)} each"]
    elif plan.shards > 1:
        words += [f"{count(plan.shards // n, 'shard')} each" if n > 1 else f"all {plan.shards} shards"]
    elif size and size.block != plan.num_envs // n:
        words += [f"in blocks of {size.block}"]
    return ", ".join([*words, *_devices(plan, group)])


def _devices(plan: Plan, group: Group) -> list[str]:
    """The devices of a group, and how the work is divided among them."""
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
    """`, up to 4 updates old` for values that may be out of date; else an empty text."""
    return f", up to {count(transfer.lag, 'update')} old" if transfer.lag else ""


def step_name(step: Segment | HostCall) -> str:
    """The names of the fragments in a step."""
    return f"{step.name} (Python on the host)" if isinstance(step, HostCall) else step.name.replace("+", ", ")


def step_notes(plan: Plan, step: Segment | HostCall) -> list[str]:
    """What a step needs: `all-reduce over 4 replicas` or `all-reduce over 2 devices` if replicas combine values in it, and the
    FLOPs of each replica each time. For Python on the host, no notes."""
    if isinstance(step, HostCall):
        return []
    cost = _cost_of(plan, step)
    flops = format_flops(cost.flops, at_least=cost.flops_at_least)
    if not step.combines:
        return [flops]
    devices = next(group.devices for group in plan.layout.groups if group.name == step.group)
    over = f"{devices} devices" if devices > 1 else count(plan.processes(step.group), "replica")
    return [f"all-reduce over {over}", flops]


def _cost_of(plan: Plan, step: Segment) -> StepCost:
    """The cost of a step of `iterate`. Costs are in the order of the steps."""
    computing = [each for each, _ in walk(plan.iterate.steps) if isinstance(each, Segment | HostCall)]
    return next(cost for each, cost in zip(computing, plan.costs().iterate.steps, strict=True) if each is step)


def _format_communication(plan: Plan) -> list[str]:
    start, sent = plan.costs().init, plan.costs().iterate
    at_start = f"At the start {format_bytes(start.nbytes)} cross." if start.crossings else ""
    if not sent.crossings:
        return [f"Nothing crosses. {at_start}".rstrip()]
    rows = [
        [f"{c.src} -> {c.dst}", describe(c.moves), _messages(c), format_bytes(c.message_nbytes), format_bytes(c.total_nbytes)]
        for c in sent.crossings
    ]  # fmt: skip
    sentence = f"Per iteration {count(sent.num_messages, 'message')}, {format_bytes(sent.nbytes)}. {at_start}"
    head = ["what crosses", "", "messages", "each", "per iteration"]
    return [*table(head, rows, align="<<>>>", flexible=1), sentence.rstrip()]


def _messages(crossing: Crossing) -> str:
    return f"{crossing.times} x {crossing.num_messages}" if crossing.times > 1 else f"{crossing.num_messages}"


def promise(plan: Plan) -> str:
    """The text that says which level of the law holds for this plan (`docs/law.md`)."""
    words = _relaxed(plan) if plan.layout.is_relaxed else _lockstep(plan)
    host = any(isinstance(step, HostCall) for program in (plan.init, plan.iterate) for step, _ in walk(program.steps))
    python = " Host fragments (Python) must themselves be deterministic." if host else ""
    names = ", ".join(f"`{name}`" for name in plan.trusted)
    vouched = f" It is trusted, not proved, that environments do not mix in {names}." if names else ""
    return f"Promise: {words}{python}{vouched}"


def _lockstep(plan: Plan) -> str:
    shards = f"vmap(iterate) over {plan.shards} learner shards" if plan.shards > 1 else "jax.jit(iterate)"
    if plan.layout.exact:
        return (
            "the same bits for any number of replicas (on CPU, exact=True), because the blocks in which environments are "
            f"computed do not depend on the number of replicas; up to rounding, what {shards} computes."
        )
    replicated = any(plan.processes(group.name) > 1 for group in plan_groups(plan))
    divided = any(group.devices > 1 for group in plan_groups(plan))
    if not replicated and not divided and plan.shards == 1:
        return f"bit for bit what {shards} computes (on CPU), because nothing is replicated."
    why = "replicas" if replicated else "devices" if divided else "several shards together"
    can_be = replicated and plan.shards == 1 and not plan.layout.axes
    exact = "; with exact=True, the same bits for any number of replicas" if can_be else ""
    return (
        f"what {shards} computes, up to rounding ({why} compute arrays of other shapes): to 1e-5 in float32 "
        f"over 3 iterations, and in distribution over thousands{exact}."
    )


def _relaxed(plan: Plan) -> str:
    """The promise of a layout in which sites do not wait for each other."""
    lag, relaxations = plan.layout.max_lag, []
    if lag:
        relaxations += [f"workers read values that are at most {count(lag, 'update')} old (max_lag={lag})"]
    if plan.layout.merge == "any":
        relaxations += ['the learner takes the results of each worker as they arrive (merge="any")']
    return (
        f"{', and '.join(relaxations)}. Results depend on timing. The versions that were read and "
        "the order of arrival are logged; replaying the log in one process gives the same parameters."
    )
