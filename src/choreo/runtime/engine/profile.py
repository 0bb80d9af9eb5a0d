"""What each site did when: who computes, who waits, and for whom.

A `Recorder` in every process times the steps of its sites; `Profile` puts them together, as a table with one sentence that
names who waits for whom, and as a trace that Perfetto opens. Clocks agree on one machine: the system's monotonic clock.

    kind      what the time went into
    env       environments: Python, or compiled by themselves
    act       the actor's fragments; `env+act` where both are one compiled program
    learn     the learner's
    send      a channel was full, or the copy into it
    wait      for a message of the named site
    compile   before a compiled program runs for the first time
    other     the rest: conversions, Choreo's own work, waiting for the coordinator
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_SPANS = 20_000
"""Spans kept per process for the trace; totals go on."""
WORDS = {"actor": "act", "learner": "learn"}
"""Roles, as the table calls what they do."""

Span = tuple[str, str, float, float]
"""kind, name, begin, end in seconds"""


def kind_of(roles: Iterable[str]) -> str:
    """What a segment with fragments of these roles does.

    >>> kind_of(["env", "actor"]), kind_of([])
    ('env+act', 'other')
    """
    return "+".join(dict.fromkeys(WORDS.get(role, role) for role in roles)) or "other"


class Recorder:
    """Times the steps of one process."""

    def __init__(self):
        self.began = time.monotonic()
        self.totals: dict[tuple[str, str], float] = {}
        self.spans: list[Span] = []
        self._inner = 0.0
        """Time spent in spans within the current one."""

    def watch(self, kind: str, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*args: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            begin = time.monotonic()
            try:
                return fn(*args)
            finally:
                end = time.monotonic()
                self.totals[kind, name] = self.totals.get((kind, name), 0.0) + end - begin - self._inner
                self._inner = outer + end - begin
                if len(self.spans) < MOST_SPANS:
                    self.spans.append((kind, name, begin, end))

        return timed

    def take(self) -> dict[str, Any]:
        """Everything so far, as JSON would have it."""
        totals = [[kind, name, seconds] for (kind, name), seconds in self.totals.items()]
        return {"seconds": time.monotonic() - self.began, "totals": totals, "spans": self.spans}


@dataclass(frozen=True)
class Profile:
    """What every worker did."""

    workers: Mapping[str, dict[str, Any]]
    """By name: what its `Recorder` took down."""

    def shares(self, worker: str) -> dict[str, float]:
        """Of a worker's time, the share of each kind."""
        taken = self.workers[worker]
        found: dict[str, float] = {}
        for kind, _, seconds in taken["totals"]:
            found[kind] = found.get(kind, 0.0) + seconds / taken["seconds"]
        found["other"] = found.get("other", 0.0) + max(0.0, 1.0 - sum(found.values()))
        return found

    def waits(self, worker: str) -> dict[str, float]:
        """For whom a worker waited, as shares of its time."""
        taken = self.workers[worker]
        found: dict[str, float] = {}
        for kind, name, seconds in taken["totals"]:
            if kind == "wait":
                found[name] = found.get(name, 0.0) + seconds / taken["seconds"]
        return found

    @property
    def kinds(self) -> list[str]:
        """All kinds that occur, in the order of the table."""
        known = ["env", "act", "env+act", "learn", "send", "wait", "compile"]
        seen = dict.fromkeys(kind for name in self.workers for kind in self.shares(name) if kind != "other")
        return [*(k for k in known if k in seen), *(k for k in seen if k not in known), "other"]

    @property
    def verdict(self) -> str:
        """One sentence: who waits for whom."""
        longest = max(
            ((share, who, whom) for who in self.workers for whom, share in self.waits(who).items()), default=None
        )
        if longest is None or longest[0] < 0.05:
            return "Nobody waits for anybody."
        share, who, whom = longest
        said, seen = f"`{who}` waits {share:.0%} of its time for `{whom}`", {who}
        while whom not in seen:  # whoever is waited for may wait for another
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
        """The spans as a trace that Perfetto and chrome://tracing open."""
        first = min((span[2] for taken in self.workers.values() for span in taken["spans"]), default=0.0)
        events: list[dict[str, Any]] = []
        for pid, (worker, taken) in enumerate(self.workers.items()):
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": worker}})
            for kind, name, begin, end in taken["spans"]:
                times = {"ts": round(1e6 * (begin - first), 1), "dur": round(1e6 * (end - begin), 1)}
                events.append({"ph": "X", "name": f"{kind} {name}", "cat": kind, "pid": pid, "tid": 0, **times})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
