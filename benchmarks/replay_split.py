"""How fast does a replay at a separate site add steps and draw items, compared with Reverb and cpprb?

One process makes steps, one holds the replay (1e5 steps of CartPole), and one draws items. For every 4 steps of each of 8
environments, 8 batches of 64 items are drawn; these numbers are the same for all sides. There are two measurements. In the first,
items are drawn uniformly. In the second, items are drawn by priority, and new priorities are written back.
- Choreo runs an algorithm in a layout of three sites, in lockstep, over shared memory and over TCP. Choreo also steps CartPole,
  while the rivals add steps that were made in advance.
- Reverb has a server, an inserting client and a sampling client. The clients connect to the server over loopback. Reverb prefetches
  batches, so Reverb draws some batches before the priorities of the last iteration are written back. Choreo always draws after
  that.
- cpprb has no process for its buffer and sends nothing: the process that adds and the process that draws share memory. So the
  ratio to cpprb shows the cost of a separate site.
Each rival is used in the fastest way that we found (`parts/reverb_split.py`, `parts/cpprb_split.py`). All sides take turns of about
a second. Compilation is not measured. The result for each rival is the median ratio of iterations per second over the turns (above
1: Choreo is faster), the spread, and the number of steps and items per second.
"""

import argparse
import contextlib
import statistics
from pathlib import Path
from typing import Any

from harness import write_result
from parts import replay_numbers as same
from parts import replay_rivals
from parts.load import Others
from parts.replay_traffic import Traffic
from parts.running import Running

import choreo

LAYOUT = choreo.Layout(choreo.Group("env", "actor"), choreo.Group("buffer"), choreo.Group("learner"))
CARRIERS = {"shm": "shared memory", "tcp": "TCP"}
WORDS = {"cpprb": "cpprb (in memory that two processes share)", "reverb": "Reverb over loopback", "tcp": "TCP"}
CARRIER_OF = {"cpprb": "shm", "reverb": "tcp"}
"""The carrier that is most similar to what each rival uses. The result also contains the ratio with the other carrier."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="take one short turn, without rivals, to test that this script runs"
    )
    parser.add_argument("--sampler", choices=("uniform", "prioritized"), help="measure only this sampler")
    options = parser.parse_args()
    samplers = [options.sampler] if options.sampler else ["uniform", "prioritized"]
    rivals = {} if options.quick else replay_rivals.installed()
    for sampler in samplers[-1:] if options.quick else samplers:
        compare(sampler, rivals, quick=options.quick)


def compare(sampler: str, commands: dict[str, tuple[Path, str]], *, quick: bool) -> None:
    repeats, seconds = (1, 0.01) if quick else (9, 1.0)
    with contextlib.ExitStack() as stack:
        sides: dict[str, Any] = {}
        for name in CARRIERS:
            sides[name] = stack.enter_context(contextlib.closing(Site(sampler, name, quick=quick)))
        for name, command in commands.items():
            sides[name] = stack.enter_context(contextlib.closing(replay_rivals.Process(command, sampler)))
        speeds, load = take_turns(sides, repeats, seconds)
    for other, our in [("tcp", "shm")] if quick else [(rival, CARRIER_OF[rival]) for rival in commands]:
        ratios = {name: [a / b for a, b in zip(speeds[name], speeds[other], strict=True)] for name in CARRIERS}
        ours, others = statistics.median(speeds[our]), statistics.median(speeds[other])
        write_result(
            f"replay_split_{sampler}_vs_{other}",
            quick=quick,
            question=f"adding to and drawing from a replay at a site of its own ({sampler}, over {CARRIERS[our]}), as a "
            f"ratio to {WORDS[other]}",
            ratio=statistics.median(ratios[our]),
            ratios=ratios[our],
            **{f"ratio_over_{name}": statistics.median(ratios[name]) for name in CARRIERS},
            inserts_per_second=[ours * same.STEPS, others * same.STEPS],
            samples_per_second=[ours * same.ITEMS, others * same.ITEMS],
            items_per_insert=same.ITEMS / same.STEPS,
            busy_cores_of_others=load,
            repeats=repeats,
        )


def take_turns(sides: dict[str, Any], repeats: int, seconds: float) -> tuple[dict[str, list[float]], float]:
    """Let the sides take turns, each `repeats` times.

    Returns the iterations per second of each side and turn, and the number of cores that other processes kept busy.
    """
    counts = {}
    for name, side in sides.items():
        side.seconds(5)  # the first draw is slower
        counts[name] = max(5, round(5 * seconds / side.seconds(5)))
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    with Others([pid for side in sides.values() for pid in side.pids]) as others:
        for _ in range(repeats):
            for name, side in sides.items():
                speeds[name].append(counts[name] / side.seconds(counts[name]))
    return speeds, others.cores


class Site(Running):
    """Choreo, with a worker process for each of the three sites."""

    def __init__(self, sampler: str, carrier: str, *, quick: bool):
        algo = Traffic(prioritized=sampler == "prioritized")
        plan = choreo.plan(algo, "jax:CartPole-v1", LAYOUT, num_envs=same.NUM_ENVS)
        super().__init__("local", plan, profile=False, carrier=carrier)
        self.seconds(2 if quick else same.FILLED // same.STEPS)  # compiles, and fills the replay


if __name__ == "__main__":
    main()
