"""Every algorithm x every layout, from the registries: what joins them joins the law. `docs/matrix.md` is made of this."""

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from choreo import networks
from choreo.algos import ALGOS
from choreo.layouts import PRESETS, Layout

SMALL = {"unroll": 4, "epochs": 2, "minibatch_size": 4, "network": functools.partial(networks.mlp, hidden=(8,))}
"""What makes an algorithm small, where it has such a field."""
USUAL = {"workers": 2, "learners": 2}
RELAXED = {"max_lag": {"max_lag": 2}, "merge": {"max_lag": 3, "merge": "any"}}
REFUSED = {
    "per_agent": "The layout divides an axis 'agent', and no fragment is called under a vmap of that name.",
}
"""Layouts that these algorithms cannot have, and how that is said."""
PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"


def algorithm(name: str) -> Any:
    cls = ALGOS[name]
    fields = {field.name for field in dataclasses.fields(cls)}
    return cls(**{field: value for field, value in SMALL.items() if field in fields})


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


def kind(layout: str) -> str:
    """What is promised for the cells of a layout."""
    if layout in REFUSED:
        return "refused"
    return "by its log" if layouts()[layout].is_relaxed else "1e-5"


CELLS = [(algo, layout) for algo in ALGOS for layout in layouts()]


def pairs() -> list[tuple[str, str]]:
    """Each algorithm and each layout that exists at least once."""
    possible = [layout for layout in layouts() if layout not in REFUSED]
    names = list(ALGOS)
    return [(names[i % len(names)], layout) for i, layout in enumerate(possible)]


def page(passed: set[tuple[str, str]]) -> str:
    """The matrix as a page of the docs; a cell that did not pass is left out."""
    names = list(layouts())
    rows = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for algo in ALGOS:
        cells = [kind(layout) if (algo, layout) in passed else "failed" for layout in names]
        rows.append(f"| {algo} | {' | '.join(cells)} |")
    return TEXT.format(table="\n".join(rows), refusals="\n".join(f"- `{name}`: {why}" for name, why in REFUSED.items()))


TEXT = """\
# The law, cell by cell

Written by the tests (`tests/laws/test_matrix.py`), from the registries of algorithms and layouts: every algorithm in every
layout, run in one process and compared with `jax.jit(iterate)`; each algorithm and each layout also with worker processes.

{table}

- `1e-5`: equal to the reference after three iterations, in float32 with the real optimiser ([law.md](law.md), level 3).
- `by its log`: a relaxed layout. Nothing it read was older than allowed, and its log, replayed, gives the same bits (level 4).
- `refused`: the cell cannot exist, and is refused with a reason.

{refusals}
"""
