"""The folder of one run: its files, its lock, and checks of the files that are read.

    runs/x/  run.toml                 everything needed to repeat the run
             metrics.jsonl            one line per iteration
             checkpoint.safetensors   the whole state at the last checkpoint
             reads.jsonl              which versions of the parameters were read, if that depended on timing
             graph.svg  curve.png     the fragmented dataflow graph; the learning curve
             summary.json             the numbers of the final table, except the return of the final evaluation
             trace.json               a timeline of each site's work, with train(profile=True)

One process writes at a time: it holds a lock, which the system releases when the process ends for any reason. Files are
replaced atomically; the .jsonl files grow by whole lines. If a run ends before its first boundary, the folder is removed again,
unless it existed before.

A folder may come from a stranger. Every file is checked when it is read: it must have the form that a run writes, and no
control characters, which can change what a terminal shows. Nothing is written through a link (`choreo.runs.safe_files`).
"""

import fcntl
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import tomli_w

from choreo.errors import RunError, printable
from choreo.runs import safe_files, trusted_runs

Row = dict[str, float | int]
"""The metrics of one iteration."""


class RunFolder:
    """The folder of one run. Reading needs no lock; writing is allowed between `open` and `close`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock: IO[str] | None = None
        self._made: list[Path] = []

    @property
    def config_file(self) -> Path:
        return self.path / "run.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """The log of a relaxed run, one [reader, update, version] per line: for this update, the reader used this version."""
        return self.path / "reads.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    def check_new(self) -> None:
        """Refuse a path at which no new run can be written. Nothing is changed."""
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
            if not self.config_file.is_file():
                fix = "Choose another --out, or empty it."
            raise RunError(f"{self.path} is not empty.", fix=fix)

    def check_not_in_use(self) -> None:
        """Refuse a folder that a process is writing to."""
        if self._in_use():
            raise self._in_use_error()

    def check_run(self) -> None:
        """Refuse a path that is not a run folder."""
        if not self.config_file.is_file():
            what = "is not a run folder: it has no run.toml" if self.path.is_dir() else "does not exist"
            if self.path.is_file():
                what = "is a file, not a run folder"
            raise RunError(f"{self.path} {what}.", fix="Name the folder that `choreo train --out` wrote.")

    def open(self) -> None:
        """Make the folder if it is missing, and take the lock. Raises RunError if another process holds the lock."""
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.fdopen(safe_files.open_to_write(self._lock_file), "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            self._lock = None
            raise self._in_use_error() from error

    def close(self) -> None:
        """Release the lock. A folder that `open` made is removed again if the run reached no boundary."""
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

    def write_config(self, data: Mapping[str, Any]) -> None:
        """Write run.toml. A run.toml that names the user's code is also listed among this account's own runs.

        If the folder has a run.toml that is not listed, the new run.toml is not listed either: a stranger's run does not become
        trusted when it is resumed.
        """
        from choreo.runs import (
            toml_values,  # not at the top: it imports JAX, and `choreo compare` must start without JAX
        )

        is_ours = not self.config_file.exists() or trusted_runs.is_own(
            self.config_file, safe_files.read_bytes(self.config_file)
        )
        text = ("# Written by Choreo: everything needed to run this again.\n" + tomli_w.dumps(data)).encode()
        safe_files.write_atomic(self.config_file, text)
        if is_ours and toml_values.names_code(data):
            trusted_runs.remember(self.config_file, text)

    def read_config(self) -> dict[str, Any]:
        """The content of run.toml, as data."""
        self.check_run()
        return parse_toml(read_file(self.config_file), self.config_file)

    def append_metrics(self, rows: Sequence[Row]) -> None:
        """Append the rows to metrics.jsonl, in one write."""
        self._append(self.metrics, "".join(to_json(row) + "\n" for row in rows))

    def read_metrics(self, *, before: int | None = None) -> list[Row]:
        """All rows, or those of iterations below `before`. An incomplete last line (after a crash) is left out."""
        rows = [_parse_row(self.metrics, number, line) for number, line in enumerate(self._lines(self.metrics), 1)]
        return [row for row in rows if before is None or row["iteration"] < before]

    def rewrite_metrics(self, rows: Sequence[Row]) -> None:
        safe_files.write_atomic(self.metrics, "".join(to_json(row) + "\n" for row in rows).encode())

    def append_log(self, reads: Sequence[Sequence[Any]]) -> None:
        """Append reads to the log that `choreo replay` follows."""
        self._append(self.log, "".join(json.dumps(list(read)) + "\n" for read in reads))

    def read_log(self) -> list[list[Any]]:
        return [_parse_read(self.log, number, line) for number, line in enumerate(self._lines(self.log), 1)]

    def write_text(self, name: str, text: str) -> None:
        safe_files.write_atomic(self.path / name, text.encode())

    def read_summary(self) -> dict[str, Any]:
        """The numbers of the last training that finished in this folder; empty if none did."""
        file = self.path / "summary.json"
        if not file.is_file():
            return {}
        what = f"{file} is not the summary of a run."
        summary = _parse_json(_text(read_file(file), file), file, what)
        if not isinstance(summary, dict) or not all(
            isinstance(v, str | None) or _is_number(v) for v in summary.values()
        ):
            raise RunError(what, fix="Remove the file: it is not needed to read the run.")
        return summary

    def _append(self, file: Path, lines: str) -> None:
        with os.fdopen(safe_files.open_to_write(file, os.O_APPEND), "ab", buffering=0) as opened:
            opened.write(lines.encode())

    def _lines(self, file: Path) -> list[str]:
        return _text(read_file(file), file).split("\n")[:-1] if file.is_file() else []

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"

    def _in_use(self) -> bool:
        if not os.path.lexists(self._lock_file):
            return False
        with os.fdopen(safe_files.open_to_read(self._lock_file)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _in_use_error(self) -> RunError:
        return RunError(
            f"Another process is writing a run into {self.path}.", fix="Wait for it, or choose another --out."
        )


REQUIRED = ("iteration", "env_steps", "seconds")
"""Names that every row of metrics has."""
OF_EPISODES = ("train_return", "episodes", "episode_return")
"""Names that a row has if the algorithm measures episodes: all three, or none."""
COUNTS = ("iteration", "env_steps")
"""Names in a row whose values are integers."""


def read_file(file: Path) -> bytes:
    """The content of a file of a run; raises RunError if it cannot be read."""
    try:
        return safe_files.read_bytes(file)
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.", fix="Name a file that exists.") from error


def parse_toml(text: bytes, file: Path) -> dict[str, Any]:
    """The content of a TOML file as data; `file` is named in errors."""
    try:
        data = tomllib.loads(_text(text, file))
        _check_texts(data, file)
        return data
    except RecursionError as error:
        raise RunError(f"{file} is nested too deeply.", fix="Undo the last edit.") from error
    except ValueError as error:  # bad TOML, or a number with thousands of digits
        raise RunError(f"{file} is not valid TOML: {error}.", fix="Undo the last edit.") from error


def _parse_row(file: Path, number: int, line: str) -> Row:
    row = _parse_json(line, file, f"Line {number} of {file} is not a row of metrics: {line[:60]!r}.")
    fits = isinstance(row, dict) and all(value is None or _is_number(value) for value in row.values())
    complete = fits and all(name in row for name in REQUIRED) and len({name in row for name in OF_EPISODES}) == 1
    if not complete or not all(isinstance(row[name], int) for name in COUNTS):
        raise RunError(
            f"Line {number} of {file} is not a row of metrics: {line[:60]!r}.",
            fix="Undo the last edit, or remove the line.",
        )
    return {name: math.nan if value is None else value for name, value in row.items()}


def _parse_read(file: Path, number: int, line: str) -> list[Any]:
    what = f"Line {number} of {file} is not an entry of the log: {line[:60]!r}."
    read = _parse_json(line, file, what)
    match read:
        case [str(reader), int(update), int(version)]:
            return [reader, update, version]
    raise RunError(what, fix="Undo the last edit.")


def _is_number(value: Any) -> bool:
    """Whether a value is a float, or an integer that fits into 64 bits."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _text(data: bytes, file: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RunError(f"{file} is not UTF-8 text: {error}.", fix="Undo the last edit.") from error


