"""The frame stacks that the replay rebuilds equal those that Gymnasium's FrameStackObservation made."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation

from choreo.buffers import Replay, StoredStep, Table


class Numbered(gymnasium.Env):
    """Every frame holds a different number. The lengths of the episodes are `lengths`, repeated in a cycle."""

    observation_space = gymnasium.spaces.Box(0, 2**15, (2, 1), np.int32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, lengths):
        self.lengths, self.frame, self.episode = lengths, 0, -1

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.left = self.lengths[self.episode % len(self.lengths)]
        return self.see(), {}

    def step(self, action):
        self.left -= 1
        return self.see(), 0.0, self.left == 0, False, {}

    def see(self):
        self.frame += 1
        return np.array([[self.frame], [-self.frame]], np.int32)


def play(lengths: list[int], num_steps: int, stack: int) -> tuple[np.ndarray, np.ndarray]:
    """The stack before each step [time, 2, 1, stack], and whether the step ended an episode [time]."""
    env = FrameStackObservation(Numbered(lengths), stack)
    obs, _ = env.reset()
    seen, lasts = [], []
    for _ in range(num_steps):
        seen.append(np.moveaxis(np.asarray(obs), 0, -1))
        obs, _, last, _, _ = env.step(0)
        lasts.append(last)
        if last:
            obs, _ = env.reset()
    return np.array(seen), np.array(lasts)


LENGTHS = ([1, 2, 3], [7, 1], [4], [100])
UNROLL = 3


@pytest.mark.parametrize(("stack", "sampler"), [(2, "uniform"), (4, "prioritized")])
@pytest.mark.parametrize("additions", [1, 4, 5, 6, 17], ids=lambda n: f"{n}_additions")
def test_drawn_stacks_equal_those_of_the_environment(stack, sampler, additions):
    """The test draws before the ring buffer is full, when it has just become full, and after steps were overwritten.

    All stored items are drawn, and no others. In a full ring buffer, no item begins at one of the oldest `stack - 1` steps: these
    steps only supply frames to later stacks.
    """
    length = 3
    played = [play(lengths, additions * UNROLL, stack) for lengths in LENGTHS]
    obs, last = (np.stack(x, axis=1) for x in zip(*played, strict=True))  # [time, env, ...]
    replay = Replay(
        capacity=4 * 15, unroll=UNROLL, stack=stack, tables=(Table(length=length, batch=1024, sampler=sampler),)
    )
    state, drawn = fill_and_draw(replay, jnp.asarray(obs), jnp.asarray(last))

    assert state.steps.obs.shape == (4, 15, 2, 1)  # single frames, not stacks
    oldest = 0 if len(obs) < 15 else len(obs) - 15 + stack - 1
    assert drawn.ready
    steps = np.asarray(drawn.steps.action)  # `fill_and_draw` stores the number of a step as its action
    env = np.asarray(drawn.where.env)
    assert set(steps[:, 0]) == set(range(oldest, len(obs) - length + 1))
    for item in range(1024):
        np.testing.assert_array_equal(drawn.steps.obs[item], obs[steps[item], env[item]])


def fill_and_draw(replay: Replay, obs, last):
    number = jnp.broadcast_to(jnp.arange(len(obs), dtype=jnp.int32)[:, None], last.shape)
    real = number.astype(jnp.float32)
    steps = StoredStep(obs, number, real, real, last)

    @jax.jit
    def run(steps):
        one = jax.tree.map(lambda x: x[0, 0], steps)
        state = replay.init(one, last.shape[1])
        chunks = jax.tree.map(lambda x: x.reshape(-1, UNROLL, *x.shape[1:]), steps)
        state, _ = jax.lax.scan(lambda state, new: (replay.add(state, new), None), state, chunks)
        return replay.sample(state, jax.random.key(0))

    state, drawn = run(steps)
    return state, jax.tree.map(np.asarray, drawn)
