"""Figures and tables of runs: learning curves, comparisons, the final table, the profile."""

import contextlib
import io
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from choreo.errors import printable
from choreo.runs.progress import first_loss, short
from choreo.runs.safe_files import write_atomic
from choreo.runtime.engine.profile import Profile

# When Matplotlib is imported, it reads `matplotlibrc` in the current folder, which may be a stranger's run folder. So it is
# imported in a different folder.
with contextlib.chdir(sys.prefix):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

LABELS = {
    "return": "return (greedy, 100 fresh episodes)",
    "train_return": "return (last 100 training episodes)",
    "env_steps": "environment steps",
    "seconds": "seconds",
    "steps_per_second": "steps per second",
    "compile_seconds": "seconds compiling",
    "params_hash": "parameters (SHA-256)",
}


def learning_curve(metrics: Mapping[str, np.ndarray], *, title: str) -> Figure:
    """A figure of the training returns, their running mean and the evaluations (if there were any), over environment steps.

    Without environment steps, the axis counts iterations. Without any return, the figure shows the first metric that has `loss`
    in its name.
    """
    # `pyplot` is not used: it keeps figures in memory, and its backend depends on the display.
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    steps, axis = steps_axis(metrics["iteration"], metrics["env_steps"])
    axes = figure.add_subplot(title=_literal(title), xlabel=axis, ylabel="episode return")
    if "train_return" in metrics:
        axes.plot(steps, metrics["episode_return"], color="C0", alpha=0.3, linewidth=1)
        axes.plot(steps, metrics["train_return"], color="C0", label="training (last 100 episodes)")
    if "eval_return" in metrics:
        due = np.isfinite(metrics["eval_return"])
        axes.plot(steps[due], metrics["eval_return"][due], "o-", color="C1", markersize=4, label="evaluation (greedy)")
    loss = first_loss(metrics)
    if not axes.lines and loss is not None:
        axes.set_ylabel(_literal(loss))
        axes.plot(steps, metrics[loss], color="C0", label="training")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(loc="best")
    return figure


def steps_axis(iterations: np.ndarray, env_steps: np.ndarray) -> tuple[np.ndarray, str]:
    """The steps at each row, and their unit: environment steps, or iterations in a run without environment steps."""
    return (env_steps, "environment steps") if env_steps[-1:].any() else (iterations + 1, "iterations")


class Curve(NamedTuple):
    """The returns of one run over steps and over time."""

    label: str
    steps: np.ndarray
    returns: np.ndarray
    """The return at each of `steps`."""
    seconds: np.ndarray
    """Seconds at each boundary."""
    returns_at_seconds: np.ndarray
    """The return at each of `seconds`."""


def comparison(curves: Sequence[Curve], *, title: str, steps: str, returns: str) -> Figure:
    """A figure with two panels: the return over steps, and the return over seconds. Each run is one line.

    `steps` and `returns` say what the axes show.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_literal(title))
    over_steps = figure.add_subplot(1, 2, 1, xlabel=steps, ylabel=returns)
    over_seconds = figure.add_subplot(1, 2, 2, xlabel="seconds, compiling included", sharey=over_steps)
    for curve in curves:
        over_steps.plot(curve.steps, curve.returns, label=_literal(curve.label))
        over_seconds.plot(
            curve.seconds, curve.returns_at_seconds, marker="o", markersize=3, label=_literal(curve.label)
        )
    over_steps.xaxis.set_major_formatter(lambda x, _: short(x))
    for axes in (over_steps, over_seconds):
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    over_steps.legend(loc="best")
    return figure


def _literal(text: str) -> str:
    """Text that Matplotlib draws unchanged: `$` is escaped, because Matplotlib reads text between two `$` as a formula."""
    return printable(text).replace("$", r"\$")


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    write_atomic(path, data.getvalue())


def summary_table(summary: Mapping[str, Any], *, title: str, folder: Path | None) -> Table:
    """The final table of a run, for a terminal."""
    # Text, not str: rich reads brackets in a str as markup.
    table = Table(title=Text(printable(title)), box=box.SIMPLE, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for name, value in summary.items():
        if name in LABELS:
            table.add_row(*_line(name, value, summary))
    if folder is not None:
        table.add_row("run folder", Text(printable(str(folder))))
    return table


def _line(name: str, value: Any, summary: Mapping[str, Any]) -> tuple[str, str]:
    """The label and the text of one number. A run without environment steps counts iterations."""
    if summary.get("env_steps") == 0 and name == "env_steps":
        return "iterations", _shown(name, summary["iterations"])
    if summary.get("env_steps") == 0 and name == "steps_per_second":
        return "iterations per second", _shown(name, value)
    return LABELS[name], _shown(name, value)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value[:16]
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if name in ("env_steps", "steps_per_second") else f"{value:,.1f}"


def profile_table(profile: Profile) -> Table:
    """A table of how each worker's time was spent, in per cent."""
    table = Table(title="where the time went", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("site")
    for kind in profile.kinds:
        table.add_column(kind, justify="right")
    for worker in profile.workers:
        shares = profile.shares(worker)
        table.add_row(worker, *(f"{shares[kind]:.0%}" if kind in shares else "" for kind in profile.kinds))
    return table
