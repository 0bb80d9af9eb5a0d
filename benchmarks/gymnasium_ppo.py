"""How fast is PPO on Gymnasium environments in one process, compared with the environments alone and Stable-Baselines3?

Choreo and Stable-Baselines3 have the same settings: 8 environments, rollouts of 128 steps, 4 epochs, minibatches of 256, networks
with 2 layers of 64 tanh units. "The environments alone" means Gymnasium's SyncVectorEnv with random actions, drawn in advance.
Stable-Baselines3 uses its DummyVecEnv and one thread. All sides take short turns, so that other load on the machine affects all of
them. Compilation is not measured. There is one result for each environment and each side that Choreo is compared with: the median
ratio of steps per second over the turns, the spread, the same ratio in CPU time, and the number of cores that other processes kept
busy.
"""

import argparse
import contextlib
import os
import statistics
import time

import gymnasium
import jax
import numpy as np
from harness import write_result
from parts import rival
from parts.mujoco import without_mujoco_if_missing
from parts.turns import ratios, take_turns

import choreo
from choreo.runtime.make import make_runtime

NUM_ENVS, UNROLL = 8, 128
ENVS = {"CartPole-v1": "cartpole", "Hopper-v5": "mujoco"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="take one short turn, to test that this script runs")
    parser.add_argument("--env", choices=ENVS, help="measure only this environment")
    options = parser.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as choreo.train does for environments in Python
    envs = [options.env] if options.env else list(ENVS)
    envs = without_mujoco_if_missing(envs, "Hopper-v5")
    for env in reversed(envs[:1] if options.quick else envs):
        compare(env, quick=options.quick, with_rival=not options.quick and rival.is_installed())


def compare(env: str, *, quick: bool, with_rival: bool) -> None:
    repeats, seconds = (1, 0.05) if quick else (41, 0.4)
    with contextlib.ExitStack() as stack:
        sides: dict[str, Alone | Training | rival.StableBaselines] = {"alone": Alone(env), "choreo": Training(env)}
        if with_rival:
            sides["sb3"] = rival.StableBaselines(env, NUM_ENVS)
        for side in sides.values():
            stack.callback(side.close)
        pids = [side.process.pid for side in sides.values() if isinstance(side, rival.StableBaselines)]
        wall, cpu, load = take_turns(sides, repeats, seconds, steps=UNROLL * NUM_ENVS, pids=pids)
    words = {"alone": "the same environments stepped alone", "sb3": "Stable-Baselines3 (one thread)"}
    for other in [name for name in reversed(sides) if name != "choreo"]:
        write_result(
            f"gymnasium_{ENVS[env]}_vs_{other}",
            quick=quick,
            question=f"steps per second of PPO on {env} in one process, as a ratio to {words[other]}",
            ratio=statistics.median(ratios(wall["choreo"], wall[other])),
            ratios=ratios(wall["choreo"], wall[other]),
            ratio_of_cpu_time=statistics.median(ratios(cpu["choreo"], cpu[other])),
            choreo_steps_per_second=statistics.median(wall["choreo"]),
            other_steps_per_second=statistics.median(wall[other]),
            busy_cores_of_others=load,
            num_envs=NUM_ENVS,
            repeats=repeats,
        )


class Alone:
    """Only the environments, with random actions. An iteration takes `UNROLL` steps."""

    def __init__(self, env: str):
        self.envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(env)] * NUM_ENVS)
        self.envs.reset(seed=0)
        self.actions = np.stack([self.envs.action_space.sample() for _ in range(UNROLL)])

    def seconds(self, iterations: int) -> tuple[float, float]:
        """Run `iterations` iterations; returns their wall and CPU time."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(iterations):
            for action in self.actions:
                self.envs.step(action)
        return time.perf_counter() - wall, time.process_time() - cpu

    def close(self) -> None:
        self.envs.close()


class Training:
    """Choreo, with everything in this process."""

    def __init__(self, env: str):
        algo = choreo.PPO(unroll=UNROLL, epochs=4, minibatch_size=256)
        plan = choreo.plan(algo, env, choreo.fused(), num_envs=NUM_ENVS)
        self.runtime = make_runtime("inprocess", plan, profile=False)
        self.runtime.start(jax.random.key(0))
        self.done = 0
        self.seconds(2)  # compiles

    def seconds(self, iterations: int) -> tuple[float, float]:
        """Run the next `iterations` iterations; returns their wall and CPU time."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.runtime.run(self.done, self.done + iterations)
        self.done += iterations
        return time.perf_counter() - wall, time.process_time() - cpu

    def close(self) -> None:
        self.runtime.close()


if __name__ == "__main__":
    os.environ.setdefault("MUJOCO_GL", "disabled")
    main()
