"""How much faster do `max_lag` and `merge="any"` make a run if the learner, the environments or one worker is slow?

IMPALA runs with two workers in three layouts: `coarse` in lockstep, `coarse` with `max_lag=4`, and `coarse` with `max_lag=8,
merge="any"`. A step of an environment sleeps for 1 ms. There are three scenes:
- `slow_learner`: a large network also makes the learner slow.
- `slow_env`: the learner is fast, so the environments take most of the time.
- `straggler`: in one of the two workers, a step of an environment sleeps for 4 ms.
In each scene, the three layouts take turns of a few seconds. Compilation is not measured. The result for each relaxed layout is its
steps per second divided by the steps per second in lockstep (the median over the turns), and the verdict of `--profile`: which
worker waits for which other worker.
"""

import argparse
import contextlib
import functools
import os
import statistics
import tempfile

from harness import write_result
from parts.envs import Straggling, Waiting
from parts.load import Others
from parts.running import Running

import choreo
from choreo import networks
from choreo.algos.impala import IMPALA

NUM_ENVS, UNROLL = 4, 16
SCENES = {
    "slow_learner": (Waiting, (512, 512), "environments that sleep for 1 ms and a learner of two layers of 512"),
    "slow_env": (Waiting, (64, 64), "environments that sleep for 1 ms and a fast learner"),
    "straggler": (Straggling, (64, 64), "two workers, one of them four times slower than the other"),
}
LAYOUTS = {
    "lockstep": choreo.coarse(workers=2),
    "max_lag": choreo.coarse(workers=2, max_lag=4),
    "any": choreo.coarse(workers=2, max_lag=8, merge="any"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="take one short turn, to test that this script runs")
    parser.add_argument("--scene", choices=SCENES, help="measure only this scene")
    options = parser.parse_args()
    scenes = [options.scene] if options.scene else list(SCENES)
    for scene in scenes[-1:] if options.quick else scenes:
        compare(scene, quick=options.quick)


def compare(scene: str, *, quick: bool) -> None:
    env, hidden, words = SCENES[scene]
    repeats, seconds = (1, 0.05) if quick else (7, 3.0)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        names = [name for name in LAYOUTS if name != "max_lag" or not quick]
        sides = {name: Training(_environment(env, f"{folder}/{name}"), LAYOUTS[name], hidden) for name in names}
        for side in sides.values():
            stack.callback(side.close)
        counts = {name: max(1, round(seconds / side.seconds(2)) * 2) for name, side in sides.items()}
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        with Others([pid for side in sides.values() for pid in side.pids]) as others:
            for _ in range(repeats):
                for name, side in sides.items():
                    speeds[name].append(counts[name] * UNROLL * NUM_ENVS / side.seconds(counts[name]))
        verdicts = {name: side.runtime.profile().verdict for name, side in sides.items()}
    for name in names[1:]:
        ratios = [fast / slow for fast, slow in zip(speeds[name], speeds["lockstep"], strict=True)]
        how = 'merge="any", max_lag=8' if name == "any" else "max_lag=4"
        write_result(
            f"relaxed_{scene}_{name}",
            quick=quick,
            question=f"steps per second with {how} as a ratio to lockstep: {words}",
            ratio=statistics.median(ratios),
            ratios=ratios,
            lockstep_steps_per_second=statistics.median(speeds["lockstep"]),
            relaxed_steps_per_second=statistics.median(speeds[name]),
            lockstep_verdict=verdicts["lockstep"],
            relaxed_verdict=verdicts[name],
            busy_cores_of_others=others.cores,
            num_envs=NUM_ENVS,
            repeats=repeats,
        )


def _environment(env, mark: str):
    return functools.partial(env, mark, os.getpid()) if env is Straggling else env


class Training(Running):
    """IMPALA in a layout, with worker processes."""

    def __init__(self, env, layout, hidden):
        algo = IMPALA(unroll=UNROLL, network=functools.partial(networks.mlp, hidden=hidden))
        super().__init__("local", choreo.plan(algo, env, layout, num_envs=NUM_ENVS), profile=True)
        self.seconds(2)  # compiles


if __name__ == "__main__":
    main()
