"""Loggers record the metrics of a run, in addition to metrics.jsonl in the run folder.

A logger is any object with `log(row)` and `close()`; `row` maps names to numbers and always has `iteration` and
`env_steps`. Loggers known by name: "tensorboard".
"""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from choreo.errors import RunError, unknown_name
from choreo.runs.events import Event, IterationDone, Metrics, RunEnded, Subscriber
from choreo.runs.steps import steps_of


@runtime_checkable
class Logger(Protocol):
    """Receives one row per iteration, in order."""

    def log(self, row: Metrics) -> None:
        """Record one iteration. Metrics of episodes are NaN if no episode has ended."""
        ...

    def close(self) -> None:
        """Called once at the end of the run, also if the run failed."""
        ...


def make_loggers(loggers: Sequence[str | Logger], folder: Path | None) -> list[Logger]:
    """The loggers as objects; those given by name write into the run folder."""
    if isinstance(loggers, str):
        loggers = [loggers]
    return [_make(logger, folder) for logger in loggers]


def rows_to(logger: Logger) -> Subscriber:
    """The subscriber that passes the row of each iteration to a logger, and closes the logger when the run has ended."""

    def tell(event: Event) -> None:
        match event:
            case IterationDone():
                logger.log(event.row)
            case RunEnded():
                logger.close()

    return tell


def check_loggers(loggers: Sequence[Any], folder: Path | None) -> None:
    """Refuse loggers that `make_loggers` could not make; called before anything is compiled or written."""
    for logger in [loggers] if isinstance(loggers, str) else loggers:
        if isinstance(logger, str):
            if logger not in NAMED:
                raise unknown_name("logger", logger, NAMED, fix="Or pass an object with `log(row)` and `close()`.")
            if folder is None:
                raise RunError(f'loggers=["{logger}"] needs a run folder to write into.', fix='Pass out="runs/x".')
            NAMED[logger].check(folder)
            continue
        missing = [name for name in ("log", "close") if not callable(getattr(logger, name, None))]
        if missing:
            raise RunError(
                f"`{type(logger).__name__}` is not a logger: it has no `{missing[0]}`.",
                fix="A logger has `log(row)` and `close()`.",
            )


def _make(logger: str | Logger, folder: Path | None) -> Logger:
    if not isinstance(logger, str):
        return logger
    assert folder is not None  # `check_loggers` refuses None
    return NAMED[logger](folder)


class TensorBoard:
    """Writes event files for TensorBoard, with tensorboardX, which does not need TensorFlow."""

    def __init__(self, folder: Path):
        from tensorboardX import SummaryWriter

        self.check(folder)
        # The file name is random, so that no other user can guess it and put a symbolic link there beforehand.
        self._writer = SummaryWriter(str(folder / "tensorboard"), filename_suffix=f".{secrets.token_hex(8)}")

    @staticmethod
    def check(folder: Path) -> None:
        """Raise RunError if the folder cannot be used, or if the package tensorboardX is missing."""
        place = folder / "tensorboard"
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise RunError(
                f"Refused to use {place}: it is {'a symbolic link' if place.is_symlink() else 'not a folder'}.",
                fix="Remove it if you did not make it.",
            )
        try:
            import tensorboardX  # noqa: F401
        except ImportError as error:
            raise RunError(
                'loggers=["tensorboard"] needs the package tensorboardX.', fix="pip install 'choreo[tensorboard]'"
            ) from error

    def log(self, row: Metrics) -> None:
        for name, value in row.items():
            if name not in ("iteration", "env_steps") and value == value:  # not NaN
                self._writer.add_scalar(name, value, steps_of(row))

    def close(self) -> None:
        self._writer.close()


NAMED: dict[str, Any] = {"tensorboard": TensorBoard}
