"""The events of a run, and the stream that delivers them. Everything that is shown while a run goes on comes from these events.

    RunBegan ─► (WorkerStates | WorkerOutput | WarningGiven)*        workers start, programs are compiled
             ─► at each boundary: IterationDone+, EvaluationDone?, BoundaryReached, CheckpointSaved?
             ─► RunEnded                                             workers are closed, files are written

`WorkerStates` and `WorkerOutput` also occur between two boundaries. A run that is refused before it begins has no events.
After `RunBegan`, every run has exactly one `RunEnded`, which is its last event.

The progress line, loggers, `on_iteration` and the subscribers of the user are subscribers of one stream. The run folder is not:
the rows and the checkpoint are written before their events are delivered, so no subscriber can damage or lose them.
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
"""Called at each boundary, once for each iteration since the boundary before, with the number and the metrics of the iteration.
If a call returns True, the run ends at this boundary."""
How = Literal["finished", "stopped", "diverged", "failed", "interrupted"]
"""How a run ended: after all iterations; because `stop_at_return` was reached or a subscriber asked; because a metric was not
finite; with another error; by Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class RunBegan:
    """The run begins: its arguments were accepted and its folder is open. No worker has started."""

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
    """One iteration is done. Its event is delivered at the next boundary."""

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
    """All sites are at a boundary; its rows are in metrics.jsonl."""

    iterations_done: int
    """Iterations done so far."""
    steps_per_second: float
    """Steps per second of running iterations, without the time for compiling and evaluating."""
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
    """What each worker is doing, for people to read, by the name of the worker."""


@dataclass(frozen=True, kw_only=True)
class WorkerOutput:
    """A worker printed a line, or a message about its host was found."""

    worker: str
    """Name of the worker, or address of the host."""
    line: str
    """The line, without its end."""


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
    """The error that ended the run; `train` raises this error."""


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

    To ask the run to stop, return True, for any event: the run ends at the boundary that it has reached, or else at the next
    boundary. Other results mean nothing. An error that a subscriber raises ends the run at once, and `train` raises this error.
    """

    def __call__(self, event: Event, /) -> Any: ...


class EventStream:
    """Delivers each event to all subscribers, in the order of subscription, before `emit` returns."""

    def __init__(self) -> None:
        self._subscribed: list[tuple[str, Subscriber]] = []
        self._failed: set[int] = set()
        self.stop_asked_by: str | None = None
        """The first that asked to stop: the name of a subscriber, or an argument of `ask_to_stop`."""

    def subscribe(self, subscriber: Subscriber, *, name: str | None = None) -> None:
        """Add a subscriber. `name` is by default the name of the function or class."""
        self._subscribed.append((name or name_of_subscriber(subscriber), subscriber))

    def ask_to_stop(self, name: str) -> None:
        """End the run at this boundary, or at the next one. `name` says who asks."""
        self.stop_asked_by = self.stop_asked_by or name

    def emit(self, event: Event) -> None:
        """Deliver an event. If a subscriber raises an error, the subscribers after it do not get this event.

        A subscriber that raised an error gets no event but `RunEnded`.
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
                        f"The subscriber `{name}` raised this error at {type(event).__name__}, which ended the run."
                    )
                raise
            if _is_true(answer):
                self.ask_to_stop(name)

    @contextlib.contextmanager
    def ending(self, *, is_finished: Callable[[], bool]) -> Iterator[None]:
        """Deliver `RunEnded` after the body of the `with` statement, however the body ends.

        `is_finished`: whether the run has done all its iterations; called if the body raises no error.
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
        """Deliver the last event to every subscriber, even after errors. Returns the errors with the names of the subscribers."""
        failures = []
        for name, subscriber in self._subscribed:
            try:
                subscriber(event)
            except BaseException as error:  # noqa: BLE001 - the caller raises the error, after all others have heard of the end
                failures.append((name, error))
        return failures


def each_iteration(callback: OnIteration) -> Subscriber:
    """The subscriber that calls `callback` with the number and the metrics of each iteration."""

    def tell(event: Event) -> bool:
        return isinstance(event, IterationDone) and bool(callback(event.iteration, event.row))

    return tell


def check_subscribers(subscribers: Sequence[Any]) -> None:
    """Refuse subscribers that cannot be called; called before anything is compiled or written."""
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
    """Whether the answer is True, also as a boolean of NumPy or JAX. A number is not: `file.write` returns one."""
    return answer is True or (str(getattr(answer, "dtype", "")) == "bool" and answer.shape == () and bool(answer))


def _note(failure: tuple[str, BaseException]) -> str:
    name, error = failure
    trace = "".join(traceback.format_exception(error))
    return f"When the run had ended, the subscriber `{name}` also raised an error:\n{trace}"
