"""Counters that do not overflow. An int32 of JAX ends at 2^31, but a long run can store and draw more steps than that.

    Count(rest, rounds)        total = rounds x round + rest

A *round* is a fixed number that is subtracted from `rest` before `rest` overflows; `rounds` counts these subtractions. A `Count`
does not store the size of a round, so its methods take this size as an argument. For counts of steps, the size of a round is a
multiple of the ring buffer's length, so `rest` alone gives the position of a step in the ring buffer. After
`rest` has reached the ring buffer's length, it never falls below this length. So `rest` also tells whether enough steps are stored.
Only ratios, such as samples per insert, need the total.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LARGEST_ROUND = 2**30
"""The largest size of a round. It is far below 2^31, so that adding to `rest` does not overflow."""


class Count(NamedTuple):
    """A counter that consists of two integers."""

    rest: jax.Array
    """The count minus the rounds subtracted so far."""
    rounds: jax.Array
    """How many rounds have been subtracted so far."""

    def plus(self, more: int | jax.Array, round_: int = LARGEST_ROUND, kept: int = 0) -> "Count":
        """The count plus `more`. A round is subtracted from `rest` if at least `kept` remains after the subtraction."""
        rest = self.rest + more
        is_round = rest >= round_ + kept
        return Count(jnp.where(is_round, rest - round_, rest), self.rounds + is_round.astype(jnp.int32))

    def total(self, round_: int = LARGEST_ROUND) -> jax.Array:
        """The whole count as a rounded float, because it can be too large for an int32."""
        return self.rounds.astype(jnp.float32) * round_ + self.rest.astype(jnp.float32)


def zero_count() -> Count:
    return Count(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def round_of_steps(ring: int) -> int:
    """The size of a round for counts of steps: a multiple of `ring`, so that positions in the ring buffer stay the same."""
    return LARGEST_ROUND // ring * ring
