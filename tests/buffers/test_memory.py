"""A replay is never copied: adding costs what is added, and drawing what is drawn."""

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
HASTE = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")


def replay_of(capacity: int, sampler: str) -> Replay:
    return Replay(capacity=capacity, unroll=UNROLL, tables=(Table(length=3, batch=BATCH, sampler=sampler),))


def iterations(replay: Replay, order: str):
    """Two iterations that learn from what is drawn, and store what was done with what had been learned before."""

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
    """In CI each value once, and priorities, which are written twice, in both orders."""
    in_ci = {
        ("prioritized", "add first", None),
        ("prioritized", "add last", 2),
        ("uniform", "add last", None),
        ("fifo", "add first", 2),
    }
    every = itertools.product(["uniform", "prioritized", "fifo"], ["add first", "add last"], [None, 2])
    return [pytest.param(*case, marks=() if case in in_ci else pytest.mark.long) for case in every]


@pytest.fixture
def compiled_as_for_users():
    haste = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", haste)


@pytest.mark.usefixtures("compiled_as_for_users")
@pytest.mark.parametrize(("sampler", "order", "shards"), cases())
def test_nothing_is_copied(sampler, order, shards):
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
    assert memory.alias_size_in_bytes >= stored - 64  # what comes out lies where it was
    assert memory.temp_size_in_bytes < 0.02 * stored


RAW = 100_000 * 84 * 84


@pytest.mark.usefixtures("compiled_as_for_users")
def test_pong_takes_what_its_frames_take():
    """1e5 transitions of 84 x 84 frames, four to a stack: their raw size, and a tenth; adding and drawing included."""
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
def test_what_a_process_has_taken_after_pong():
    """The same, measured."""
    optimised = {
        name: value for name, value in os.environ.items() if name not in HASTE
    }  # in haste it takes thrice as long
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, env=optimised)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.1 * RAW


RESIDENT = """
import jax, jax.numpy as jnp, psutil
from choreo.buffers import Replay, StoredStep, Table

# Filled, and drawn from.
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
