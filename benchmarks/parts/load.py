"""The load that other processes put on the machine during a measurement."""

import time
from pathlib import Path


class Others:
    """After `with Others(pids) as others: ...`, `others.cores` is the mean number of cores that other processes kept busy.

    This process and the processes `pids` are not counted as other processes. Their children are counted while they run, unless
    they are in `pids`; a child that has ended is not counted.
    """

    def __init__(self, pids: "list[int] | None" = None):
        self.pids = pids or []
        self.cores = 0.0

    def __enter__(self) -> "Others":
        self.began, self.busy, self.own = time.monotonic(), _machine_s(), self._own_s()
        return self

    def __exit__(self, *_: object) -> None:
        took = time.monotonic() - self.began
        self.cores = max(0.0, (_machine_s() - self.busy - (self._own_s() - self.own)) / took)

    def _own_s(self) -> float:
        times = [_process_s("self"), *(_process_s(str(pid)) for pid in self.pids)]
        return sum(times)


def _machine_s() -> float:
    """Busy seconds of all cores together, since the machine started."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return (int(user) + int(nice) + int(system) + int(irq) + int(softirq)) / TICKS


def _process_s(pid: str) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


TICKS = 100
"""Ticks of the kernel's clock per second."""
