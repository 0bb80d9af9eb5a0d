"""A plan that runs, some iterations at a time, in whatever processes its runtime has."""

import time
from typing import Any

import jax

from choreo.plans.plan import Plan
from choreo.runtime.make import make_runtime


class Running:
    """`options` are those of the runtime; None takes the one that `choreo.train` would."""

    def __init__(self, runtime: str | None, plan: Plan, **options: Any):
        self.runtime, self.done = make_runtime(runtime, plan, **options), 0
        self.runtime.start(jax.random.key(0))

    @property
    def pids(self) -> list[int]:
        """Of its workers, if it has some."""
        return [member.process.pid for member in getattr(self.runtime, "members", {}).values()]

    def seconds(self, iterations: int) -> float:
        began = time.perf_counter()
        self.runtime.run(self.done, self.done + iterations)
        self.done += iterations
        return time.perf_counter() - began

    def close(self) -> None:
        self.runtime.close()
