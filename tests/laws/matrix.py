"""Every algorithm x every layout, from the registries: what joins them joins the law. `docs/matrix.md` is made of this."""

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from choreo import envs
from choreo.algos import ALGOS
from choreo.layouts import PRESETS, Layout

SMALL = {
    "unroll": 4, "epochs": 2, "minibatch_size": 4,
    "updates": 2, "batch_size": 8, "capacity": 128, "min_size": 32, "buffer_shards": 2, "prioritized": True, "policy_delay": 2,
}  # fmt: skip
"""What makes an algorithm small and whole, where it has such a field; its network gets one layer of eight units."""
CONTINUOUS = ("ddpg", "td3", "sac")
USUAL = {"workers": 2, "learners": 2, "buffers": 2}
RELAXED = {"max_lag": {"max_lag": 2}, "merge": {"max_lag": 3, "merge": "any"}}
NO_AGENTS = "The layout divides an axis 'agent', but no fragment is called under a vmap of that axis_name."
ONE_BY_ONE = 'With merge="any" the learner takes the results of one worker at a time, but `carry.replay.'
PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"


@functools.cache
def algorithm(name: str) -> Any:
    cls = ALGOS[name]
    fields = {field.name for field in dataclasses.fields(cls)}
    (network,) = [field.default for field in dataclasses.fields(cls) if field.name == "network"]
    small = {field: value for field, value in SMALL.items() if field in fields}
    return cls(**small, network=functools.partial(network, hidden=(8,)))


def environment(algo: str) -> envs.Env:
    return envs.make("jax:Pendulum-v1" if algo in CONTINUOUS else "jax:CartPole-v1", 8)


def layouts() -> dict[str, Layout]:
    """Each preset with its usual arguments, on devices, and with each relaxation that it takes."""
    return {title: PRESETS[name](**arguments) for name in PRESETS for title, arguments in _variants(name)}


def _variants(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    takes = inspect.signature(PRESETS[name]).parameters
    usual = {option: value for option, value in USUAL.items() if option in takes}
    yield name, usual
    if "devices" in takes:
        yield f"{name}, 2 devices", usual | {"devices": 2}
    for option, arguments in RELAXED.items():
        if option in takes:
            yield f"{name}, {'any' if option == 'merge' else 'lag'}", usual | arguments


def refused(algo: str, layout: str) -> str | None:
    """How a cell that cannot exist is refused."""
    if layout == "per_agent":
        return NO_AGENTS
    return ONE_BY_ONE if has_replay(algo) and layouts()[layout].merge == "any" else None


def has_replay(algo: str) -> bool:
    return "capacity" in {field.name for field in dataclasses.fields(ALGOS[algo])}


def kind(algo: str, layout: str) -> str:
    """What is promised for a cell."""
    if refused(algo, layout):
        return "refused"
    return "by its log" if layouts()[layout].is_relaxed else "1e-5"


CELLS = [(algo, layout) for algo in ALGOS for layout in layouts()]


def pairs() -> list[tuple[str, str]]:
    """Each algorithm and each layout that exists at least once.

    Each algorithm with replay is met once, where replay has sites of its own or where there are fewest processes: it takes
    longest to compile. The others share the rest, the simplest where there are most.
    """
    wanted = layouts()
    names = sorted(ALGOS, key=lambda algo: 0 if has_replay(algo) else len(dataclasses.fields(ALGOS[algo])))
    found = []
    for layout in sorted(wanted, key=lambda name: (not _own_buffers(wanted[name]), _processes(wanted[name]))):
        algo = next((algo for algo in names if not refused(algo, layout)), None)
        if algo:
            names.remove(algo)
            if not has_replay(algo):
                names.append(algo)  # after the others have had their turn
            found.append((algo, layout))
    return found


def _own_buffers(layout: Layout) -> bool:
    return any(group.roles == ("buffer",) for group in layout.groups)


def _processes(layout: Layout) -> int:
    return sum(group.replicas or 1 for group in layout.groups)


def page(passed: set[tuple[str, str]]) -> str:
    """The matrix as a page of the docs; a cell that did not pass is left out."""
    names = list(layouts())
    rows = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for algo in ALGOS:
        cells = [kind(algo, layout) if (algo, layout) in passed else "failed" for layout in names]
        rows.append(f"| {algo} | {' | '.join(cells)} |")
    return TEXT.format(table="\n".join(rows), agents=NO_AGENTS, one_by_one=ONE_BY_ONE.rstrip("."))


TEXT = """\
# The law, cell by cell

Written by the tests (`tests/laws/test_matrix.py`), from the registries of algorithms and layouts: every algorithm in every
layout, run in one process and compared with `jax.jit(iterate)`; each algorithm and each layout also with worker processes.

{table}

- `1e-5`: equal to the reference after three iterations, in float32 with the real optimiser ([law.md](law.md), level 3).
- `by its log`: a relaxed layout. Nothing it read was older than allowed, and its log, replayed, gives the same bits (level 4).
- `refused`: the cell cannot exist, and is refused with a reason.

- `per_agent`: {agents}
- replay under `merge="any"`: {one_by_one}`, which the learner keeps, has the environments of all workers.
"""
