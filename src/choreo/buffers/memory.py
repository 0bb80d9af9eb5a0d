"""Check that a replay fits into the memory of this machine. The check needs only shapes, so it comes before the allocation."""

import math
import os
from pathlib import Path

import jax

from choreo.errors import AlgorithmError
from choreo.types import PyTree

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_fits(state: PyTree, *, capacity: int) -> int:
    """Return the size of `state` in bytes; raise AlgorithmError if this machine has less memory."""
    num_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    limit = memory_bytes()
    if num_bytes > limit:
        raise AlgorithmError(
            f"A replay of {capacity:,} steps takes {_gigabytes(num_bytes)}; this machine has {_gigabytes(limit)} of memory.",
            fix=f"Use a capacity of {_round_down(capacity * limit * 0.8 / num_bytes):,} or less. If observations are frames, "
            "store them as uint8, and each frame only once (Replay(stack=...)).",
        )
    return num_bytes


def memory_bytes() -> int:
    """The memory that this process may use: the limit of its container, or all memory of the machine."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.exists() else "max"
    return machine if limit == "max" else min(machine, int(limit))


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


def _round_down(x: float) -> int:
    """The largest number with two significant digits that is not above `x`."""
    unit = 10 ** max(len(str(int(x))) - 2, 0)
    return int(x) // unit * unit
