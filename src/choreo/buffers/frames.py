"""Frame stacks: the replay stores each frame once, and rebuilds the stacks that the environment made.

An observation [..., stack] holds the newest frame last. At the beginning of an episode its first frame fills the places of the
missing earlier frames, as in Gymnasium's `FrameStackObservation` by default.
"""

import jax
import jax.numpy as jnp

from choreo.types import PyTree


def newest(obs: PyTree, stack: int) -> PyTree:
    """The newest frame of each stack; `obs` itself if stack is 1."""
    return obs if stack == 1 else jax.tree.map(lambda x: x[..., -1], obs)


def stacks(last: jax.Array, missing: jax.Array, stack: int) -> jax.Array:
    """Which frames make up the observation of each step: [item, step, stack], as positions among the item's frames.

    The frames of an item are stack - 1 frames before its first step, then one frame for each of its steps. `last`
    [item, frame], given for all frames but the newest, is True where a frame is the last of its episode; `missing`
    [item, stack - 1] is True where there is no such earlier frame.
    """
    before = stack - 1
    ended = last.at[:, :before].set(last[:, :before] | missing)
    step, offset = jnp.arange(last.shape[1] - before + 1), jnp.arange(stack)
    # The stack at step j is made of frames j .. j + before. If an episode ends among these, the frames up to and including
    # its last one belong to an earlier episode.
    ended = ended[:, jnp.add.outer(step, offset[:-1])]  # [item, step, before]
    others = jnp.max(jnp.where(ended, jnp.broadcast_to(offset[1:], ended.shape), 0), axis=-1, keepdims=True)
    first = jnp.maximum(jnp.broadcast_to(offset, (*ended.shape[:2], stack)), others)
    return first + step[None, :, None]
