"""Train PPO on CartPole-v1 in a layout for some iterations, then print the memory of every process as JSON.

python resident.py fused|coarse|fine ITERATIONS
"""

import json
import os
import sys
from pathlib import Path

import jax

import choreo
from choreo.runtime.local import Local
from choreo.runtime.make import make_runtime


def main() -> None:
    layout, iterations = sys.argv[1], int(sys.argv[2])
    plan = choreo.plan("ppo", "CartPole-v1", LAYOUTS[layout], num_envs=8)
    runtime = make_runtime(None, plan, profile=False)
    runtime.start(jax.random.key(0))
    runtime.run(0, iterations)
    handles = runtime.pool.handles if isinstance(runtime, Local) else {}
    workers = {name: handle.process.pid for name, handle in handles.items()}
    print(json.dumps({name: megabytes(pid) for name, pid in {"coordinator": os.getpid(), **workers}.items()}))
    runtime.close()


def megabytes(pid: int) -> dict[str, float]:
    """The resident memory in MB: `rss` counts shared pages in full, `pss` divides them among the processes that share them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(size.split()[0]) * 1024 / 1e6 for name, size in (line.split(":") for line in lines)}
    return {"rss": sizes["Rss"], "pss": sizes["Pss"]}


LAYOUTS = {"fused": choreo.fused(), "coarse": choreo.coarse(workers=2), "fine": choreo.fine(workers=2)}

if __name__ == "__main__":
    main()
