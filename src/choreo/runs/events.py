"""The events of a run, and the stream that delivers them. Everything that is shown while a run goes on comes from these events.

    RunBegan ─► (WorkerStates | WorkerOutput | WarningGiven)*        workers start, programs are compiled
             ─► at each boundary: IterationDone+, EvaluationDone?, BoundaryReached, CheckpointSaved?
             ─► RunEnded                                             workers are closed, files are written

`WorkerStates` and `WorkerOutput` also occur between two boundaries, and while workers are closed. A run that is refused before it
begins has no events. After `RunBegan`, every run has exactly one `RunEnded`, which is the last event of the run.

The progress line, loggers, `on_iteration` and the subscribers of the user are subscribers of one stream. The run folder is not
a subscriber: rows and checkpoints are written before their events are delivered, so no error in a subscriber can lose them.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from choreo.errors import DivergedError, RunError

Metrics = Mapping[str, float | int]
"""The metrics of one iteration, by name."""
OnIteration = Callable[[int, Metrics], bool | None]
"""Called at each boundary, once for each iteration since the previous boundary, with the number and the metrics of the iteration.
If a call returns True, the run ends at this boundary."""
How = Literal["finished", "stopped", "diverged", "failed", "interrupted"]
"""How a run ended. "finished": after all iterations. "stopped": because `stop_at_return` was reached, or because a subscriber
asked. "diverged": because a metric was not finite. "interrupted": by Ctrl-C. "failed": with any other error."""


@dataclass(frozen=True, kw_only=True)
class RunBegan:
    """The run begins: its arguments were accepted and its folder is open. No worker has started yet."""

    algorithm: str
    """Name of the algorithm's class."""
    environment: str
    """Name of the environment."""
    folder: Path | None
    """The run folder, if there is one."""
    total_steps: int
    """Steps of the whole run (see `choreo.runs.steps`), rounded up to whole iterations."""
    iterations: int
    """Iterations of the whole run."""
    iterations_done: int
    """Iterations that were done before this run was resumed; 0 for a new run."""


@dataclass(frozen=True, kw_only=True)
class IterationDone:
    """One iteration is done. This event is delivered at the first boundary after the iteration."""

    iteration: int
    """Number of the iteration, counted from 0."""
    row: Metrics
    """The metrics of the iteration. Metrics of episodes are NaN if no episode has ended."""


@dataclass(frozen=True, kw_only=True)
class EvaluationDone:
    """The parameters were evaluated at a boundary."""

    iterations_done: int
    """Iterations done when the parameters were evaluated."""
    mean_return: float
    """Mean return of the greedy episodes."""


@dataclass(frozen=True, kw_only=True)
class BoundaryReached:
    """All sites are at a boundary. If there is a run folder, metrics.jsonl has the rows of all iterations so far."""

    iterations_done: int
    """Iterations done so far."""
    steps_per_second: float
    """Steps per second while iterations run; the time for compiling and evaluating is not counted."""
    row: Metrics
    """The metrics of the newest iteration."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """The checkpoint of this boundary is written."""

    iterations_done: int
    """Iterations done in the saved state."""
    path: Path
    """The file of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class WorkerStates:
    """A worker reported progress."""

    states: Mapping[str, str]
    """A text for each worker that says what the worker is doing, by the name of the worker."""


@dataclass(frozen=True, kw_only=True)
class WorkerOutput:
    """A worker printed a line, or Choreo warns about the host of a worker."""

    worker: str
    """Name of the worker; for a warning, the address of the host."""
    line: str
    """The printed line without the newline at its end, or the warning."""


@dataclass(frozen=True, kw_only=True)
class WarningGiven:
    """The run is correct, but probably not what the user intended. Python's `warnings` shows the text as well."""

    text: str
    """The warning."""


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """The run has ended: workers are closed and all files are written. This is always the last event."""

    how: How
    """How the run ended."""
    stopped_by: str | None = None
    """If the run was stopped: `stop_at_return`, `on_iteration`, or the name of the subscriber that asked; else None."""
    error: BaseException | None = None
    """The error that ended the run, which `train` raises; None if no error ended the run."""


Event = (
    RunBegan
    | IterationDone
    | EvaluationDone
    | BoundaryReached
    | CheckpointSaved
    | WorkerStates
    | WorkerOutput
    | WarningGiven
    | RunEnded
)
"""All events of a run."""


