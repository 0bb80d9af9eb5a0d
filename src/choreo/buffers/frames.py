"""Frame stacks: the replay stores each frame once, and rebuilds the stacks that the environment made.

An observation [..., stack] holds the newest frame last. At the beginning of an episode, copies of its first frame replace the
missing earlier frames. This is also the default of Gymnasium's `FrameStackObservation`.
"""

import jax
import jax.numpy as jnp

from choreo.types import PyTree


def newest(obs: PyTree, stack: int) -> PyTree:
    """The newest frame of each stack; if `stack` is 1, `obs` unchanged."""
    return obs if stack == 1 else jax.tree.map(lambda x: x[..., -1], obs)


def stacks(last: jax.Array, missing: jax.Array, stack: int) -> jax.Array:
    """For each step of each item, the frames that make up its observation: [item, step, stack].

    The frames of an item are `stack` - 1 frames before its first step, then one frame for each step. The result contains positions
    among these frames. `last` [item, frame] is True where a frame is the last frame of its episode; `last` has no entry for the
    newest frame of the item. `missing` [item, stack - 1] is True where a frame before the first step does not exist.
    """
    before = stack - 1
    ended = last.at[:, :before].set(last[:, :before] | missing)
    step, offset = jnp.arange(last.shape[1] - before + 1), jnp.arange(stack)
    # The stack at step j consists of the frames j .. j + before. If an episode ends at one of these frames, but not at the newest,
    # then this frame and all frames before it belong to an earlier episode. The frame that follows replaces all of them.
    ended = ended[:, jnp.add.outer(step, offset[:-1])]  # [item, step, before]
    others = jnp.max(jnp.where(ended, jnp.broadcast_to(offset[1:], ended.shape), 0), axis=-1, keepdims=True)
    first = jnp.maximum(jnp.broadcast_to(offset, (*ended.shape[:2], stack)), others)
    return first + step[None, :, None]
