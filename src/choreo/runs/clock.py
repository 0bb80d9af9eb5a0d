"""The wall time of a run: the total, and the part spent on running iterations."""

import contextlib
import math
import time
from collections.abc import Iterator

from choreo.runtime.base import Runtime


class Clock:
    """A clock that starts when it is made."""

    def __init__(self, *, earlier_seconds: float):
        """`earlier_seconds`: the time that the run took before it was resumed."""
        self._start, self._earlier = time.perf_counter(), earlier_seconds
        self._running, self._steps = 0.0, 0

    @property
    def seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start

    @property
    def run_seconds(self) -> float:
        """Seconds that the run has taken, including those before it was resumed."""
        return self._earlier + self.seconds

    @contextlib.contextmanager
    def running(self, runtime: Runtime, *, steps: int) -> Iterator[None]:
        """Measure the body of the `with` statement, which runs `steps` steps. The time for compiling is not counted."""
        start, compiled = time.perf_counter(), runtime.compile_seconds
        yield
        self._running += time.perf_counter() - start - (runtime.compile_seconds - compiled)
        self._steps += steps

    @property
    def steps_per_second(self) -> float:
        """Steps per second of running iterations; NaN before the first iteration."""
        return self._steps / self._running if self._running > 0 else math.nan
