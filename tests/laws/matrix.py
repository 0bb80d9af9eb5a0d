"""The cells of the law matrix: every algorithm of the registry in every layout of the registry.

When an algorithm or a layout is registered, its cells are added. `test_matrix.py` runs the cells, and `page` writes the table
of `docs/matrix.md`. For each cell, `kind` says what is promised: a refusal, law level 3 (1e-5), or law level 4 (a replay of the
log).
"""

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
    "updates_per_step": 2 / 32, "batch_size": 8, "capacity": 128, "min_size": 32, "buffer_shards": 2, "prioritized": True, "policy_delay": 2,
}  # fmt: skip
"""Values of fields that make an algorithm small, and switch on its optional parts. Each algorithm gets only the
fields that it has."""
CONTINUOUS = ("ddpg", "td3", "sac")
"""Algorithms for continuous actions, which run on Pendulum."""
USUAL = {"workers": 2, "learners": 2, "buffers": 2}
"""Arguments for presets. Each preset gets only the arguments that it takes."""
RELAXED = {"max_lag": {"max_lag": 2}, "merge": {"max_lag": 3, "merge": "any"}}
"""Arguments for relaxed layouts, by option. A preset that takes the option also runs with these arguments."""
NO_AGENTS = "The layout divides an axis 'agent', but no fragment is called directly under a vmap of that axis_name."
ONE_BY_ONE = 'With merge="any" the learner takes the results of one worker at a time, but `carry.replay.'
"""`NO_AGENTS` and `ONE_BY_ONE` are the beginnings of the only two messages that refuse a cell."""
PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"


@functools.cache
def algorithm(name: str) -> Any:
    """A small version of the algorithm with that name. Its network has one layer of eight units."""
    cls = ALGOS[name]
    fields = {field.name for field in dataclasses.fields(cls)}
    (network,) = [field.default for field in dataclasses.fields(cls) if field.name == "network"]
    small = {field: value for field, value in SMALL.items() if field in fields}
    return cls(**small, network=functools.partial(network, hidden=(8,)))


def environment(algo: str) -> envs.Env:
    return envs.make("jax:Pendulum-v1" if algo in CONTINUOUS else "jax:CartPole-v1", 8)


def layouts() -> dict[str, Layout]:
    """All layouts of the matrix, by title.

    Every preset runs with the arguments of `USUAL`. A preset that takes `devices` also runs on two devices. A preset also runs
    relaxed, once for each option of `RELAXED` that it takes.
    """
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
    """The beginning of the message that refuses a cell; None for a cell that runs."""
    if layout == "per_agent":
        return NO_AGENTS
    return ONE_BY_ONE if has_replay(algo) and layouts()[layout].merge == "any" else None


def has_replay(algo: str) -> bool:
    return "capacity" in {field.name for field in dataclasses.fields(ALGOS[algo])}


def kind(algo: str, layout: str) -> str:
    """What is promised for a cell, as the table shows it."""
    if refused(algo, layout):
        return "refused"
    return "replays" if layouts()[layout].is_relaxed else "1e-5"


CELLS = [(algo, layout) for algo in ALGOS for layout in layouts()]


def cells_with_workers() -> list[tuple[str, str]]:
    """The cells that `make test` also runs with workers: each algorithm at least once, and each layout except `per_agent` once.

    Algorithms with replay take longest to compile, so each of them gets only one layout: a layout whose buffer has its own
    sites, or a layout with few processes. The other algorithms take turns in the remaining layouts, beginning with the algorithm
    that has the fewest fields.
    """
    wanted = layouts()
    names = sorted(ALGOS, key=lambda algo: 0 if has_replay(algo) else len(dataclasses.fields(ALGOS[algo])))
    chosen = []
    for layout in sorted(wanted, key=lambda name: (not _own_buffers(wanted[name]), _processes(wanted[name]))):
        algo = next((algo for algo in names if not refused(algo, layout)), None)
        if algo:
            names.remove(algo)
            if not has_replay(algo):
                names.append(algo)  # back to the end of the queue
            chosen.append((algo, layout))
    return chosen


def _own_buffers(layout: Layout) -> bool:
    return any(group.roles == ("buffer",) for group in layout.groups)


def _processes(layout: Layout) -> int:
    return sum(group.replicas or 1 for group in layout.groups)


def page(passed: set[tuple[str, str]]) -> str:
    """The text of `docs/matrix.md`; a cell that did not pass is shown as "failed"."""
    names = list(layouts())
    rows = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for algo in ALGOS:
        cells = [kind(algo, layout) if (algo, layout) in passed else "failed" for layout in names]
        rows.append(f"| {algo} | {' | '.join(cells)} |")
    return TEXT.format(table="\n".join(rows), agents=NO_AGENTS, one_by_one=ONE_BY_ONE.rstrip("."))


TEXT = """\
# The law, cell by cell

The tests (`tests/laws/test_matrix.py`) write this page. They try every algorithm in every layout, in one process. The
table shows what they find. Each algorithm, and each layout but `per_agent`, also runs at least once with worker processes.

{table}

- `1e-5`: after three iterations, the results differ from those of `jax.jit(iterate)` by at most 1e-5, in float32 and with the
  algorithm's own optimiser ([law.md](law.md), level 3).
- `replays`: a relaxed layout. No worker read a version older than allowed, and the log replays bit for bit (level 4).
- `refused`: the layout cannot run this algorithm, and the error gives the reason.

The two reasons:

- `per_agent`: {agents}
- replay under `merge="any"`: {one_by_one}` has the environments of all workers.
"""