@runtime_checkable
class Subscriber(Protocol):
    """A callable that receives every event of a run, in order, in the thread that called `train`.

    A subscriber that returns True for an event asks the run to stop. If the run is at a boundary, it ends there; if not, it ends at
    the next boundary. All other return values are ignored. An error that a subscriber raises ends the run at once, and `train`
    raises this error.
    """

    def __call__(self, event: Event, /) -> Any: ...


class EventStream:
    """Delivers each event to all subscribers, in the order of subscription, before `emit` returns."""

    def __init__(self) -> None:
        self._subscribed: list[tuple[str, Subscriber]] = []
        self._failed: set[int] = set()
        self.stop_asked_by: str | None = None
        """The name of the subscriber that first asked to stop, or the name that was first given to `ask_to_stop`; else None."""

    def subscribe(self, subscriber: Subscriber, *, name: str | None = None) -> None:
        """Add a subscriber. `name` is by default the name of the function or class."""
        self._subscribed.append((name or name_of_subscriber(subscriber), subscriber))

    def ask_to_stop(self, name: str) -> None:
        """End the run at this boundary or, between two boundaries, at the next one. `name` says what asked for the end."""
        self.stop_asked_by = self.stop_asked_by or name

    def emit(self, event: Event) -> None:
        """Deliver an event. If a subscriber raises an error, `emit` raises it, and later subscribers do not get this event.

        A subscriber that raised an error gets only one more event: `RunEnded`.
        """
        for i, (name, subscriber) in enumerate(self._subscribed):
            if i in self._failed:
                continue
            try:
                answer = subscriber(event)
            except BaseException as error:
                self._failed.add(i)
                if isinstance(error, Exception):
                    error.add_note(
                        f"The subscriber `{name}` raised this error when it got {type(event).__name__}. The error ended the run."
                    )
                raise
            if _is_true(answer):
                self.ask_to_stop(name)

    @contextlib.contextmanager
    def ending(self, *, is_finished: Callable[[], bool]) -> Iterator[None]:
        """Deliver `RunEnded` after the body of the `with` statement, however the body ends.

        `is_finished` says whether the run has done all its iterations. It is called only if the body raises no error.
        """
        try:
            yield
        except BaseException as error:
            for note in map(_note, self._end(RunEnded(how=_how(error), error=error))):
                error.add_note(note)
            raise
        ended = RunEnded(how="finished") if is_finished() else RunEnded(how="stopped", stopped_by=self.stop_asked_by)
        failures = self._end(ended)
        if failures:
            first = failures[0][1]
            for note in map(_note, failures[1:]):
                first.add_note(note)
            raise first

    def _end(self, event: RunEnded) -> list[tuple[str, BaseException]]:
        """Deliver the last event to every subscriber, even if some raise errors. Returns the pairs (subscriber name, error)."""
        failures = []
        for name, subscriber in self._subscribed:
            try:
                subscriber(event)
            except BaseException as error:  # noqa: BLE001 - the caller raises the error after all subscribers got the event
                failures.append((name, error))
        return failures


def each_iteration(callback: OnIteration) -> Subscriber:
    """The subscriber that calls `callback` with the number and the metrics of each iteration."""

    def tell(event: Event) -> bool:
        return isinstance(event, IterationDone) and bool(callback(event.iteration, event.row))

    return tell


def check_subscribers(subscribers: Sequence[Any]) -> None:
    """Raise RunError if a subscriber cannot be called. This check runs before anything is compiled or written."""
    if not isinstance(subscribers, list | tuple):
        raise RunError(
            f"subscribers={subscribers!r} is not a list.", fix="Pass a list of functions: subscribers=[my_function]."
        )
    for subscriber in subscribers:
        if not callable(subscriber):
            raise RunError(
                f"`{name_of_subscriber(subscriber)}` is not a subscriber: it cannot be called.",
                fix="A subscriber is a function, or an object with `__call__`, that takes one event.",
            )


def name_of_subscriber(subscriber: Any) -> str:
    """The name of a function, or the name of the class of an object."""
    return getattr(subscriber, "__qualname__", type(subscriber).__name__)


def _how(error: BaseException) -> How:
    if isinstance(error, DivergedError):
        return "diverged"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _is_true(answer: Any) -> bool:
    """Whether a subscriber returned True, as a boolean of Python, NumPy or JAX. A number does not count: a lambda
    that calls `file.write` returns a number, but does not ask the run to stop."""
    return answer is True or (str(getattr(answer, "dtype", "")) == "bool" and answer.shape == () and bool(answer))


def _note(failure: tuple[str, BaseException]) -> str:
    name, error = failure
    trace = "".join(traceback.format_exception(error))
    return f"When the run had ended, the subscriber `{name}` also raised an error:\n{trace}"
