"""Stacks of frames: each frame is stored once, and stacks are rebuilt as the environment made them.

An observation [..., stack] holds the newest frame last. Where an episode begins, its first frame stands in for those before
it, as Gymnasium's `FrameStackObservation` has it by default.
"""

import jax
import jax.numpy as jnp

from choreo.types import PyTree


def newest(obs: PyTree, stack: int) -> PyTree:
    """The newest frame of each stack; with a stack of one, observations as they are."""
    return obs if stack == 1 else jax.tree.map(lambda x: x[..., -1], obs)


def stacks(last: jax.Array, missing: jax.Array, stack: int) -> jax.Array:
    """Which frames make the observation of each step: [item, step, stack], as places among an item's frames.

    An item's frames are those of its steps and, before them, stack - 1 more. `last` [item, frame], of all but the newest, is
    True where a frame is the last of its episode; `missing` [item, stack - 1] where there is none.
    """
    before = stack - 1
    ended = last.at[:, :before].set(last[:, :before] | missing)
    step, offset = jnp.arange(last.shape[1] - before + 1), jnp.arange(stack)
    # Of the stack at step j, frames j .. j + before: those up to an episode's end in between belong to another one.
    ended = ended[:, jnp.add.outer(step, offset[:-1])]  # [item, step, before]
    others = jnp.max(jnp.where(ended, jnp.broadcast_to(offset[1:], ended.shape), 0), axis=-1, keepdims=True)
    first = jnp.maximum(jnp.broadcast_to(offset, (*ended.shape[:2], stack)), others)
    return first + step[None, :, None]
