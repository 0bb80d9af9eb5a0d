"""Counters that do not overflow. JAX's integers end at 2^31; a long run stores and draws more than that.

    Count(rest, rounds)        total = rounds x round + rest

Every use of a count knows the size of its round. The rest alone tells where in the ring buffer a step lies, and whether enough
steps are stored: a round of steps is a multiple of the ring's length, and the rest never falls below the ring's length again.
Only ratios, such as samples per insert, need the total.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LARGEST_ROUND = 2**30
"""Leaves room below 2^31 for the number that is added to a rest before the rest is compared with a round."""


class Count(NamedTuple):
    """A counter in two integers."""

    rest: jax.Array
    """The count minus all whole rounds."""
    rounds: jax.Array
    """How many whole rounds have been subtracted."""

    def plus(self, more: int | jax.Array, round_: int = LARGEST_ROUND, kept: int = 0) -> "Count":
        """The count after `more`; a round is subtracted from the rest as soon as at least `kept` would be left."""
        rest = self.rest + more
        is_round = rest >= round_ + kept
        return Count(jnp.where(is_round, rest - round_, rest), self.rounds + is_round.astype(jnp.int32))

    def total(self, round_: int = LARGEST_ROUND) -> jax.Array:
        """The whole count, as a rounded float: an integer may be too small for it."""
        return self.rounds.astype(jnp.float32) * round_ + self.rest.astype(jnp.float32)


def zero_count() -> Count:
    return Count(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def round_of_steps(ring: int) -> int:
    """The size of a round for counts of steps: a multiple of `ring`, so that positions in the ring buffer stay the same."""
    return LARGEST_ROUND // ring * ring
