"""The progress of a run: one live line in a terminal; elsewhere, a line at the start and at most ten progress lines.

PPO  62%  184k steps  211k steps/s  return 318  loss 0.041  0:01 left
"""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from choreo.runs.events import BoundaryReached, Event, Metrics, RunBegan, RunEnded, WorkerOutput, WorkerStates
from choreo.runs.steps import steps_of

PLAIN_LINES = 10
"""The largest number of progress lines per run if the output is not a terminal."""


class Progress:
    """The subscriber that shows how far a run is. If `show` is False, only the output of workers is shown. No thread is started."""

    def __init__(self, *, show: bool, file: IO[str] | None = None):
        self._show = show
        self._console = Console(file=file or sys.stderr, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._title, self._total = "", 0
        self._printed, self._line = 0, ""

    def __call__(self, event: Event) -> None:
        match event:
            case RunBegan():
                self._begin(event)
            case BoundaryReached():
                self._update(event)
            case WorkerStates():
                self._show_states(event.states)
            case WorkerOutput():
                self._print(event)
            case RunEnded() if self._live is not None:
                self._live.stop()

    def _begin(self, event: RunBegan) -> None:
        self._title = self._line = event.algorithm
        self._total = event.total_steps
        if self._show and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        text = f"{self._title}: compiling ..."
        if self._live is not None:
            self._live.update(Text(text), refresh=True)
        elif self._show:
            self._console.print(text)

    def _update(self, event: BoundaryReached) -> None:
        steps = steps_of(event.row)
        line = progress_line(self._title, event.row, total_steps=self._total, steps_per_second=event.steps_per_second)
        self._line = line
        if self._live is not None:
            self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)
        elif self._show and steps * PLAIN_LINES >= (self._printed + 1) * self._total:
            self._printed = steps * PLAIN_LINES // self._total
            self._console.print(line)

    def _show_states(self, states: Mapping[str, str]) -> None:
        """Show what each worker is doing, below the progress line. Outside of a terminal, show nothing."""
        if self._live is not None:
            below = "   ".join(f"{worker}: {state}" for worker, state in states.items())
            self._live.update(Text(f"{self._line}\n{below}", overflow="ellipsis", no_wrap=True), refresh=True)

    def _print(self, event: WorkerOutput) -> None:
        """Print a line of a worker's output, even if progress is not shown."""
        console = self._live.console if self._live is not None else self._console
        console.print(Text(f"[{event.worker}] {event.line}"))


def progress_line(title: str, row: Metrics, *, total_steps: int, steps_per_second: float) -> str:
    """The text of the progress line. With a short title, the line fits into 80 columns."""
    steps, unit = steps_of(row), "steps" if row["env_steps"] else "iterations"
    parts = [
        f"{title} {100 * steps // total_steps:>3}%",
        f"{short(steps)} {unit}",
        f"{short(steps_per_second)} {unit}/s",
    ]
    loss = first_loss(row)
    for label, name in (("return", "train_return"), ("eval", "eval_return"), ("loss", loss)):
        value = row.get(name, math.nan) if name else math.nan
        if math.isfinite(value):
            parts.append(f"{label} {value:.3g}")
    if steps_per_second > 0:
        left = int((total_steps - steps) / steps_per_second)
        parts.append(f"{left // 60}:{left % 60:02} left")
    return "  ".join(parts)


def first_loss(names: Iterable[str]) -> str | None:
    """The first name with `loss` in it, or None."""
    return next((name for name in names if "loss" in name), None)


def short(number: float | int) -> str:
    """A number with three digits and a unit.

    >>> [short(n) for n in (512, 32_768, 1_250_000)]
    ['512', '32.8k', '1.25M']
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"
