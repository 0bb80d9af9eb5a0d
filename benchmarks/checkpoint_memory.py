"""How much memory do an evaluation and a checkpoint of DQN add, compared with the size of a replay of a million steps?

The environment is our CartPole, compiled. For each process, we measure the peak of its resident memory during an evaluation or a
checkpoint, minus its resident memory before. The result is the largest of these differences, divided by the size of the replay
(29 MB). A result below 1 is good. With workers, the replay is not in the coordinator, and the coordinator receives at most 4 MiB
of the replay at a time. For the evaluation, we only gather the parameters, and run no episodes: the memory that episodes need does
not depend on the replay.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import write_result

PARTS = Path(__file__).parent / "parts"
WORDS = {
    "fused": "in one process",
    "coarse": "with the replay at the learner's worker",
    "apex": "with the replay divided between two workers",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="measure only the shortest part, to test that this script runs"
    )
    quick = parser.parse_args().quick
    for layout in ["fused"] if quick else WORDS:
        measure(layout, capacity=10_000 if quick else 1_000_000, repeats=1 if quick else 3, quick=quick)


def measure(layout: str, *, capacity: int, repeats: int, quick: bool) -> None:
    command = [sys.executable, PARTS / "checkpoint_growth.py", layout, str(capacity)]
    measured = [json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) for _ in range(repeats)]
    ratios = [max(most(each, "evaluate"), most(each, "save")) / each["replay_mb"] for each in measured]
    write_result(
        f"checkpoint_memory_{layout}",
        quick=quick,
        question="memory that an evaluation and a checkpoint of DQN add, with a replay of a million steps "
        f"{WORDS[layout]}, as a ratio to the size of the replay",
        ratio=statistics.median(ratios),
        ratios=ratios,
        replay_mb=measured[0]["replay_mb"],
        largest_array_mb=measured[0]["largest_array_mb"],
        evaluation_mb=statistics.median(most(each, "evaluate") for each in measured),
        checkpoint_mb=statistics.median(most(each, "save") for each in measured),
        next_iteration_mb=statistics.median(most(each, "run_on") for each in measured),
    )


def most(measured: dict[str, Any], work: str) -> float:
    """The growth of the process whose memory grew most during `work`."""
    return max(measured[work].values())


if __name__ == "__main__":
    main()
