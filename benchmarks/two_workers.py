"""If environments are slow, how much faster are two workers than one process?

PPO trains with 8 environments, in one process and with `coarse(workers=2)`. There are three cases: a step sleeps for 1 ms (like a
simulator in a different process); a step computes for 1 ms (like a simulator in this process); or the environment is MuJoCo's
Hopper-v5. Both sides take turns of a few seconds. Compilation is not measured. The result for each case is the median ratio of
steps per second over the turns, the spread, and the number of cores that other processes kept busy. If steps compute, two workers
can be faster than one process only with two free cores.
"""

import argparse
import contextlib
import os
import statistics

import jax
from harness import write_result
from parts.envs import Computing, Waiting
from parts.load import Others
from parts.mujoco import without_mujoco_if_missing
from parts.running import Running

import choreo

NUM_ENVS, UNROLL = 8, 128
CASES = {
    "sleeping": (Waiting, "an environment whose step sleeps for 1 ms"),
    "computing": (Computing, "an environment whose step computes for 1 ms"),
    "mujoco": ("Hopper-v5", "Hopper-v5"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="take one short turn, to test that this script runs")
    parser.add_argument("--case", choices=CASES, help="measure only this case")
    options = parser.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as choreo.train does for environments in Python
    cases = [options.case] if options.case else list(CASES)[::-1]
    cases = without_mujoco_if_missing(cases, "mujoco")
    for case in cases[-1:] if options.quick else cases:
        compare(case, quick=options.quick)


def compare(case: str, *, quick: bool) -> None:
    env, words = CASES[case]
    repeats, seconds = (1, 0.05) if quick else (11, 2.0)
    with contextlib.ExitStack() as stack:
        sides = [Training(env, choreo.fused(), quick), Training(env, choreo.coarse(workers=2), quick)]
        for side in sides:
            stack.callback(side.close)
        iterations = [max(1, round(seconds / side.seconds(1))) for side in sides]
        speeds: list[list[float]] = [[], []]
        with Others([pid for side in sides for pid in side.pids]) as others:
            for _ in range(repeats):
                for side, count, speed in zip(sides, iterations, speeds, strict=True):
                    speed.append(count * side.steps_per_iteration / side.seconds(count))
    ratios = [two / one for one, two in zip(*speeds, strict=True)]
    write_result(
        f"two_workers_{case}",
        quick=quick,
        question=f"steps per second of PPO on {words}, with two workers as a ratio to one process",
        ratio=statistics.median(ratios),
        ratios=ratios,
        one_process_steps_per_second=statistics.median(speeds[0]),
        two_workers_steps_per_second=statistics.median(speeds[1]),
        busy_cores_of_others=others.cores,
        num_envs=NUM_ENVS,
        repeats=repeats,
    )


class Training(Running):
    """PPO in a layout, in the runtime that `choreo.train` would choose."""

    def __init__(self, env, layout, quick: bool):
        algo = choreo.PPO(unroll=8, epochs=1, minibatch_size=64) if quick else choreo.PPO(unroll=UNROLL)
        self.steps_per_iteration = algo.unroll * NUM_ENVS
        super().__init__(None, choreo.plan(algo, env, layout, num_envs=NUM_ENVS), profile=False)
        self.seconds(2)  # compiles


if __name__ == "__main__":
    os.environ.setdefault("MUJOCO_GL", "disabled")
    main()
