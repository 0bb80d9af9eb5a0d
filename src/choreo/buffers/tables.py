"""Tables: which items there are, and how they are drawn.

An item is known by its environment and the place of its first step in the ring. It exists from the moment its last step is
stored until its first is overwritten. All environments add together, so uniform and first-in-first-out tables need no more
than a count; one with priorities, or with a bound on how often an item is drawn, has a weight for each item (`sums.py`).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from choreo.buffers import sums
from choreo.buffers.counts import Count, none_counted, round_of_steps
from choreo.errors import AlgorithmError
from choreo.types import Key


class Draw(NamedTuple):
    """Items that were drawn."""

    env: jax.Array
    """[item]"""
    time: jax.Array
    """Of the first step, in the ring: [item]"""
    probability: jax.Array
    """With which each was drawn: [item]"""


class TableState(NamedTuple):
    draws: Count
    """How often it was drawn from."""
    held: jax.Array
    """Always False, which no compiler knows: what is added next waits for what was drawn last (`Replay.sample`). [env]"""
    next: tuple[jax.Array, jax.Array] | None = None
    """First in, first out: the item that comes next, as (number of its first step, environment). Steps are numbered as
    `ReplayState.inserted.rest` counts them."""
    weights: jax.Array | None = None
    """Of each item, and their sums: [env, group, member]"""
    times: jax.Array | None = None
    """How often each item was drawn: [env, time]"""

    def numbered_back(self, steps: jax.Array) -> "TableState":
        """Where every step has a number that is less by so many."""
        if self.next is None:
            return self
        # What was not drawn for a whole round is gone from the ring: it need not be numbered further back.
        oldest = jnp.asarray(-(2**30), self.next[0].dtype)
        return self._replace(next=(jnp.maximum(self.next[0] - steps, oldest), self.next[1]))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Items of one length, and how they are drawn."""

    name: str = "items"
    length: int
    """Steps of an item."""
    batch: int
    """Items in one draw."""
    sampler: Literal["uniform", "prioritized", "fifo"] = "uniform"
    exponent: float = 0.6
    """An item is drawn in proportion to its priority to this power."""
    min_size: int = 1
    """Steps that must be stored, in all environments together, before anything is drawn."""
    samples_per_insert: float | None = None
    """Items drawn for each step stored, at most; None: as often as is asked."""
    max_times_sampled: int | None = None
    """Items are gone once drawn this often; by priority, one may come more often in its last draw."""

    def __post_init__(self):
        if self.sampler not in ("uniform", "prioritized", "fifo"):
            raise AlgorithmError(f"Table(sampler={self.sampler!r}) is not known.",
                                 fix='Use "uniform", "prioritized" or "fifo".')  # fmt: skip
        if self.length < 1 or self.batch < 1:
            raise AlgorithmError(f"Table(length={self.length}, batch={self.batch}): both are at least 1.")
        if self.sampler == "fifo" and self.batch % (self.max_times_sampled or 1):
            raise AlgorithmError(
                f"A queue whose items are drawn {self.max_times_sampled} times cannot be drawn {self.batch} at a time.",
                fix="Use a batch that is a multiple of max_times_sampled.",
            )

    @property
    def has_priorities(self) -> bool:
        return self.sampler == "prioritized"

    @property
    def has_weights(self) -> bool:
        return self.has_priorities or (self.sampler == "uniform" and self.max_times_sampled is not None)

    def init(self, num_envs: int, ring: int) -> TableState:
        zero = jnp.zeros((), jnp.int32)
        return TableState(
            draws=none_counted(),
            held=jnp.zeros((num_envs,), bool),
            next=(zero, zero) if self.sampler == "fifo" else None,
            weights=sums.no_weights(num_envs, ring, self.batch) if self.has_weights else None,
            times=jnp.zeros((num_envs, ring), jnp.int32) if self.has_weights and self.max_times_sampled else None,
        )

    def insert(
        self, state: TableState, begins: jax.Array, priority: jax.Array | None, ring: int, before: int
    ) -> TableState:
        """There are new items from `begins` on, as numbers of steps; those after them are gone.

        `priority` [env, item]; `before`: steps that an item needs in front of its first.
        """
        if state.weights is None:
            return state
        num_envs = len(state.held)
        gone = begins[-1] + 1 + jnp.arange(self.length - 1 + before, dtype=begins.dtype)
        new = jnp.ones((num_envs, len(begins))) if priority is None else self._weight(priority)
        is_item = (begins >= 0)[None] & ~state.held[:, None]  # it does not begin before the run did
        values = jnp.where(is_item, new.astype(jnp.float32), 0)
        values = jnp.concatenate([values, jnp.zeros((num_envs, len(gone)), jnp.float32)], axis=1)
        where = jnp.concatenate([begins, gone]) % ring
        times = None if state.times is None else state.times.at[:, where].set(0)
        return state._replace(weights=sums.put_in_all(state.weights, where, values), times=times)

    def draw(
        self, state: TableState, inserted: Count, ring: int, num_envs: int, before: int, key: Key
    ) -> tuple[TableState, jax.Array, Draw]:
        """Draw a batch: the table afterwards, whether there are any items, and which were drawn."""
        end = inserted.rest
        first = jnp.where(end >= ring, end - ring + before, 0)
        num_items = jnp.maximum(end - self.length + 1 - first, 0)
        ready = self._may_draw(state, inserted, ring, num_envs, num_items)
        if state.weights is not None:
            found, where = self._by_weight(state.weights, key)
            if self.max_times_sampled is not None:  # else there is one wherever there is an item
                ready &= found
            state = self._counted(state, where, ready)
        elif self.sampler == "fifo":
            after, found, where = self._in_order(state, first, first + num_items, ring, num_envs)
            ready &= found
            state = state._replace(next=jax.tree.map(lambda new, old: jnp.where(ready, new, old), after, state.next))
        else:
            where = self._uniform(first, num_items, ring, num_envs, key)
        return state._replace(draws=state.draws.plus(ready.astype(jnp.int32))), ready, where

    def set_priorities(self, state: TableState, env: jax.Array, time: jax.Array, priorities: jax.Array) -> TableState:
        if state.weights is None or not self.has_priorities:
            raise AlgorithmError(f"The table `{self.name}` is {self.sampler}: it has no priorities.",
                                 fix='Make it Table(sampler="prioritized").')  # fmt: skip
        # What is no item stays none: one drawn before there was any, say.
        is_item = sums.get(state.weights, env, time) != 0
        new = jnp.where(is_item, self._weight(priorities).astype(jnp.float32), 0)
        if state.times is not None and self.max_times_sampled is not None:
            new = jnp.where(state.times[env, time] < self.max_times_sampled, new, 0)
        return state._replace(weights=sums.put(state.weights, env, time, new))

    def drawn_per_insert(self, state: TableState, inserted: Count, ring: int, num_envs: int) -> jax.Array:
        """Items drawn for each step stored, so far."""
        # Not as integers: there may be more than 2^31 of either.
        return state.draws.total() * self.batch / (jnp.maximum(inserted.total(round_of_steps(ring)), 1) * num_envs)

    def _weight(self, priority: jax.Array) -> jax.Array:
        # Never 0: that would be no item.
        return jnp.maximum(jnp.abs(priority), 1e-6) ** self.exponent

    def _may_draw(
        self, state: TableState, inserted: Count, ring: int, num_envs: int, num_items: jax.Array
    ) -> jax.Array:
        ready = (inserted.rest >= -(-self.min_size // num_envs)) & (num_items > 0)
        if self.samples_per_insert is not None:
            one_more = state._replace(draws=state.draws.plus(1))
            ready &= self.drawn_per_insert(one_more, inserted, ring, num_envs) <= self.samples_per_insert
        return ready

    def _uniform(self, first: jax.Array, num_items: jax.Array, ring: int, num_envs: int, key: Key) -> Draw:
        num_items = jnp.maximum(num_items, 1)
        number = jax.random.randint(key, (self.batch,), 0, num_items * num_envs, num_items.dtype)
        probability = jnp.broadcast_to(1 / (num_items.astype(jnp.float32) * num_envs), (self.batch,))
        return Draw(number // num_items, (first + number % num_items) % ring, probability)

    def _in_order(
        self, state: TableState, first: jax.Array, end: jax.Array, ring: int, num_envs: int
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, Draw]:
        """The next items, each `max_times_sampled` times in turn; those overwritten in the meantime are left out."""
        assert state.next is not None
        each = self.max_times_sampled or 1
        time, env = state.next
        env = jnp.where(time < first, 0, env)
        begin, ahead = jnp.maximum(time, first), env + jnp.arange(self.batch + 1) // each
        time, env = begin + ahead // num_envs, ahead % num_envs
        where = Draw(env[:-1], time[:-1] % ring, jnp.ones((self.batch,), jnp.float32))
        # Not time[-2] < end: a batch of items that are not there yet may begin after 2^31.
        return (time[-1], env[-1]), ahead[-2] // num_envs < end - begin, where

    def _by_weight(self, weights: jax.Array, key: Key) -> tuple[jax.Array, Draw]:
        # Without priorities all weights are 1: evenly spread, no item comes twice, if there are enough of them.
        drawn = sums.draw(weights, key, self.batch, evenly=not self.has_priorities)
        needed = 0 if self.has_priorities else self.batch - 1
        return sums.total(weights) > needed, Draw(*drawn)

    def _counted(self, state: TableState, where: Draw, ready: jax.Array) -> TableState:
        """Items that were drawn `max_times_sampled` times are gone."""
        if state.times is None or state.weights is None or self.max_times_sampled is None:
            return state
        times = state.times.at[where.env, where.time].add(ready.astype(jnp.int32))
        is_left = times[where.env, where.time] < self.max_times_sampled
        left = jnp.where(is_left, sums.get(state.weights, where.env, where.time), 0)
        return state._replace(times=times, weights=sums.put(state.weights, where.env, where.time, left))


def new_items(inserted: jax.Array, added: int, length: int) -> jax.Array:
    """The items that are complete once `added` more steps are stored: the number of the step with which each begins."""
    return inserted - (length - 1) + jnp.arange(added, dtype=inserted.dtype)
