"""How many steps per second can be added to a replay, and how many items can be drawn, compared with flashbax and cpprb?

Choreo is compared with each rival in turns. Choreo and flashbax run one compiled loop with the replay as its carry. An iteration
adds steps, draws items, and sets their priorities if items are drawn by priority. The replay can hold 1e5 or 1e6 transitions of
CartPole. In the result `sample_first_ratio`, an iteration draws before it adds. XLA then copies the buffer of flashbax in every
iteration: nothing forces the read to finish before the write, so XLA does not write in place. cpprb (C++ and NumPy, one process) is
called from Python, as its users call it. There is a case for each sampler, capacity, number of environments and size of a batch.
The result for each rival is the median ratio of iterations per second over all cases and repetitions (above 1: Choreo is faster),
and the spread. A rival that is not installed is left out; `pip install -e .[bench]` installs both.
"""

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("NPROC", "1")  # XLA uses one thread; Choreo also chooses one thread for such small programs

import jax
import jax.numpy as jnp
import numpy as np
from harness import write_result

from choreo.buffers import Replay, StoredStep, Table

EXAMPLE = StoredStep(jnp.zeros(4), jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(()), jnp.zeros((), bool))


@dataclass(frozen=True)
class Case:
    """The settings of one measurement."""

    sampler: str
    """"uniform" or "prioritized"."""
    capacity: int
    """Number of steps that the buffer can store."""
    num_envs: int
    """Number of environments."""
    batch: int
    """Number of items in one draw."""
    unroll: int = 4
    """Number of steps of each environment in one addition."""
    sample_first: bool = False
    """Whether an iteration draws before it adds."""

    def __str__(self) -> str:
        return f"{self.sampler}_{self.capacity}_x{self.num_envs}_b{self.batch}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run few iterations, to test that this script runs")
    quick = parser.parse_args().quick
    capacities, iterations, repeats = ((2_000,), 5, 2) if quick else ((100_000, 1_000_000), 1_500, 9)
    cases = [
        Case(sampler, capacity, num_envs, batch)
        for sampler in ("uniform", "prioritized")
        for capacity in capacities
        for num_envs, batch in ((8, 32),) + (() if quick else ((1, 32), (8, 256), (64, 256)))
    ]
    for rival, loop in RIVALS.items():
        if importlib.util.find_spec(rival) is None:
            if not quick:
                print(f"{rival} is not installed: left out")
                continue
            rival, loop = "itself", choreo_loop  # a quick run only tests that this script runs
        report(rival, loop, cases, iterations, repeats, quick)


def report(rival: str, rival_loop: Callable, cases: list[Case], iterations: int, repeats: int, quick: bool) -> None:
    ratios, numbers = [], {}
    for case in cases:
        ours, theirs = choreo_loop(case, iterations), rival_loop(case, iterations)
        times = [(ours(), theirs()) for _ in range(repeats)]
        of_case = [their_time / our_time for our_time, their_time in times]
        ratios += of_case
        best, their_best = (iterations / min(x) for x in zip(*times, strict=True))
        numbers[f"{case}_ratio"] = statistics.median(of_case)
        numbers[f"{case}_inserts_per_second"] = [
            best * case.unroll * case.num_envs,
            their_best * case.unroll * case.num_envs,
        ]
        numbers[f"{case}_samples_per_second"] = [best * case.batch, their_best * case.batch]
    if rival == "flashbax":
        first = Case("uniform", cases[0].capacity, 8, 32, sample_first=True)
        ours, theirs = choreo_loop(first, iterations), rival_loop(first, iterations)
        numbers["sample_first_ratio"] = statistics.median(theirs() / ours() for _ in range(repeats))
    write_result(
        f"replay_vs_{rival}",
        quick=quick,
        question=f"adding to and drawing from a replay, as a ratio to {rival}",
        ratio=statistics.median(ratios),
        ratios=ratios,
        **numbers,
    )


def choreo_loop(case: Case, iterations: int) -> Callable[[], float]:
    table = Table(length=2, batch=case.batch, sampler=case.sampler)  # pyright: ignore[reportArgumentType]
    replay = Replay(capacity=case.capacity, unroll=case.unroll, tables=(table,))
    new = _ones_like(EXAMPLE, (case.unroll, case.num_envs))

    def draw(state, key):
        state, drawn = replay.sample(state, key)
        if table.has_priorities:
            state = replay.set_priorities(state, drawn.where, _priority(drawn.steps, drawn.where.probability))
        return state, drawn.steps

    return _timed(case, replay.init(EXAMPLE, case.num_envs), lambda state: replay.add(state, new), draw, iterations)


