"""Measures how each process spends its time: computing, sending, or waiting for another process.

A `Recorder` in every process times the steps of its sites. A `Profile` joins the records of all processes into a table, one
sentence that names the bottleneck, and a trace for Perfetto. `Plan.costs` reads from a profile how long each step takes. Times
come from the system's monotonic clock, which all processes of one machine share.

    kind      meaning
    env       stepping environments: in Python, or in a compiled program without other roles
    act       fragments of the actor; `env+act` if environments and actor are one compiled program
    learn     fragments of the learner; for any other role, the kind has the name of the role
    send      copying a message into a channel, and waiting while the channel is full
    wait      waiting for a message from another process; the span has the name of that process
    compile   compiling a program before its first run
    other     everything else: conversions, Choreo's own work, waiting for the coordinator
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from choreo.plans.step_times import StepPhase

MAX_SPANS = 20_000
"""The trace shows at most this many spans of each process. The totals count all spans."""
KIND_OF_ROLE = {"actor": "act", "learner": "learn"}
"""Roles whose kind of work has a different name than the role."""

Span = tuple[str, str, float, float]
"""One timed call: kind, name, begin and end in seconds."""


def kind_of(roles: Iterable[str]) -> str:
    """The kind of work of a segment with fragments of these roles.

    >>> kind_of(["env", "actor"]), kind_of([])
    ('env+act', 'other')
    """
    return "+".join(dict.fromkeys(KIND_OF_ROLE.get(role, role) for role in roles)) or "other"


class Recorder:
    """Times the steps of one process."""

    def __init__(self):
        self.began = time.monotonic()
        self.totals: dict[tuple[str, str], float] = {}
        """Seconds by kind and name. The time of a nested span counts only for the inner span."""
        self.steps: dict[StepPhase, tuple[int, float]] = {}
        """For each phase of a step: how often it ran, and the seconds of all runs together, without the time of nested spans."""
        self.spans: list[Span] = []
        """The first MAX_SPANS spans."""
        self._inner = 0.0
        """Seconds spent in spans nested in the current span."""

    def timed(
        self,
        kind: str,
        name: str,
        fn: Callable[..., Any],
        *,
        phase: StepPhase | None = None,
        runs: Callable[..., int] | int = 1,
    ) -> Callable[..., Any]:
        """The function `fn`, with every call timed; see `backend.Timed`."""

        def call(*args: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            begin = time.monotonic()
            try:
                return fn(*args)
            finally:
                end = time.monotonic()
                own = end - begin - self._inner
                self.totals[kind, name] = self.totals.get((kind, name), 0.0) + own
                if phase is not None:
                    times, seconds = self.steps.get(phase, (0, 0.0))
                    self.steps[phase] = times + (runs if isinstance(runs, int) else runs(*args)), seconds + own
                self._inner = outer + end - begin
                if len(self.spans) < MAX_SPANS:
                    self.spans.append((kind, name, begin, end))

        return call

    def to_json(self) -> dict[str, Any]:
        """Everything recorded so far."""
        totals = [[kind, name, seconds] for (kind, name), seconds in self.totals.items()]
        steps = [[*phase, times, seconds] for phase, (times, seconds) in self.steps.items()]
        return {"seconds": time.monotonic() - self.began, "totals": totals, "steps": steps, "spans": self.spans}


@dataclass(frozen=True)
class Profile:
    """How all workers of a run have spent their time."""

    workers: Mapping[str, dict[str, Any]]
    """For each worker, `Recorder.to_json()`."""
    plan_name: str = ""
    """The name of the plan that was run; see `Plan.name`."""

    def mean_seconds(self, phase: StepPhase) -> float | None:
        """The mean time of a phase of a step, over all its runs in all workers. None if it never ran. `Plan.costs` reads this."""
        found = [(times, seconds) for *of, times, seconds in self._steps if StepPhase(*of) == phase]
        times, seconds = sum(times for times, _ in found), sum(seconds for _, seconds in found)
        return seconds / times if times else None

    @property
    def _steps(self) -> list[list[Any]]:
        return [row for record in self.workers.values() for row in record["steps"]]

    def shares(self, worker: str) -> dict[str, float]:
        """The share of a worker's time that each kind of work took."""
        record = self.workers[worker]
        found: dict[str, float] = {}
        for kind, _, seconds in record["totals"]:
            found[kind] = found.get(kind, 0.0) + seconds / record["seconds"]
        found["other"] = found.get("other", 0.0) + max(0.0, 1.0 - sum(found.values()))
        return found

    def waits(self, worker: str) -> dict[str, float]:
        """For each other worker, the share of time that `worker` spent waiting for it."""
        record = self.workers[worker]
        found: dict[str, float] = {}
        for kind, name, seconds in record["totals"]:
            if kind == "wait":
                found[name] = found.get(name, 0.0) + seconds / record["seconds"]
        return found

    @property
    def kinds(self) -> list[str]:
        """All kinds of work that occur, in the order of the table's columns."""
        known = ["env", "act", "env+act", "learn", "send", "wait", "compile"]
        seen = dict.fromkeys(kind for name in self.workers for kind in self.shares(name) if kind != "other")
        return [*(k for k in known if k in seen), *(k for k in seen if k not in known), "other"]

    @property
    def verdict(self) -> str:
        """One sentence that names the worker with the longest wait, and the chain of workers that it waits for.

        If no worker waits at least 5% of its time for another worker, the sentence says that nobody waits.
        """
        longest = max(
            ((share, who, whom) for who in self.workers for whom, share in self.waits(who).items()), default=None
        )
        if longest is None or longest[0] < 0.05:
            return "Nobody waits for anybody."
        share, who, whom = longest
        said, seen = f"`{who}` waits {share:.0%} of its time for `{whom}`", {who}
        while whom not in seen:  # the worker `whom` may itself wait for a third worker
            seen.add(whom)
            busy = {kind: s for kind, s in self.shares(whom).items() if kind not in ("wait", "other")}
            waits = self.waits(whom)
            longest = max(waits, key=waits.__getitem__, default=whom)
            if longest not in seen and waits[longest] > max(busy.values(), default=0.0):
                said += f", which waits {waits[longest]:.0%} of its time for `{longest}`"
                whom = longest
            elif busy:
                said += f", which spends {max(busy.values()):.0%} of its time in {max(busy, key=busy.__getitem__)}"
        return f"{said}."

    def trace(self) -> str:
        """The spans in the JSON format of Chrome traces, which Perfetto opens."""
        first = min((span[2] for record in self.workers.values() for span in record["spans"]), default=0.0)
        events: list[dict[str, Any]] = []
        for pid, (worker, record) in enumerate(self.workers.items()):
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": worker}})
            for kind, name, begin, end in record["spans"]:
                times = {"ts": round(1e6 * (begin - first), 1), "dur": round(1e6 * (end - begin), 1)}
                events.append({"ph": "X", "name": f"{kind} {name}", "cat": kind, "pid": pid, "tid": 0, **times})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
