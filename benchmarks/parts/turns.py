"""Measure several sides in short turns, so that other load on the machine affects all of them alike."""

from typing import Protocol

from parts.load import Others


class Side(Protocol):
    """One of the programs that are compared."""

    def seconds(self, iterations: int) -> tuple[float, float]:
        """Run `iterations` iterations; returns their wall and CPU time."""
        ...


Speeds = dict[str, list[float]]
"""For each side, its steps per second in each turn."""


def take_turns(
    sides: dict[str, Side], repeats: int, seconds: float, *, steps: int, pids: list[int], block: int = 1
) -> tuple[Speeds, Speeds, float]:
    """Let the sides run in turns, `repeats` times each.

    Returns the steps per second of wall time, the steps per second of CPU time, and the number of cores that other processes kept
    busy. An iteration takes `steps` steps. In each turn, a side runs for about `seconds` seconds; the number of its iterations is a
    multiple of `block`. `pids` are the ids of the processes of all sides, without this process.
    """
    blocks = {name: max(1, round(seconds / side.seconds(block)[0])) for name, side in sides.items()}
    wall: Speeds = {name: [] for name in sides}
    cpu: Speeds = {name: [] for name in sides}
    with Others(pids) as others:
        for _ in range(repeats):
            for name, side in sides.items():
                iterations = blocks[name] * block
                wall_s, cpu_s = side.seconds(iterations)
                wall[name].append(iterations * steps / wall_s)
                cpu[name].append(iterations * steps / cpu_s)
    return wall, cpu, others.cores


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Our speed divided by theirs, for each turn."""
    return [our / their for our, their in zip(ours, theirs, strict=True)]
