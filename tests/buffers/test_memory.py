"""XLA updates a replay in place and never copies it, so a replay needs little more memory than the steps in it."""

import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from buffers.model import ONE_STEP, steps
from choreo.buffers import Replay, Table

NUM_ENVS, UNROLL, BATCH = 4, 2, 16
UNOPTIMISED = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")  # conftest.py sets these variables for fast compilation


def replay_of(capacity: int, sampler: str) -> Replay:
    return Replay(capacity=capacity, unroll=UNROLL, tables=(Table(length=3, batch=BATCH, sampler=sampler),))


def iterations(replay: Replay, order: str):
    """A function that runs two iterations.

    Each iteration draws a batch, changes a weight with this batch, and adds steps whose rewards depend on the weight. `order`
    says whether the iteration adds the steps before it draws ("add first") or at its end ("add last").
    """

    def body(carry, key):
        state, weight = carry
        new = steps(0, UNROLL, NUM_ENVS)
        new = new._replace(reward=new.reward * weight)
        if order == "add first":
            state = replay.add(state, new)
        state, drawn = replay.sample(state, key)
        features = jnp.tanh(drawn.steps.obs.reshape(BATCH, -1) @ jnp.ones((6, 8)))
        weight = weight + jnp.mean(features) + jnp.mean(drawn.steps.reward)
        if replay.tables[0].has_priorities:
            state = replay.set_priorities(state, drawn.where, jnp.sum(features, axis=1))
        if order == "add last":
            state = replay.add(state, new)
        return (state, weight), weight

    return lambda carry, key: jax.lax.scan(body, carry, jax.random.split(key, 2))


def cases():
    """All combinations of sampler, order and number of shards. CI runs four of them, in which each of these values occurs.

    CI runs prioritized tables in both orders, because both `set_priorities` and `add` write to such tables.
    """
    in_ci = {
        ("prioritized", "add first", None),
        ("prioritized", "add last", 2),
        ("uniform", "add last", None),
        ("fifo", "add first", 2),
    }
    every = itertools.product(["uniform", "prioritized", "fifo"], ["add first", "add last"], [None, 2])
    return [pytest.param(*case, marks=() if case in in_ci else pytest.mark.long) for case in every]


@pytest.fixture
def optimised():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(("sampler", "order", "shards"), cases())
def test_the_replay_is_updated_in_place(sampler, order, shards):
    replay = replay_of(200_000, sampler)
    run = iterations(replay, order)

    def one_step(carry, key):
        return run(carry, key)

    carry = jax.eval_shape(lambda: (replay.init(ONE_STEP, NUM_ENVS), jnp.zeros(())))
    key = jax.eval_shape(lambda: jax.random.key(0))
    if shards:
        one_step = jax.vmap(one_step)
        carry, key = jax.tree.map(lambda x: jax.ShapeDtypeStruct((shards, *x.shape), x.dtype), (carry, key))
    memory = jax.jit(one_step, donate_argnums=0).lower(carry, key).compile().memory_analysis()
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(carry))
    assert memory.alias_size_in_bytes >= stored - 64  # the outputs reuse the memory of the inputs
    assert memory.temp_size_in_bytes < 0.02 * stored


RAW = 100_000 * 84 * 84  # bytes of the frames alone


@pytest.mark.usefixtures("optimised")
def test_a_replay_of_pong_takes_at_most_ten_percent_more_than_its_frames():
    """The replay holds 1e5 transitions of 84 x 84 frames, in stacks of four. The memory of `add` and `sample` is included."""
    replay = Replay(capacity=100_000, unroll=4, stack=4, tables=(Table(length=2, batch=32, sampler="prioritized"),))
    one = jax.eval_shape(lambda: ONE_STEP._replace(obs=jnp.zeros((84, 84, 4), jnp.uint8)))
    state = jax.eval_shape(lambda: replay.init(one, 8))
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert RAW <= stored < 1.1 * RAW

    def iterate(state, new, key):
        state, drawn = replay.sample(state, key)
        state = replay.set_priorities(state, drawn.where, jnp.ones(32))
        return replay.add(state, new), jnp.sum(drawn.steps.obs, dtype=jnp.int32)

    new = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, 8, *x.shape), x.dtype), one)
    run = jax.jit(iterate, donate_argnums=0).lower(state, new, jax.eval_shape(lambda: jax.random.key(0)))
    memory = run.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= stored - 64
    assert stored + memory.temp_size_in_bytes < 1.1 * RAW


@pytest.mark.long
def test_the_measured_memory_of_a_replay_of_pong_is_at_most_ten_percent_more_than_its_frames():
    # Without XLA's optimisations, the process would need three times as long.
    environment = {name: value for name, value in os.environ.items() if name not in UNOPTIMISED}
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.1 * RAW


RESIDENT = """
import jax, jax.numpy as jnp, psutil
from choreo.buffers import Replay, StoredStep, Table

# Fill the replay, and draw from it.
replay = Replay(capacity=100_000, unroll=100, stack=4, tables=(Table(length=2, batch=32, sampler="prioritized"),))
one = StoredStep(jnp.zeros((84, 84, 4), jnp.uint8), jnp.int32(0), jnp.float32(0), jnp.float32(0), jnp.bool_(False))
new = jax.tree.map(lambda x: jnp.ones((100, 8, *x.shape), x.dtype), one)

def iterate(state, key):
    state, drawn = replay.sample(state, key)
    state = replay.set_priorities(state, drawn.where, jnp.ones(32))
    return replay.add(state, new), jnp.sum(drawn.steps.obs, dtype=jnp.int32)

run = jax.jit(iterate, donate_argnums=0)
run.lower(jax.eval_shape(lambda: replay.init(one, 8)), jax.random.key(0)).compile()
before = psutil.Process().memory_info().rss
state = jax.jit(replay.init, static_argnums=1)(one, 8)
most = 0
for i in range(130):
    state, total = run(state, jax.random.key(i))
    total.block_until_ready()
    most = max(most, psutil.Process().memory_info().rss)
print(most - before)
"""
