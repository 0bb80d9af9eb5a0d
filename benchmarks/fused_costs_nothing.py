"""Is `choreo.train(layout=fused)` slower than a bare `jax.jit` + `lax.scan` of the same `iterate`?

Both sides train PPO on CartPole for the same number of iterations in the same process, in turns. Compilation is not counted.
Choreo's time is the time in which its runtime runs iterations and moves their metrics to the host. The time in which `choreo.train`
makes the rows of metrics, after each chunk, is not counted. The result is the median ratio of speeds over the repetitions (above 1:
Choreo is faster), and the spread.
"""

import argparse
import statistics
import time

import jax
from harness import write_result

import choreo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run few iterations, to test that this script runs")
    quick = parser.parse_args().quick
    num_envs, iterations, repeats = (8, 2, 1) if quick else (8, 480, 5)
    env = choreo.envs.make("jax:CartPole-v1", num_envs)
    steps = iterations * choreo.PPO().unroll * num_envs
    algo = choreo.PPO(total_steps=steps)

    bare = BareLoop(algo, env, iterations)
    ratios, bare_times, choreo_times = [], [], []
    for seed in range(repeats):
        bare_times.append(bare.seconds(seed))
        run = choreo.train(algo, env, layout=choreo.fused(), steps=steps, seed=seed, progress=False)
        choreo_times.append(steps / run.timing.steps_per_second)
        ratios.append(bare_times[-1] / choreo_times[-1])
    write_result(
        "fused_costs_nothing",
        quick=quick,
        question="steps per second of choreo.train(layout=fused), as a ratio to jax.jit + lax.scan",
        ratio=statistics.median(ratios),
        ratios=ratios,
        bare_steps_per_second=steps / statistics.median(bare_times),
        choreo_steps_per_second=steps / statistics.median(choreo_times),
        num_envs=num_envs,
        steps=steps,
    )


class BareLoop:
    """A training loop written by hand: everything in one compiled scan."""

    def __init__(self, algo, env, iterations):
        def run(carry, key):
            def body(carry, i):
                return algo.iterate(env, carry, jax.random.fold_in(key, i))

            return jax.lax.scan(body, carry, jax.numpy.arange(iterations))

        self.init = jax.jit(lambda key: algo.init(env, key))
        self.run = jax.jit(run, donate_argnums=0)
        self.seconds(0)  # compiles

    def seconds(self, seed):
        key = jax.random.key(seed)
        carry = jax.block_until_ready(self.init(key))
        start = time.perf_counter()
        jax.block_until_ready(self.run(carry, key))
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
