"""Format counts, sizes, types, names of values, and tables as text. Printed graphs, plans and pictures use these functions."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from choreo import _compat

WIDTH = 100
"""The width of a printed graph or plan, in characters."""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_bytes(number: int) -> str:
    if number < 1000:
        return f"{number} B"
    size, units = number / 1000, iter(("kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 999.5:
        size, unit = size / 1000, next(units)
    return f"{size:.3g} {unit}"


def format_type(aval: Any) -> str:
    """A type as JAX prints it: `f32[8,4]`."""
    kind = "key" if _compat.is_key(aval.dtype) else re.sub(r"^(b?)([fiuc])[a-z]*(?=\d)", r"\1\2", str(aval.dtype))
    return f"{kind}[{','.join(map(str, aval.shape))}]"


def describe(values: Iterable[Any]) -> str:
    """Names and types of values. A value is any object with `label` and `aval`. Three or more leaves of one tree are shown as
    their common path."""
    named: dict[str, list[tuple[str, Any]]] = {}
    for value in values:
        named.setdefault(_root(value.label), []).append((value.label, value.aval))
    return ", ".join(_describe_tree(leaves) for leaves in named.values()) or "nothing"


def _describe_tree(leaves: list[tuple[str, Any]]) -> str:
    labels = [label for label, _ in leaves]
    if not labels[0]:
        counted = Counter(format_type(aval) for _, aval in leaves)
        return ", ".join(f"{n}×{kind}" if n > 1 else kind for kind, n in counted.items())
    if len(leaves) <= 2:
        return ", ".join(f"{label} {format_type(aval)}" if aval.shape else label for label, aval in leaves)
    kinds = dict.fromkeys(format_type(aval).split("[")[0] for _, aval in leaves)
    return f"{_common_path(labels)} ({len(leaves)} arrays, {'/'.join(kinds)})"


def _common_path(labels: Sequence[str]) -> str:
    return "".join(os.path.commonprefix([_parts(label) for label in labels]))


def _root(label: str) -> str:
    return _parts(label)[0] if label else ""


def _parts(label: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]|\.?[^.\[]+", label)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, align: str, flexible: int) -> list[str]:
    """The lines of a table. If the table would be wider than `WIDTH`, column number `flexible` is wrapped.

    `align` has one character for each column: "<" for left, ">" for right.
    """
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    rest = sum(widths) - widths[flexible] + 2 * (len(head) - 1)
    widths[flexible] = min(widths[flexible], max(WIDTH - rest, 20))
    lines = []
    for row in (head, *rows):
        first, *more = wrap(row[flexible], widths[flexible])
        cells = [*row[:flexible], first, *row[flexible + 1 :]]
        lines.append("  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(cells, align, widths, strict=True)).rstrip())
        margin = " " * (sum(widths[:flexible]) + 2 * flexible + 2)
        lines += [margin + line for line in more]
    return [lines[0], "─" * (sum(widths) + 2 * (len(head) - 1)), *lines[1:]]


def wrap(text: str, width: int) -> list[str]:
    """Break a text into lines of whole words. All lines except the first are shorter by two, so that the caller can indent them."""
    lines = [""]
    for word in text.split(" "):
        room = width if len(lines) == 1 else width - 2
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if len(joined) <= room:
            lines[-1] = joined
        else:
            lines.append(word)
    return [shorten(line, width) for line in lines if line] or [""]


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