def _parse_json(text: str, file: Path, what: str) -> Any:
    """JSON as data; `what` is the message if the text is not JSON."""
    try:
        data = json.loads(text)
        _check_texts(data, file)
        return data
    except (ValueError, RecursionError) as error:
        raise RunError(what, fix="Undo the last edit.") from error


def _check_texts(data: Any, file: Path) -> None:
    """Refuse control characters in all texts of `data`, also in the keys of dicts: titles, tables and errors show these texts."""
    match data:
        case str() if printable(data) != data:
            raise RunError(
                f'{file} has characters that are not printable: "{printable(data)[:100]}".',
                fix="Do not use this folder: such characters can change what a terminal shows.",
            )
        case dict():
            for name, value in data.items():
                _check_texts(name, file)
                _check_texts(value, file)
        case list():
            for value in data:
                _check_texts(value, file)


def to_json(row: Mapping[str, Any]) -> str:
    """One line of JSON; NaN and infinities, which JSON does not have, become null."""
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
    """A path that does not exist yet: `runs/ppo-CartPole-v1-0`, or with a number appended, `runs/ppo-CartPole-v1-0.2`."""
    name = "-".join([type(algo).__name__.lower(), env.name.split(":")[-1].replace("/", "-"), str(seed)])
    folder, number = Path("runs") / name, 2
    while folder.exists():
        folder, number = Path("runs") / f"{name}.{number}", number + 1
    return folder
