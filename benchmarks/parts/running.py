"""Run a plan, some iterations at a time."""

import time
from typing import Any

import jax

from choreo.plans.plan import Plan
from choreo.runtime.local import Local
from choreo.runtime.make import make_runtime


class Running:
    """Runs a plan in a runtime.

    `runtime` is the name of the runtime; if `runtime` is None, it is the runtime that `choreo.train` would use. `options` are the
    options of the runtime.
    """

    def __init__(self, runtime: str | None, plan: Plan, **options: Any):
        self.runtime, self.done = make_runtime(runtime, plan, **options), 0
        self.runtime.start(jax.random.key(0))

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers; empty if there are none."""
        handles = self.runtime.pool.handles if isinstance(self.runtime, Local) else {}
        return [handle.process.pid for handle in handles.values()]

    def seconds(self, iterations: int) -> float:
        """Run the next `iterations` iterations; returns their wall time."""
        began = time.perf_counter()
        self.runtime.run(self.done, self.done + iterations)
        self.done += iterations
        return time.perf_counter() - began

    def close(self) -> None:
        self.runtime.close()