def flashbax_loop(case: Case, iterations: int) -> Callable[[], float]:
    import flashbax

    options = {
        "add_batch_size": case.num_envs, "sample_batch_size": case.batch, "sample_sequence_length": 2, "period": 1,
        "min_length_time_axis": 2, "max_length_time_axis": case.capacity // case.num_envs,
    }  # fmt: skip
    if case.sampler == "uniform":
        buffer = flashbax.make_trajectory_buffer(**options)
    else:
        buffer = flashbax.make_prioritised_trajectory_buffer(**options, priority_exponent=0.6, device="cpu")
    new = _ones_like(EXAMPLE, (case.num_envs, case.unroll))

    def draw(state, key):
        drawn = buffer.sample(state, key)
        if case.sampler == "prioritized":
            state = buffer.set_priorities(state, drawn.indices, _priority(drawn.experience, drawn.probabilities))
        return state, drawn.experience

    return _timed(case, buffer.init(EXAMPLE), lambda state: buffer.add(state, new), draw, iterations)


def cpprb_loop(case: Case, iterations: int) -> Callable[[], float]:
    import cpprb

    shapes = {"obs": {"shape": 4}, "action": {"dtype": np.int32}, "reward": {}, "next_obs": {"shape": 4}, "done": {}}
    if case.sampler == "uniform":
        buffer = cpprb.ReplayBuffer(case.capacity, shapes)
    else:
        buffer = cpprb.PrioritizedReplayBuffer(case.capacity, shapes, alpha=0.6)
    rows = case.unroll * case.num_envs
    new = {"obs": np.ones((rows, 4)), "action": np.ones(rows), "reward": np.ones(rows), "next_obs": np.ones((rows, 4)),
           "done": np.zeros(rows)}  # fmt: skip
    for _ in range(_num_adds_before_timing(case)):
        buffer.add(**new)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(iterations):
            buffer.add(**new)
            drawn = buffer.sample(case.batch)
            if case.sampler == "prioritized":
                buffer.update_priorities(drawn["indexes"], np.abs(drawn["reward"][:, 0]) + drawn["weights"])
        return time.perf_counter() - start

    return seconds


RIVALS = {"flashbax": flashbax_loop, "cpprb": cpprb_loop}


def _timed(case: Case, state, add: Callable, draw: Callable, iterations: int) -> Callable[[], float]:
    """Return a function that runs `iterations` iterations on a partly filled buffer and returns the seconds that they took.

    Everything is compiled before `_timed` returns, so the seconds include no compilation.
    """

    def body(state, key):
        if not case.sample_first:
            state = add(state)
        state, drawn = draw(state, key)
        if case.sample_first:
            state = add(state)
        return state, sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(drawn))

    additions = _num_adds_before_timing(case)
    fill = jax.jit(lambda state: jax.lax.fori_loop(0, additions, lambda _, state: add(state), state), donate_argnums=0)
    run = jax.jit(lambda s, key: jax.lax.scan(body, s, jax.random.split(key, iterations)), donate_argnums=0)
    state, _ = run(fill(state), jax.random.key(0))
    # `run` runs twice before the measurement: the first run may return weak types, and JAX then compiles `run` a second time.
    latest = [jax.block_until_ready(run(state, jax.random.key(0)))[0]]

    def seconds() -> float:
        start = time.perf_counter()
        latest[0], _ = jax.block_until_ready(run(latest[0], jax.random.key(1)))
        return time.perf_counter() - start

    return seconds


def _num_adds_before_timing(case: Case) -> int:
    return min(case.capacity // case.num_envs // case.unroll // 2, 2_000)


def _ones_like(example: StoredStep, lead: tuple[int, ...]) -> StoredStep:
    return jax.tree.map(lambda x: jnp.ones((*lead, *x.shape), x.dtype), example)


def _priority(steps: StoredStep, probability: jax.Array) -> jax.Array:
    return jnp.abs(steps.reward[:, 0]) + probability


if __name__ == "__main__":
    main()
