"""Compare runs: return over steps and over time, speed-up, final return.

Everything is read from `run.toml`, `metrics.jsonl` and `summary.json`: no algorithm or environment is made. An unfinished
run is compared up to its last row of metrics. The return of a run is the mean over its last 100 or more training episodes. If none
of the runs measured training episodes, the return is that of the last evaluation. Steps are environment steps, or iterations in a
run that takes no environment steps.

Time is counted from the call of `train`, compiling included, and is known at boundaries only. Speed-ups are relative to the
first run.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from choreo.errors import RunError, printable
from choreo.runs import figures
from choreo.runs.episode_returns import EPISODES_PER_RETURN
from choreo.runs.folder import Row, RunFolder

POINTS = (0.25, 0.5, 0.75, 1.0)
"""Points at which returns are compared, as fractions of the steps, or of the seconds, that every run has reached."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """The data in the folder of one run."""

    path: Path
    config: Mapping[str, Any]
    """The content of run.toml."""
    rows: list[Row]
    """The metrics so far."""
    summary: Mapping[str, Any]
    """The content of summary.json; empty if the run never finished."""
    measure: str = "train_return"
    """The metric that counts as the return: `train_return` or `eval_return`."""

    @classmethod
    def read(cls, path: str | Path) -> "Record":
        folder = RunFolder(path)
        config, rows = folder.read_config(), folder.read_metrics()
        if not rows:
            raise RunError(
                f"{path} has no metrics yet.",
                fix="Wait until the run has reached its first boundary, or leave out this run.",
            )
        return cls(path=folder.path, config=config, rows=rows, summary=folder.read_summary())

    @property
    def algorithm(self) -> str:
        return _name(_table(self.config, "algorithm"))

    @property
    def environment(self) -> str:
        """The name of the environment with its arguments: returns under different arguments cannot be compared."""
        described = _table(self.config, "environment")
        kwargs = ", ".join(f"{name}={value}" for name, value in _table(described, "kwargs").items())
        return _name(described) + (f" ({kwargs})" if kwargs else "")

    @property
    def layout(self) -> str:
        """The name of the layout, with the numbers of replicas: `coarse x2`."""
        fields = _table(_table(self.config, "layout"), "fields")
        groups = _table(fields, "groups").get("tuple")
        found = groups if isinstance(groups, list) else []
        replicas = [_table(group, "fields").get("replicas") for group in found if isinstance(group, dict)]
        return " ".join([str(fields.get("name", "?")), *(f"x{n}" for n in replicas if isinstance(n, int))])

    @property
    def is_finished(self) -> bool:
        """Whether the summary covers all rows. It does not if the run was later resumed, and then interrupted."""
        return self.summary.get("iterations") == len(self.rows)

    @cached_property
    def env_steps(self) -> np.ndarray:
        return self._column("env_steps")

    @cached_property
    def steps(self) -> np.ndarray:
        """Steps at each row: environment steps, or iterations in a run without environment steps."""
        return figures.steps_axis(self._column("iteration"), self.env_steps)[0]

    @property
    def unit(self) -> str:
        """What the steps count."""
        return figures.steps_axis(self._column("iteration"), self.env_steps)[1]

    @cached_property
    def returns(self) -> np.ndarray:
        """The return at each row. If evaluations measure the return, a row between two evaluations has the earlier return."""
        measured = self._column(self.measure)
        if self.measure == "train_return":
            return measured
        newest = np.maximum.accumulate(np.where(np.isfinite(measured), np.arange(len(measured)), 0))
        return measured[newest]

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds since the start, at each row.

        If the stored number is smaller than in the row before, the run's clock had started again from 0. Then the time of the row
        before is added to this row and to all later rows.
        """
        seconds = self._column("seconds")
        before = np.where(np.diff(seconds) < 0, seconds[:-1], 0.0)
        return seconds + np.append(0.0, np.cumsum(before))

    @cached_property
    def boundaries(self) -> np.ndarray:
        """The indices of the rows at boundaries. All other rows have the time of the next boundary."""
        return np.flatnonzero(np.append(np.diff(self.seconds) != 0, True))

    @property
    def steps_per_second(self) -> float:
        """Steps per second.

        For a finished run, this is without the time for compiling and evaluating. For an unfinished run, it is measured from
        the first boundary on.
        """
        measured = self.summary.get("steps_per_second")
        if self.is_finished and measured and isinstance(measured, int | float):
            return float(measured)
        if len(self.boundaries) < 2:
            return math.nan
        first, last = self.boundaries[0], self.boundaries[-1]
        return float((self.steps[last] - self.steps[first]) / (self.seconds[last] - self.seconds[first]))

    @property
    def final_return(self) -> float:
        return float(self.returns[-1])

    @property
    def episodes(self) -> int:
        """The number of training episodes in the mean `final_return`; 0 if the run did not measure them."""
        counted = 0
        for count in self._column("episodes")[::-1]:
            if counted >= EPISODES_PER_RETURN:
                break
            counted += int(np.nan_to_num(count))
        return counted

    @property
    def evaluation(self) -> float:
        """The return of the last greedy evaluation; NaN if there was none."""
        measured = self._column("eval_return")
        measured = measured[np.isfinite(measured)]
        return float(measured[-1]) if len(measured) else math.nan

    @property
    def best_return(self) -> float:
        returns = self._reliable_returns
        return float(np.nanmax(returns)) if np.isfinite(returns).any() else math.nan

    def return_at(self, *, steps: float | None = None, seconds: float | None = None) -> float:
        """The return at the last row within the given steps, or at the last boundary within the given seconds.

        NaN if there is no such row.
        """
        if steps is not None:
            within = np.flatnonzero(self.steps <= steps)
        else:
            within = self.boundaries[self.seconds[self.boundaries] <= seconds]
        return float(self.returns[within[-1]]) if len(within) else math.nan

    def first_at(self, wanted: float) -> int | None:
        """The index of the first row whose return is at least `wanted`; None if there is none."""
        reached = np.flatnonzero(self._reliable_returns >= wanted)
        return int(reached[0]) if len(reached) else None

    @property
    def curve(self) -> figures.Curve:
        at = self.boundaries
        return figures.Curve(str(self.path), self.steps, self.returns, self.seconds[at], self.returns[at])

    @property
    def _reliable_returns(self) -> np.ndarray:
        """The returns, with NaN at the beginning, until 100 episodes (or all episodes of the run, if fewer) have ended.

        The mean of fewer episodes can be high by luck."""
        seen = np.cumsum(np.nan_to_num(self._column("episodes")))
        return np.where(seen >= min(EPISODES_PER_RETURN, seen[-1]), self.returns, np.nan)

    def _column(self, name: str) -> np.ndarray:
        return np.array([row.get(name, math.nan) for row in self.rows], np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """A comparison of several runs."""

    records: tuple[Record, ...]
    """The runs, in the order in which the user named them."""
    at_return: float
    """The comparison gives the time that each run needed to reach this return. NaN: the comparison gives no such times."""

    @classmethod
    def of(cls, paths: Sequence[str | Path], *, at_return: float | int | None = None) -> "Comparison":
        """Read the runs. By default, `at_return` is the highest return that all runs reached; NaN if environments differ."""
        records = tuple(Record.read(path) for path in paths)
        if not any("train_return" in record.rows[-1] for record in records):
            records = tuple(dataclasses.replace(record, measure="eval_return") for record in records)
        if at_return is None:
            same = len({record.environment for record in records}) == 1
            best = [record.best_return for record in records]
            at_return = min(best) if same and all(map(math.isfinite, best)) else math.nan
        return cls(records=records, at_return=float(at_return))

    @property
    def title(self) -> str:
        environments = list(dict.fromkeys(record.environment for record in self.records))
        if len(environments) == 1:
            return environments[0]
        return f"Different environments, whose returns cannot be compared: {', '.join(environments)}"

    @property
    def units(self) -> list[str]:
        """What the steps of the runs count: environment steps, iterations or both. If both, the steps cannot be compared."""
        return list(dict.fromkeys(record.unit for record in self.records))

    @property
    def steps_of_all(self) -> float:
        """The number of steps that every run has reached; NaN if the steps of the runs cannot be compared."""
        return float(min(record.steps[-1] for record in self.records)) if len(self.units) == 1 else math.nan

    @property
    def seconds_of_all(self) -> float:
        """The time that every run has reached."""
        return float(min(record.seconds[-1] for record in self.records))

    def to_dict(self) -> dict[str, Any]:
        """All numbers; NaN where a number of a run is not known. `at_return` is None in place of NaN."""
        at = None if math.isnan(self.at_return) else self.at_return
        return {"title": self.title, "at_return": at, "runs": [self._numbers(record) for record in self.records]}

    def table(self) -> Table:
        """The numbers for a terminal: one column per run."""
        # Text, not str: rich reads brackets in a str as markup.
        table = Table(title=Text(printable(self.title)), box=box.SIMPLE, title_justify="left", header_style="")
        table.add_column()
        for record in self.records:
            table.add_column(Text(printable(str(record.path))), justify="right", overflow="fold")
        numbers = [self._numbers(record) for record in self.records]
        for label, texts in self._lines(numbers):
            if any(text != "-" for text in texts):
                table.add_row(label, *(Text(printable(text)) for text in texts))
        return table

    def figure(self) -> figures.Figure:
        """A figure of the returns over steps and over seconds."""
        returns = "return (last 100 training episodes)"
        if self.records[0].measure == "eval_return":
            returns = "return (last evaluation, greedy)"
        curves = [record.curve for record in self.records]
        return figures.comparison(curves, title=self.title, steps=" or ".join(self.units), returns=returns)

    def _numbers(self, record: Record) -> dict[str, Any]:
        first = self.records[0]
        seconds, seconds_of_first = self._seconds_to_return(record), self._seconds_to_return(first)
        return {
            "path": str(record.path),
            "algorithm": record.algorithm,
            "environment": record.environment,
            "layout": record.layout,
            "finished": record.is_finished,
            "env_steps": int(record.env_steps[-1]),
            "iterations": len(record.rows),
            "seconds": float(record.seconds[-1]),
            "steps_per_second": record.steps_per_second,
            "speedup": record.steps_per_second / first.steps_per_second if record.unit == first.unit else math.nan,
            "return_at_steps": [(int(n), record.return_at(steps=n)) for n in _points(self.steps_of_all)],
            "return_at_seconds": [(s, record.return_at(seconds=s)) for s in _points(self.seconds_of_all)],
            "seconds_to_return": seconds,
            "speedup_to_return": seconds_of_first / seconds,
            "return": record.final_return,
            "episodes": record.episodes if "train_return" in record.rows[-1] else math.nan,
            "eval_return": record.evaluation,
        }

    def _seconds_to_return(self, record: Record) -> float:
        row = record.first_at(self.at_return)
        return math.nan if row is None else float(record.seconds[row])

    def _lines(self, numbers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
        """The lines of the table: a label, and the text for each run."""

        def line(label: str, name: str, form: str) -> tuple[str, list[str]]:
            return label, [_shown(each[name], form) for each in numbers]

        yield line("algorithm", "algorithm", "{}")
        if len({record.environment for record in self.records}) > 1:
            yield line("environment", "environment", "{}")
        yield line("layout", "layout", "{}")
        yield "state", ["finished" if each["finished"] else "unfinished" for each in numbers]
        yield line("environment steps", "env_steps", "{:,.0f}")
        if "iterations" in self.units:
            yield line("iterations", "iterations", "{:,.0f}")
        yield line("seconds", "seconds", "{:,.1f}")
        yield line(f"{' or '.join(unit.split()[-1] for unit in self.units)} per second", "steps_per_second", "{:,.0f}")
        yield line("  speed-up", "speedup", "{:.2f}x")
        for name, label in (
            ("return_at_steps", "return at {:,.0f} {unit}"),
            ("return_at_seconds", "return after {:,.1f} s"),
        ):
            for i, (point, _) in enumerate(numbers[0][name]):
                yield (
                    label.format(point, unit=self.units[0].split()[-1]),
                    [_shown(each[name][i][1], "{:,.1f}") for each in numbers],
                )
        yield line(f"seconds to return {self.at_return:,.1f}", "seconds_to_return", "{:,.1f}")
        yield line("  speed-up", "speedup_to_return", "{:.2f}x")
        yield line("final return", "return", "{:,.1f}")
        yield line("  over the last episodes", "episodes", "{:,.0f}")
        yield line("last evaluation (greedy)", "eval_return", "{:,.1f}")


def _points(end: float) -> list[float]:
    return [part * end for part in POINTS if math.isfinite(end)]


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The table `name` in a TOML table; empty if it is missing or not a table."""
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def _name(described: Mapping[str, Any]) -> str:
    """A short name: `MyPPO` for `package.my_ppo:MyPPO`, `my_env.py:make_env` for `/some/where/my_env.py:make_env`."""
    if "class" in described:
        return str(described["class"]).rpartition(":")[2]
    name = str(described.get("name", described.get("unknown", "?")))
    return Path(name).name if name.startswith("/") else name


def _shown(value: Any, form: str) -> str:
    return "-" if isinstance(value, float) and not math.isfinite(value) else form.format(value)
