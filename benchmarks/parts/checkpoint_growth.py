"""Run DQN with a large replay. Print as JSON how much memory an evaluation, a checkpoint and the next iteration add.

python checkpoint_growth.py fused|coarse|apex CAPACITY
"""

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import choreo
from choreo.runs import checkpoint
from choreo.runtime.make import make_runtime

LAYOUTS = {
    "fused": choreo.fused(),
    "coarse": choreo.coarse(workers=2),
    "apex": choreo.apex(workers=2, buffers=2),
}
PAGE_MB = 4096 / 1e6
"""The smallest growth that can be measured."""


def main() -> None:
    layout, capacity = sys.argv[1], int(sys.argv[2])
    algo = choreo.DQN(capacity=capacity, buffer_shards=2)
    the_plan = choreo.plan(algo, "jax:CartPole-v1", LAYOUTS[layout], num_envs=8)
    runtime = make_runtime(None, the_plan, profile=False)
    runtime.start(jax.random.key(0))
    runtime.run(0, 100)
    handles = runtime.pool.handles if hasattr(runtime, "pool") else {}
    pids = {"coordinator": os.getpid(), **{name: handle.process.pid for name, handle in handles.items()}}
    replay = jax.tree.leaves(the_plan.carry.replay)
    sizes = {"replay_mb": sum(map(megabytes, replay)), "largest_array_mb": max(map(megabytes, replay))}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"

        def evaluate() -> None:
            jax.block_until_ready(algo.policy(runtime.carry(part="train")))

        def save() -> None:
            checkpoint.save_stream(path, the_plan.carry, runtime.stream, iteration=100)

        def run_on() -> None:  # if anything still referred to the memory of the replay, the iteration would copy it
            runtime.run(100, 101)

        grown = {work.__name__: growth(pids, work) for work in (evaluate, save, run_on)}
    runtime.close()
    print(json.dumps({**sizes, **grown}))


def growth(pids: dict[str, int], work: Callable[[], None]) -> dict[str, float]:
    """For each process: the peak of its memory during `work`, minus its memory before, in MB; at least `PAGE_MB`."""
    work()  # the first call compiles small functions
    # Return freed memory to the system: `work` could reuse this memory, and some growth would be hidden.
    ctypes.CDLL(None).malloc_trim(0)
    before = {}
    for name, pid in pids.items():
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # sets the peak (VmHWM) to the present size
        before[name] = status(pid, "VmRSS")
    work()
    return {name: max(PAGE_MB, status(pid, "VmHWM") - before[name]) for name, pid in pids.items()}


def status(pid: int, field: str) -> float:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024 / 1e6


def megabytes(leaf: jax.ShapeDtypeStruct) -> float:
    return int(np.prod(leaf.shape)) * leaf.dtype.itemsize / 1e6


if __name__ == "__main__":
    main()
