"""Counts without an end. JAX's integers end at 2^31, and a long run stores and draws more than that.

    Count(rest, rounds)        what was counted in all: rounds x round + rest

Where in the ring something lies, and whether there is enough of it, the rest alone tells: a round of steps is a multiple of the
ring, and what is kept of one is never less than the ring. How often something was drawn for each step needs all of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LARGEST_ROUND = 2**30
"""Whatever is added to the rest before it is looked at stays below 2^31."""


class Count(NamedTuple):
    rest: jax.Array
    """All that was counted, until there was a whole round."""
    rounds: jax.Array
    """How often the rest went back by a round."""

    def plus(self, more: int | jax.Array, round_: int = LARGEST_ROUND, kept: int = 0) -> "Count":
        """The rest goes back by a round as soon as at least `kept` is left of it."""
        rest = self.rest + more
        is_round = rest >= round_ + kept
        return Count(jnp.where(is_round, rest - round_, rest), self.rounds + is_round.astype(jnp.int32))

    def total(self, round_: int = LARGEST_ROUND) -> jax.Array:
        """All of it, rounded: integers may not be large enough."""
        return self.rounds.astype(jnp.float32) * round_ + self.rest.astype(jnp.float32)


def none_counted() -> Count:
    return Count(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def round_of_steps(ring: int) -> int:
    """How many steps are a round: after it, everything lies where it lay."""
    return LARGEST_ROUND // ring * ring
