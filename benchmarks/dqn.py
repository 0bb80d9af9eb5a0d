"""How fast does DQN train on CartPole in one process, compared with Stable-Baselines3 and RLlib?

All sides train plain DQN (neither double nor dueling, 1-step) with 8 environments, networks with 2 layers of 128 ReLU units, and a
replay of 1e5 steps. After every 4 steps of each environment there are 8 updates with batches of 64. This is Choreo's default
number of updates. A second measurement compares Choreo with Stable-Baselines3 only, and makes 1 update instead of 8; this is the
default of Stable-Baselines3. The names of its results end with `_seldom`. All sides have the same settings, except that Choreo's
loss is the squared error and the loss of the rivals is Huber's.

Choreo is measured in two ways. `fused` steps gymnax's CartPole in one compiled loop (Choreo's own CartPole, if gymnax is not
installed). `gymnasium` steps Gymnasium's CartPole, as the rivals do. Stable-Baselines3 uses its DummyVecEnv. Each side has one
thread, and RLlib runs in one process. All sides take short turns, so that other load on the machine affects all of them. RLlib's
turns are longer, because RLlib reports only after 1024 steps. Compilation is not measured. The result for each way and rival is the
median ratio of steps per second over the turns, the spread, the same ratio in CPU time, and the number of cores that other
processes kept busy.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import statistics
import time
from pathlib import Path

# XLA then uses one thread. NPROC must be set before the first computation with JAX, and importing gymnax computes with JAX.
os.environ.setdefault("NPROC", "1")

import jax
from harness import write_result
from parts import dqn_numbers as same
from parts import dqn_rivals
from parts.turns import ratios, take_turns

import choreo
from choreo.networks import q_mlp
from choreo.runs.config import STEPS_PER_CHUNK
from choreo.runtime.make import make_runtime

GYMNAX = importlib.util.find_spec("gymnax") is not None
WORDS = {
    "fused": "compiled whole, on gymnax" if GYMNAX else "compiled whole",
    "gymnasium": "on Gymnasium",
    "sb3": "Stable-Baselines3 (one thread)",
    "rllib": "RLlib (one process)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="take one short turn, without rivals, to test that this script runs"
    )
    quick = parser.parse_args().quick
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as choreo.train does for environments in Python
    rivals = {} if quick else dqn_rivals.installed()
    often, seldom = same.UPDATES
    compare(often, rivals, quick=quick)
    if "sb3" in rivals:
        compare(seldom, {"sb3": rivals["sb3"]}, quick=quick)


def compare(updates: int, commands: dict[str, tuple[Path, str]], *, quick: bool) -> None:
    # `chunk` is the number of iterations in one call of Choreo's runtime: the same as in choreo.train, except in a quick run.
    repeats, seconds, chunk = (1, 0.05, 2 * same.BLOCK) if quick else (21, 0.4, STEPS_PER_CHUNK // same.STEPS)
    with contextlib.ExitStack() as stack:
        rivals = {name: dqn_rivals.Process(*command, updates) for name, command in commands.items()}
        ours = {
            "fused": Training(f"gymnax:{same.ENV}" if GYMNAX else f"jax:{same.ENV}", updates, chunk),
            "gymnasium": Training(same.ENV, updates, chunk),
        }
        for side in [*ours.values(), *rivals.values()]:
            stack.callback(side.close)
        pids = [side.process.pid for side in rivals.values()]
        wall, cpu, load = take_turns(ours | rivals, repeats, seconds, steps=same.STEPS, pids=pids, block=same.BLOCK)
    often = updates == same.UPDATES[0]
    for our, other in [("fused", "gymnasium")] if quick else [(our, other) for other in rivals for our in ours]:
        write_result(
            f"dqn_{our}_vs_{other}" + ("" if often else "_seldom"),
            quick=quick,
            question=f"steps per second of DQN training on CartPole {WORDS[our]}, an update every {same.STEPS // updates} "
            f"steps, as a ratio to {WORDS[other]}",
            ratio=statistics.median(ratios(wall[our], wall[other])),
            ratios=ratios(wall[our], wall[other]),
            ratio_of_cpu_time=statistics.median(ratios(cpu[our], cpu[other])),
            choreo_steps_per_second=statistics.median(wall[our]),
            other_steps_per_second=statistics.median(wall[other]),
            busy_cores_of_others=load,
            num_envs=same.NUM_ENVS,
            repeats=repeats,
        )


class Training:
    """Choreo's DQN, with everything in this process. One call of the runtime runs at most `chunk` iterations."""

    def __init__(self, env: str, updates: int, chunk: int):
        algo = choreo.DQN(
            double=False,
            dueling=False,
            n_step=1,
            unroll=same.UNROLL,
            updates_per_step=updates / same.STEPS,
            batch_size=same.BATCH_SIZE,
            capacity=same.CAPACITY,
            min_size=same.MIN_SIZE,
            learning_rate=same.LEARNING_RATE,
            gamma=same.GAMMA,
            max_grad_norm=same.MAX_GRAD_NORM,
            target_period=same.TARGET_PERIOD,
            epsilon=(same.EPSILON, same.EPSILON),
            network=functools.partial(q_mlp, hidden=same.HIDDEN),
        )
        plan = choreo.plan(algo, env, choreo.fused(), num_envs=same.NUM_ENVS)
        self.runtime, self.chunk, self.done = make_runtime("inprocess", plan, profile=False), chunk, 0
        self.runtime.start(jax.random.key(0))
        self.run(chunk)  # compiles, and stores enough steps to learn from

    def run(self, iterations: int) -> float:
        """Run the next `iterations` iterations; returns 1 if the last one learned, 0 if the replay had too few steps."""
        metrics = self.runtime.run(self.done, self.done + iterations)
        self.done += iterations
        return metrics["learned"][-1]

    def seconds(self, iterations: int) -> tuple[float, float]:
        """Run the next `iterations` iterations; returns their wall and CPU time."""
        wall, cpu = time.perf_counter(), time.process_time()
        learned = [self.run(min(self.chunk, iterations - i)) for i in range(0, iterations, self.chunk)]
        took = time.perf_counter() - wall, time.process_time() - cpu
        assert all(learned), "an iteration learned nothing"
        return took

    def close(self) -> None:
        self.runtime.close()


if __name__ == "__main__":
    main()
