"""The folder of one run, and who may write into it.

    runs/x/  run.toml                 everything needed to run it again
             metrics.jsonl            one line per iteration
             checkpoint.safetensors   the whole state at the last boundary
             graph.svg  curve.png     the fragmented dataflow graph; the learning curve
             summary.json             the numbers of the final table

One process writes at a time: it holds a lock, which the system drops when the process ends, however it ends. Every file
is replaced whole; `metrics.jsonl` grows by whole lines. A run that never reached its first boundary leaves no folder.
"""

import fcntl
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import tomli_w

from choreo import checkpoint
from choreo.errors import RunError

Row = dict[str, float | int]
"""The metrics of one iteration."""


class RunFolder:
    """A folder that is being read, or, between `open` and `close`, written."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock: IO[str] | None = None
        self._made: list[Path] = []

    @property
    def recipe(self) -> Path:
        return self.path / "run.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """Who read which version, where that may have been out of date: [reader, update, version]."""
        return self.path / "reads.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    def check_new(self) -> None:
        """Refuse a place where a new run must not be written; changes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(
                f"{self.path} is a file; a run needs a folder.", fix="Choose another --out, or remove the file."
            )
        for parent in self.path.parents:
            if parent.exists() and not parent.is_dir():
                raise RunError(f"{self.path} cannot be made: {parent} is a file.", fix="Choose another --out.")
        self.check_not_in_use()
        if self.path.is_dir() and any(file.name != ".lock" for file in self.path.iterdir()):
            fix = f"Continue it with `choreo resume {self.path}`, choose another --out, or remove it."
            if not self.recipe.is_file():
                fix = "Choose another --out, or empty it."
            raise RunError(f"{self.path} is not empty.", fix=fix)

    def check_not_in_use(self) -> None:
        """Refuse a folder somebody is writing."""
        if self._in_use():
            raise self._used()

    def check_run(self) -> None:
        """Refuse what is no run folder."""
        if not self.recipe.is_file():
            what = "is no run folder: it has no run.toml" if self.path.is_dir() else "does not exist"
            raise RunError(f"{self.path} {what}.", fix="Name the folder that `choreo train --out` wrote.")

    def open(self) -> None:
        """Become the one writer; makes the folder if there is none."""
        missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self._made = missing
        self._lock = open(self._lock_file, "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            self._lock = None
            raise self._used() from error

    def close(self) -> None:
        """Let others write. A folder of ours in which no boundary was reached is removed again."""
        if self._lock is None:
            return
        if self._made and not self.checkpoint.exists() and not self.metrics.exists():
            for name in ("run.toml", "graph.svg"):
                (self.path / name).unlink(missing_ok=True)
            self._lock_file.unlink(missing_ok=True)
            for made in self._made:
                if any(made.iterdir()):
                    break
                made.rmdir()
        else:
            self._lock_file.unlink(missing_ok=True)
        self._lock.close()
        self._lock = None

    def write_recipe(self, data: Mapping[str, Any]) -> None:
        text = "# Written by Choreo: everything needed to run this again.\n" + tomli_w.dumps(data)
        checkpoint.write_atomic(self.recipe, text.encode())

    def read_recipe(self) -> dict[str, Any]:
        self.check_run()
        return read_toml(self.recipe)

    def append_metrics(self, rows: Sequence[Row]) -> None:
        """Add whole lines, in one write."""
        with open(self.metrics, "ab", buffering=0) as file:
            file.write("".join(to_json(row) + "\n" for row in rows).encode())

    def read_metrics(self, *, before: int | None = None) -> list[Row]:
        """All rows, or those of iterations below `before`; a last line cut off by a crash is left out."""
        if not self.metrics.is_file():
            return []
        lines = self.metrics.read_text().split("\n")[:-1]
        rows = [self._row(number, line) for number, line in enumerate(lines, 1)]
        return [row for row in rows if before is None or row["iteration"] < before]

    def rewrite_metrics(self, rows: Sequence[Row]) -> None:
        checkpoint.write_atomic(self.metrics, "".join(to_json(row) + "\n" for row in rows).encode())

    def append_log(self, reads: Sequence[Sequence[Any]]) -> None:
        """What was read out of date, for `choreo replay`."""
        with open(self.log, "ab", buffering=0) as file:
            file.write("".join(json.dumps(list(read)) + "\n" for read in reads).encode())

    def read_log(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.is_file() else []

    def write_text(self, name: str, text: str) -> None:
        checkpoint.write_atomic(self.path / name, text.encode())

    def read_summary(self) -> dict[str, Any]:
        """The numbers of the last training that reached its end here; empty if none did."""
        file = self.path / "summary.json"
        return json.loads(file.read_text()) if file.is_file() else {}

    def _row(self, number: int, line: str) -> Row:
        try:
            return {name: math.nan if value is None else value for name, value in json.loads(line).items()}
        except (json.JSONDecodeError, AttributeError) as error:
            raise RunError(
                f"Line {number} of {self.metrics} is no row of metrics: {line[:60]!r}.",
                fix="Undo the last edit, or remove the line.",
            ) from error

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"

    def _in_use(self) -> bool:
        if not self._lock_file.exists():
            return False
        with open(self._lock_file) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _used(self) -> RunError:
        return RunError(
            f"Another process is writing a run into {self.path}.", fix="Wait for it, or choose another --out."
        )


def read_toml(file: Path) -> dict[str, Any]:
    """A TOML file as data."""
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.", fix="Name a file that is there.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{file} is no valid TOML: {error}.", fix="Undo the last edit.") from error


def to_json(row: Mapping[str, Any]) -> str:
    """One line of JSON; what is not a number there (nan, inf) becomes null."""
    return json.dumps(_plain(row))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def free_folder(algo: Any, env: Any, seed: int) -> Path:
    """`runs/ppo-CartPole-v1-0`, or with the next free number behind it."""
    name = "-".join([type(algo).__name__.lower(), env.name.split(":")[-1].replace("/", "-"), str(seed)])
    folder, number = Path("runs") / name, 2
    while folder.exists():
        folder, number = Path("runs") / f"{name}.{number}", number + 1
    return folder
