"""`StateMachine`: all decisions of the coordinator about its workers, without I/O. Events go in, commands come out.

    IDLE ── CommandSent ──▶ WAITING ── the last WorkerReplied ──▶ IDLE
      │ a worker ends          │ a worker ends         │ silence, deadline, unexpected reply
      └────────────▶ SEARCHING ◀┘                      ▼
                        └── KillAll, RaiseError ──▶  OVER
    IDLE, WAITING ── ToldToStop ──▶ STOPPING ── all workers have ended, or GRACE_S ── KillAll ──▶ OVER
    SEARCHING ── ToldToStop ── KillAll ──▶ OVER          IDLE ── unexpected reply ── KillAll, RaiseError ──▶ OVER

The machine has no clock: every event comes with the time in seconds. So every decision can be tested without a process. The
pool (`pool.py`) does the I/O: it makes the events and executes the commands.

**Who failed first?** If a worker dies, its peers lose a channel and fail, too. So the first worker that ends need not have
failed first. In the stage SEARCHING the machine waits up to GRACE_S for a worker that ended for another reason than a lost peer:
the culprit.

**The story** is a short list of the last events and commands with their times; an error shows it.
"""

import enum
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from choreo.runtime.coordinator.machine_events import (
    Announce,
    AskForHeartBeat,
    CommandSent,
    ConnectionClosed,
    CutOff,
    EndedEarly,
    Failure,
    FellSilent,
    HeartBeat,
    KillAll,
    MachineCommand,
    MachineEvent,
    OutOfReach,
    ProcessEnded,
    RaiseError,
    RepliesAwaited,
    SendStop,
    ShowState,
    TimePassed,
    ToldToStop,
    TooLate,
    UnexpectedReply,
    WorkerHeard,
    WorkerReplied,
    WorkerReported,
    WorkerStarted,
)
from choreo.runtime.coordinator.silence import Silence

GRACE_S = 2.0
"""How long workers may take to end after the command `stop`. Also, after a failure, how long the coordinator searches for the
worker that failed first."""
LAST_WORDS_S = 1.0
"""How long the coordinator waits for the report of an ended process, or for the exit code of a worker that has reported."""
PAUSE_S = 5.0
"""If two events are further apart than this, the coordinator did not listen in between. No limit counts this time."""
STORY_LENGTH = 16
"""How many lines of the story are kept."""
PEER_ENDED = ("PeerLost", "ReceiverClosed", "EndOfChannel")
"""The errors of a worker whose peer has ended."""
COLLECTIVES = ("Gloo", "NCCL", "coordination service")
"""Words of error messages. An error with one of these words says that a collective has lost a worker."""


class Stage(enum.Enum):
    """What the run as a whole is doing."""

    IDLE = "idle"
    """No worker executes a command."""
    WAITING = "waiting"
    """Workers execute commands, and some of them have not replied yet."""
    SEARCHING = "searching"
    """A worker has ended; the machine looks for the worker that failed first."""
    STOPPING = "stopping"
    """All workers were told to stop."""
    OVER = "over"
    """All workers were killed; nothing has an effect any more."""


