"""How long does a run take to finish its first iteration, compared with Stable-Baselines3? And how much memory does a run need?

All measurements train PPO on Gymnasium's CartPole-v1 with 8 environments.
- Start: each side starts new processes, in turns. The result is the time from the start of a process to the end of its first
  iteration (128 steps of each environment, then 16 updates). The starts are warm: before the measurement, one start of each side
  fills Choreo's cache of compiled programs and the system's cache of files.
- Size: the resident memory of the process of `fused`, of a worker that acts (`coarse`), and of a worker that only steps
  environments (`fine`), divided by the limit that we set in `ALLOWED_MB` (a ratio below 1 is good). `rss` counts shared pages in
  full, `pss` divides them among the processes that share them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import write_result
from parts import rival
from parts.load import Others

PARTS = Path(__file__).parent / "parts"
ALLOWED_MB = {"fused": 1000, "acting": 350, "env_only": 60}
WORDS = {
    "fused": "one process with everything",
    "acting": "an acting worker",
    "env_only": "a worker with environments only",
}
PROCESS = {"fused": ("fused", "coordinator"), "acting": ("coarse", "env+actor-0"), "env_only": ("fine", "env-0")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="measure only the shortest part, to test that this script runs"
    )
    quick = parser.parse_args().quick
    if not quick and rival.is_installed():
        starts(repeats=9)
    for kind in ["fused"] if quick else ALLOWED_MB:
        sizes(kind, quick=quick)


def starts(*, repeats: int) -> None:
    pythons = {"choreo": Path(sys.executable), "sb3": rival.PYTHON}
    for side, python in pythons.items():
        start(python, side)  # fills the caches
    seconds: dict[str, list[float]] = {side: [] for side in pythons}
    with Others() as others:
        for _ in range(repeats):
            for side, python in pythons.items():
                seconds[side].append(start(python, side))
    ratios = [ours / theirs for ours, theirs in zip(seconds["choreo"], seconds["sb3"], strict=True)]
    write_result(
        "warm_start",
        quick=False,
        question="seconds from a warm start to the end of the first iteration, as a ratio to Stable-Baselines3",
        ratio=statistics.median(ratios),
        ratios=ratios,
        choreo_s=statistics.median(seconds["choreo"]),
        sb3_s=statistics.median(seconds["sb3"]),
        choreo_best_s=min(seconds["choreo"]),
        sb3_best_s=min(seconds["sb3"]),
        busy_cores_of_others=others.cores,
        repeats=repeats,
    )


def start(python: Path, side: str) -> float:
    """Start a process. Returns the seconds from its start to the end of its first iteration."""
    began = time.perf_counter()
    command = [python, "-W", "ignore", PARTS / "first_iteration.py", side]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - began
    assert line == "finished\n" and process.returncode == 0, f"{side} failed; see its error above"
    return took


def sizes(kind: str, *, quick: bool) -> None:
    layout, name = PROCESS[kind]
    command = [sys.executable, PARTS / "resident.py", layout, "2" if quick else "100"]
    measured = [
        json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)[name]
        for _ in range(1 if quick else 3)
    ]
    ratios = [each["rss"] / ALLOWED_MB[kind] for each in measured]
    write_result(
        f"resident_{kind}",
        quick=quick,
        question=f"resident size of {WORDS[kind]}, as a ratio to {ALLOWED_MB[kind]} MB",
        ratio=statistics.median(ratios),
        ratios=ratios,
        rss_mb=statistics.median(each["rss"] for each in measured),
        pss_mb=statistics.median(each["pss"] for each in measured),
    )


if __name__ == "__main__":
    main()
