"""Tables: which items exist, and how they are drawn.

An item is identified by its environment and by the position of its first step in the ring buffer. An item exists from the moment
its last step is stored until its first step is overwritten. All environments add their steps at the same time, so the number of
added steps tells which items exist. A table with priorities, or a uniform table with `max_times_sampled`, also keeps a weight for
each item, in sum trees (`sum_tree.py`).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from choreo.buffers import sum_tree
from choreo.buffers.counts import Count, round_of_steps, zero_count
from choreo.errors import AlgorithmError
from choreo.types import Key


class Draw(NamedTuple):
    """The places of the items that were drawn, and their probabilities."""

    env: jax.Array
    """Environment of each item: [item]"""
    time: jax.Array
    """Position of each item's first step in the ring buffer: [item]"""
    probability: jax.Array
    """Probability with which each item was drawn, for importance weights: [item]"""


class TableState(NamedTuple):
    """The state of a table."""

    draws: Count
    """Number of batches drawn so far."""
    read_token: jax.Array
    """Always False, although XLA cannot know it. It makes the write of the next `Replay.add` depend on the reads of the last
    `Replay.sample`, so that XLA updates the ring buffers in place. [env]"""
    next: tuple[jax.Array, jax.Array] | None = None
    """Only for FIFO: the next item, as (number of its first step, environment). The next step to be inserted has the number
    `ReplayState.inserted.rest`."""
    tree: jax.Array | None = None
    """Sum trees over the weights of the items: [env, node, child]"""
    times_drawn: jax.Array | None = None
    """How often each item was drawn: [env, time]"""

    def renumbered(self, subtracted: jax.Array) -> "TableState":
        """The same state, with `subtracted` subtracted from the number of every step."""
        if self.next is None:
            return self
        # The bound prevents an overflow. A step with a number below it is no longer stored, so the exact number does not matter.
        oldest = jnp.asarray(-(2**30), self.next[0].dtype)
        return self._replace(next=(jnp.maximum(self.next[0] - subtracted, oldest), self.next[1]))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Items of one length, and how they are drawn."""

    name: str = "items"
    """The name by which `Replay.sample` finds the table."""
    length: int
    """Steps of an item."""
    batch: int
    """Items in one draw."""
    sampler: Literal["uniform", "prioritized", "fifo"] = "uniform"
    """How items are chosen."""
    exponent: float = 0.6
    """Priority exponent: an item is drawn in proportion to its priority to this power."""
    min_size: int = 1
    """Steps that must be stored, in all environments together, before anything is drawn."""
    samples_per_insert: float | None = None
    """Upper bound on the ratio of drawn items to inserted steps; None: no bound."""
    max_times_sampled: int | None = None
    """Number of draws after which an item is removed. None: no bound, but a FIFO table draws each item only once. With priorities,
    the last batch that contains an item may contain the item several times, so the number can be exceeded."""

    def __post_init__(self):
        if self.sampler not in ("uniform", "prioritized", "fifo"):
            raise AlgorithmError(f"Table(sampler={self.sampler!r}) is not known.",
                                 fix='Use "uniform", "prioritized" or "fifo".')  # fmt: skip
        if self.length < 1 or self.batch < 1:
            raise AlgorithmError(
                f"Table(length={self.length}, batch={self.batch}): length and batch must be at least 1."
            )
        if self.sampler == "fifo" and self.batch % (self.max_times_sampled or 1):
            raise AlgorithmError(
                f"A FIFO table cannot draw batches of {self.batch} if it draws each item {self.max_times_sampled} times.",
                fix="Use a batch that is a multiple of max_times_sampled.",
            )

    @property
    def has_priorities(self) -> bool:
        return self.sampler == "prioritized"

    @property
    def has_tree(self) -> bool:
        """Whether the table keeps a weight for each item."""
        return self.has_priorities or (self.sampler == "uniform" and self.max_times_sampled is not None)

    def init(self, num_envs: int, ring: int) -> TableState:
        zero = jnp.zeros((), jnp.int32)
        return TableState(
            draws=zero_count(),
            read_token=jnp.zeros((num_envs,), bool),
            next=(zero, zero) if self.sampler == "fifo" else None,
            tree=sum_tree.empty(num_envs, ring, self.batch) if self.has_tree else None,
            times_drawn=jnp.zeros((num_envs, ring), jnp.int32) if self.has_tree and self.max_times_sampled else None,
        )

    def insert(
        self, state: TableState, starts: jax.Array, priority: jax.Array | None, ring: int, before: int
    ) -> TableState:
        """Insert new items, and remove items that are no longer complete because the new steps have overwritten a part of them.

        `starts` [item] are the numbers of the first steps of the new items, and `priority` [env, item] are their priorities. An
        item also needs the `before` steps before its first step (for frame stacks).
        """
        if state.tree is None:
            return state
        num_envs = len(state.read_token)
        gone = starts[-1] + 1 + jnp.arange(self.length - 1 + before, dtype=starts.dtype)
        new = jnp.ones((num_envs, len(starts))) if priority is None else self._weight(priority)
        is_item = (starts >= 0)[None] & ~state.read_token[:, None]  # an item does not begin before step 0
        weights = jnp.where(is_item, new.astype(jnp.float32), 0)
        weights = jnp.concatenate([weights, jnp.zeros((num_envs, len(gone)), jnp.float32)], axis=1)
        where = jnp.concatenate([starts, gone]) % ring
        times_drawn = None if state.times_drawn is None else state.times_drawn.at[:, where].set(0)
        return state._replace(tree=sum_tree.set_consecutive(state.tree, where, weights), times_drawn=times_drawn)

    def draw(
        self, state: TableState, inserted: Count, ring: int, num_envs: int, before: int, key: Key
    ) -> tuple[TableState, jax.Array, Draw]:
        """Draw a batch; returns the new state, whether the draw is valid, and the drawn items."""
        end = inserted.rest
        first = jnp.where(end >= ring, end - ring + before, 0)
        num_items = jnp.maximum(end - self.length + 1 - first, 0)
        ready = self._may_draw(state, inserted, ring, num_envs, num_items)
        if state.tree is not None:
            found, where = self._draw_by_weight(state.tree, key)
            # Without `max_times_sampled`, every item has a weight, so num_items > 0 is enough.
            if self.max_times_sampled is not None:
                ready &= found
            state = self._count_draws(state, where, ready)
        elif self.sampler == "fifo":
            after, found, where = self._draw_in_order(state, first, first + num_items, ring, num_envs)
            ready &= found
            state = state._replace(next=jax.tree.map(lambda new, old: jnp.where(ready, new, old), after, state.next))
        else:
            where = self._draw_uniformly(first, num_items, ring, num_envs, key)
        return state._replace(draws=state.draws.plus(ready.astype(jnp.int32))), ready, where

    def set_priorities(self, state: TableState, env: jax.Array, time: jax.Array, priorities: jax.Array) -> TableState:
        if state.tree is None or not self.has_priorities:
            raise AlgorithmError(f"The table `{self.name}` is {self.sampler}: it has no priorities.",
                                 fix='Make it Table(sampler="prioritized").')  # fmt: skip
        # A draw that was not ready may contain places at which there is no item. These places must keep the weight 0.
        is_item = sum_tree.get_weights(state.tree, env, time) != 0
        new = jnp.where(is_item, self._weight(priorities).astype(jnp.float32), 0)
        if state.times_drawn is not None and self.max_times_sampled is not None:
            new = jnp.where(state.times_drawn[env, time] < self.max_times_sampled, new, 0)
        return state._replace(tree=sum_tree.set_weights(state.tree, env, time, new))

    def drawn_per_insert(self, state: TableState, inserted: Count, ring: int, num_envs: int) -> jax.Array:
        """The ratio of drawn items to inserted steps, so far."""
        # The result is computed in floats, because both counts may exceed 2^31.
        return state.draws.total() * self.batch / (jnp.maximum(inserted.total(round_of_steps(ring)), 1) * num_envs)

    def _weight(self, priority: jax.Array) -> jax.Array:
        # The weight is never 0, because a weight of 0 means that there is no item.
        return jnp.maximum(jnp.abs(priority), 1e-6) ** self.exponent

    def _may_draw(
        self, state: TableState, inserted: Count, ring: int, num_envs: int, num_items: jax.Array
    ) -> jax.Array:
        ready = (inserted.rest >= -(-self.min_size // num_envs)) & (num_items > 0)
        if self.samples_per_insert is not None:
            one_more = state._replace(draws=state.draws.plus(1))
            ready &= self.drawn_per_insert(one_more, inserted, ring, num_envs) <= self.samples_per_insert
        return ready

    def _draw_uniformly(self, first: jax.Array, num_items: jax.Array, ring: int, num_envs: int, key: Key) -> Draw:
        num_items = jnp.maximum(num_items, 1)
        number = jax.random.randint(key, (self.batch,), 0, num_items * num_envs, num_items.dtype)
        probability = jnp.broadcast_to(1 / (num_items.astype(jnp.float32) * num_envs), (self.batch,))
        return Draw(number // num_items, (first + number % num_items) % ring, probability)

    def _draw_in_order(
        self, state: TableState, first: jax.Array, end: jax.Array, ring: int, num_envs: int
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, Draw]:
        """Draw the next items, each `max_times_sampled` times in a row; overwritten items are skipped."""
        assert state.next is not None
        each = self.max_times_sampled or 1
        time, env = state.next
        env = jnp.where(time < first, 0, env)
        begin, ahead = jnp.maximum(time, first), env + jnp.arange(self.batch + 1) // each
        time, env = begin + ahead // num_envs, ahead % num_envs
        where = Draw(env[:-1], time[:-1] % ring, jnp.ones((self.batch,), jnp.float32))
        # `time[-2] < end` would be wrong: the number of an item that does not exist yet may exceed 2^31.
        return (time[-1], env[-1]), ahead[-2] // num_envs < end - begin, where

    def _draw_by_weight(self, tree: jax.Array, key: Key) -> tuple[jax.Array, Draw]:
        # Without priorities all weights are 1. Then systematic sampling draws no item twice, if there are at least `batch` items.
        drawn = sum_tree.draw(tree, key, self.batch, systematic=not self.has_priorities)
        needed = 0 if self.has_priorities else self.batch - 1
        return sum_tree.total(tree) > needed, Draw(*drawn)

    def _count_draws(self, state: TableState, where: Draw, ready: jax.Array) -> TableState:
        """Count the draws of each item, and remove items that were drawn `max_times_sampled` times."""
        if state.times_drawn is None or state.tree is None or self.max_times_sampled is None:
            return state
        times_drawn = state.times_drawn.at[where.env, where.time].add(ready.astype(jnp.int32))
        is_left = times_drawn[where.env, where.time] < self.max_times_sampled
        left = jnp.where(is_left, sum_tree.get_weights(state.tree, where.env, where.time), 0)
        tree = sum_tree.set_weights(state.tree, where.env, where.time, left)
        return state._replace(times_drawn=times_drawn, tree=tree)


def new_item_starts(inserted: jax.Array, added: int, length: int) -> jax.Array:
    """For each item that `added` more steps complete, the number of its first step."""
    return inserted - (length - 1) + jnp.arange(added, dtype=inserted.dtype)