@dataclass(kw_only=True)
class WorkerRecord:
    """What the machine knows about one worker."""

    uses_collectives: bool = False
    """True if the worker combines values with other workers inside compiled programs."""
    command: str | None = None
    """The command that the worker executes, or None if it has replied to all commands."""
    heard_at: float | None = None
    """When the worker last gave a sign of life; None before the first one."""
    asked_at: float | None = None
    """When the worker was asked for the heartbeat that has not come yet; None if no heartbeat is missing."""
    named_at: float | None = None
    """When the worker was named because of its silence; None if it is not silent."""
    moves: int = -1
    """The number `moves` of the last heartbeat."""
    moved_at: float = 0.0
    """When the main thread was last known to make progress."""
    doing: str = "idle"
    """What the main thread did at the last heartbeat."""
    is_stuck: bool = False
    """True after the worker was named because its main thread does not move."""
    report: dict[str, Any] | None = None
    """The error report of the worker."""
    closed: bool = False
    """True after its control connection has ended."""
    code: int | None = None
    """Its exit code."""
    out_of_reach: OutOfReach | None = None
    """Why its launcher cannot reach it any more."""
    ended_at: float | None = None
    """When the first sign of its end came."""

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, as far as the coordinator can know."""
        return self.code is not None or self.out_of_reach is not None


class StateMachine:
    """Decides what to do when something happens to a worker."""

    def __init__(self, silence: Silence | None = None):
        self.silence, self.stage = silence or Silence(), Stage.IDLE
        self.workers: dict[str, WorkerRecord] = {}
        self.ended: list[str] = []
        """The workers that have ended, in the order in which the coordinator noticed it."""
        self._doing, self._deadline, self._timeout_s = "", float("inf"), 0.0
        self._listened_at: float | None = None
        self._story: deque[tuple[float, str]] = deque(maxlen=STORY_LENGTH)

    @property
    def next_check_s(self) -> float:
        """How long the pool may wait before the next `TimePassed`."""
        return 0.02 if self.stage in (Stage.SEARCHING, Stage.STOPPING) else min(0.5, self.silence.beat_s)

    def handle(self, event: MachineEvent, *, now: float) -> list[MachineCommand]:
        """Take in an event at the time `now`. Returns the commands that follow from it."""
        if self.stage is Stage.OVER:
            return []
        self._leave_out_pauses(now)
        self._tell(event, now)
        commands = list(self._take_in(event, now))
        if self.stage is not Stage.OVER:
            commands += self._check(now)
        for command in commands:
            self._tell(command, now)
        return commands

    def story(self) -> str:
        """The last events and commands, oldest first, with the seconds before the last one."""
        if not self._story:
            return ""
        last = self._story[-1][0]
        return "\n".join(f"  {at - last:7.2f} s  {what}" for at, what in self._story)

    # -- Events ------------------------------------------------------------------------------------------------------------

    def _take_in(self, event: MachineEvent, now: float) -> Iterator[MachineCommand]:
        match event:
            case WorkerStarted(worker=name):
                self.workers[name] = WorkerRecord(uses_collectives=event.uses_collectives)
            case CommandSent(worker=name):
                record = self.workers[name]
                record.command, record.moved_at, record.is_stuck = event.kind, now, False
                if record.heard_at is not None:
                    record.heard_at = now  # between commands nobody asks for heartbeats, so this time is no silence
                if self.stage is Stage.IDLE:
                    self.stage = Stage.WAITING
                yield ShowState(worker=name, state=event.kind)
            case RepliesAwaited():
                self._doing, self._timeout_s = event.doing, event.timeout_s or 0.0
                self._deadline = float("inf") if event.timeout_s is None else now + event.timeout_s
            case WorkerReplied(worker=name):
                yield from self._heard(name, now)
                yield from self._replied(event)
            case WorkerHeard(worker=name):
                yield from self._heard(name, now)
                self.workers[name].moved_at = now
            case HeartBeat(worker=name):
                yield from self._heard(name, now)
                yield from self._beat(event, now)
            case WorkerReported(worker=name):
                self.workers[name].report = event.report
                self.workers[name].closed = True  # nothing follows a report
                self._worker_ended(name, now)
            case ConnectionClosed(worker=name):
                self.workers[name].closed = True
                self._worker_ended(name, now)
            case ProcessEnded(worker=name):
                self.workers[name].code = event.code
                self._worker_ended(name, now)
            case OutOfReach(worker=name):
                self.workers[name].out_of_reach = event
                self._worker_ended(name, now)
            case TimePassed():
                pass
            case ToldToStop():
                yield from self._stop(now)

    def _heard(self, name: str, now: float) -> Iterator[MachineCommand]:
        record = self.workers[name]
        if record.named_at is not None and record.heard_at is not None:
            yield Announce(worker=name, line=f"heard from `{name}` again after {now - record.heard_at:.0f} s")
            yield ShowState(worker=name, state=record.command or "idle")
        record.heard_at, record.asked_at, record.named_at = now, None, None

    def _replied(self, event: WorkerReplied) -> Iterator[MachineCommand]:
        record = self.workers[event.worker]
        if record.command is None:
            if self.stage in (Stage.IDLE, Stage.WAITING):
                yield from self._fail(UnexpectedReply(worker=event.worker, kind=event.kind))
            return
        record.command = None
        yield ShowState(worker=event.worker, state="idle")
        if self.stage is Stage.WAITING and not self._busy():
            self.stage, self._deadline = Stage.IDLE, float("inf")

    def _beat(self, beat: HeartBeat, now: float) -> Iterator[MachineCommand]:
        record = self.workers[beat.worker]
        # Waiting for another worker is not a lack of progress, unless all workers wait.
        waits = beat.doing == "waiting" and any(self.workers[name].doing != "waiting" for name in self._busy())
        if beat.moves != record.moves or beat.doing in ("idle", "computing") or waits:
            record.moved_at, record.is_stuck = now, False
        record.moves, record.doing = beat.moves, beat.doing
        if beat.stack and not record.is_stuck and now - record.moved_at >= self.silence.stuck_s:
            record.is_stuck = True
            yield Announce(
                worker=beat.worker,
                line=f"`{beat.worker}` answers, but has made no progress for {now - record.moved_at:.0f} s:\n{beat.stack}",
            )

    def _worker_ended(self, name: str, now: float) -> None:
        record = self.workers[name]
        if record.ended_at is None:
            record.ended_at = now
            self.ended.append(name)
        if self.stage in (Stage.IDLE, Stage.WAITING):
            self.stage, self._deadline = Stage.SEARCHING, now + GRACE_S

    def _stop(self, now: float) -> Iterator[MachineCommand]:
        if self.stage is Stage.SEARCHING:
            self.stage = Stage.OVER
            yield KillAll()
        elif self.stage is not Stage.STOPPING:
            self.stage, self._deadline = Stage.STOPPING, now + GRACE_S
            yield SendStop()

    # -- Decisions that follow from the time and from what is known ----------------------------------------------------------

    def _check(self, now: float) -> Iterator[MachineCommand]:
        if self.stage is Stage.STOPPING:
            if now >= self._deadline or all(record.is_over for record in self.workers.values()):
                self.stage = Stage.OVER
                yield KillAll()
        elif self.stage is Stage.SEARCHING:
            if (failure := self._found(now)) is not None:
                yield from self._fail(failure)
        elif self.stage is Stage.WAITING:
            yield from self._check_silence(now)
            if self.stage is Stage.WAITING and now >= self._deadline:
                late = TooLate(workers=tuple(self._busy()), doing=self._doing, timeout_s=self._timeout_s)
                yield from self._fail(late)

    def _check_silence(self, now: float) -> Iterator[MachineCommand]:
        for name in self._busy():
            record = self.workers[name]
            if record.heard_at is None:
                continue  # the worker is starting: only the limit of the awaited reply applies
            silent_s = now - record.heard_at if record.asked_at is not None else 0.0
            if silent_s >= self.silence.dead_s:
                yield from self._fail(FellSilent(worker=name, seconds=self.silence.dead_s))
                return
            if silent_s >= self.silence.named_s and record.named_at is None:
                record.named_at = now
                yield Announce(worker=name, line=f"nothing heard from `{name}` for {silent_s:.0f} s")
                yield ShowState(worker=name, state="silent")
            if record.asked_at is None and now - record.heard_at >= self.silence.beat_s:
                record.asked_at = now
                is_slow = not record.is_stuck and now - record.moved_at >= self.silence.stuck_s
                yield AskForHeartBeat(worker=name, stack=is_slow)

    def _found(self, now: float) -> Failure | None:
        """The failure, as soon as the worker that failed first is known, or the time for the search is over."""
        for name in self.ended:
            is_culprit = self._is_culprit(name, now)
            if is_culprit is None and now < self._deadline:
                return None  # soon it is known how this worker has ended
            if is_culprit:
                return self._ended_early(name) if self._has_said_all(name, now) else None
        if now < self._deadline:
            return None
        return self._cut_off() or self._ended_early(self.ended[0])

    def _is_culprit(self, name: str, now: float) -> bool | None:
        """Return whether this worker ended for another reason than a lost peer, or None if that is not known yet."""
        record = self.workers[name]
        if record.report is not None:
            lost = record.report["type"] in PEER_ENDED
            by_collective = record.uses_collectives and any(word in record.report["what"] for word in COLLECTIVES)
            return not (lost or by_collective)
        if not self._has_said_all(name, now):
            return None
        # JAX aborts a process if its collective has lost another process.
        return not (record.uses_collectives and record.code == -signal.SIGABRT)

    def _has_said_all(self, name: str, now: float) -> bool:
        """Return whether nothing more can be learned about this worker's end."""
        record = self.workers[name]
        assert record.ended_at is not None
        return (record.closed and record.is_over) or now >= record.ended_at + LAST_WORDS_S

    def _cut_off(self) -> Failure | None:
        """The failure if a worker has lost the connection to a peer that still runs."""
        for name in self.ended:
            report = self.workers[name].report
            if report is not None and report["type"] == "PeerLost":
                peer = report["places"].get("peer")
                if peer in self.workers and peer not in self.ended:
                    return CutOff(worker=name, peer=peer)
        return None

    def _ended_early(self, name: str) -> EndedEarly:
        record = self.workers[name]
        return EndedEarly(worker=name, code=record.code, report=record.report, out_of_reach=record.out_of_reach)

    def _fail(self, failure: Failure) -> Iterator[MachineCommand]:
        self.stage = Stage.OVER
        yield KillAll()
        yield RaiseError(failure=failure)

    def _busy(self) -> list[str]:
        return [name for name, record in self.workers.items() if record.command is not None]

    def _leave_out_pauses(self, now: float) -> None:
        """Move all times forward by the time in which the coordinator did not listen."""
        last, self._listened_at = self._listened_at, now
        if last is None or now - last < PAUSE_S:
            return
        pause = now - last
        self._deadline += pause
        for record in self.workers.values():
            record.moved_at += pause
            for field in ("heard_at", "asked_at", "named_at", "ended_at"):
                if getattr(record, field) is not None:
                    setattr(record, field, getattr(record, field) + pause)

    def _tell(self, what: MachineEvent | MachineCommand, now: float) -> None:
        """Add an event or a command to the story. Leave out the kinds that come all the time, such as HeartBeat."""
        if isinstance(what, TimePassed | WorkerHeard | HeartBeat | AskForHeartBeat | ShowState):
            return
        details = [
            f"{value}" for name, value in vars(what).items() if name in ("worker", "kind", "code", "doing", "why")
        ]
        if isinstance(what, WorkerReported):
            details.append(what.report["type"])
        if isinstance(what, RaiseError):
            details.append(type(what.failure).__name__)
        self._story.append((now, " ".join([type(what).__name__, *details])))
