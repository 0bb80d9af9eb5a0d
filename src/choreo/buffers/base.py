"""Experience replay: each step is stored once; tables say which windows of steps are drawn, how, and how often.

    storage     [env, time, ...]      a ring buffer of steps for each environment; new steps overwrite the oldest
    item        (env, time)           the window of `table.length` steps that begins at this place in the storage
    table       "items", "queue"      a rule, with a name, by which items are drawn; all tables share the same storage

                 oldest                               newest
    steps        |5 |6 |7 |8 |9 |10|11|12|13|14|15|16|
    items of 3    *  *  *  *  *  *  *  *  *  *           a star marks the first step of an item of 3 steps

An n-step return needs n + 1 observations. So an algorithm with n-step returns draws items of n + 1 steps. Each observation is
stored only once: the observation after a step is stored with the next step. The whole replay consists of arrays in an algorithm's
carry. Every large array has the env axis first, so that a layout can divide these arrays among sites in the same way as the
environments. With several buffer shards, each shard is a separate replay, and its tables draw only from the environments of this
shard.

We do not use flashbax for four reasons. Its buffers keep one sum tree over all environments, and this tree cannot be divided among
sites. All items of a buffer have the same length, and are drawn in the same way. Frame stacks are stored as a whole, so each frame
is stored several times. And if an iteration draws before it adds, XLA copies a whole buffer (`benchmarks/replay.py` measures this
copy). Your own algorithm can use flashbax unchanged (`docs/replay.md`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from choreo.buffers.counts import LARGEST_ROUND, Count, round_of_steps, zero_count
from choreo.buffers.frames import newest, stacks
from choreo.buffers.memory import check_fits
from choreo.buffers.tables import Draw, Table, TableState, new_item_starts
from choreo.errors import AlgorithmError
from choreo.types import Key, PyTree

source_info_util.register_exclusion(__file__)


class StoredStep(NamedTuple):
    """One stored step of one environment."""

    obs: PyTree
    """Observation before the step."""
    action: PyTree
    """Action of the step."""
    reward: jax.Array
    """Reward of the step."""
    discount: jax.Array
    """0 where the episode terminated, else 1."""
    last: jax.Array
    """True where the episode ended, by termination or truncation."""
    extras: PyTree = None
    """Any other values that the algorithm stores with the step."""


class ReplayState(NamedTuple):
    """The contents of a replay."""

    steps: StoredStep
    """The ring buffers: [env, time, ...]"""
    inserted: Count
    """Number of steps added to each ring buffer so far, including overwritten steps."""
    tables: dict[str, TableState]
    """The state of each table, by name."""


class Sample(NamedTuple):
    """A batch of items that was drawn from a table."""

    steps: StoredStep
    """The steps of each item: [item, step, ...]"""
    where: Draw
    """The place and the probability of each item."""
    ready: jax.Array
    """False if the table could not draw: too few steps or items are stored, or the draw would exceed `samples_per_insert`. Then
    `steps` and `where` are meaningless."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A ring buffer for each environment, and the tables that draw from these buffers."""

    capacity: int
    """Number of steps to store, in all environments together."""
    unroll: int
    """Number of steps of each environment in one call of `add`."""
    tables: tuple[Table, ...]
    """The tables; `sample` and `set_priorities` use the first table by default."""
    stack: int = 1
    """Frames in an observation, along its last axis. If more than 1, each frame is stored once and stacks are rebuilt."""

    def __post_init__(self):
        names = [table.name for table in self.tables]
        if not names or len(set(names)) < len(names):
            raise AlgorithmError(
                f"Replay(tables={names}) needs at least one table, and no two tables may have the same name."
            )
        for table in self.tables:
            if table.min_size > self.capacity:
                raise AlgorithmError(
                    f"The table `{table.name}` waits until {table.min_size:,} steps are stored (min_size), but the replay has "
                    f"room for {self.capacity:,} (capacity).",
                    fix="Use a smaller min_size, or a larger capacity.",
                )

    def ring(self, num_envs: int) -> int:
        """The length of the ring buffer of one environment: a multiple of `unroll`, so that each `add` writes one contiguous slice.

        The ring buffer has room for `unroll` steps and one item, even if `capacity` is too small for this. A small `capacity` is
        not an error here, because Choreo traces `init` a second time, with twice as many environments as the run has. With more
        environments, `capacity` leaves fewer steps for each environment.
        """
        longest = max(table.length for table in self.tables) + self.stack - 1
        steps = max(-(-self.capacity // num_envs), self.unroll + longest)
        return -(-steps // self.unroll) * self.unroll

    def init(self, step: StoredStep, num_envs: int) -> ReplayState:
        """An empty replay. `step` is one step of one environment; its leaves may be arrays or only their shapes and types."""
        check_fits(jax.eval_shape(lambda: self._empty(step, num_envs)), capacity=self.capacity)
        if self.ring(num_envs) * num_envs >= LARGEST_ROUND:
            raise AlgorithmError(
                f"A replay of {self.capacity:,} steps is too large: a replay can hold at most {LARGEST_ROUND - 1:,} steps.",
                fix="Use a smaller capacity.",
            )
        return self._empty(step, num_envs)

    def _empty(self, step: StoredStep, num_envs: int) -> ReplayState:
        ring = self.ring(num_envs)
        step = step._replace(obs=jax.eval_shape(lambda obs: newest(obs, self.stack), step.obs))
        steps = jax.tree.map(lambda x: jnp.zeros((num_envs, ring, *x.shape), x.dtype), step)
        tables = {table.name: table.init(num_envs, ring) for table in self.tables}
        return ReplayState(steps, zero_count(), tables)

    def add(
        self, state: ReplayState, steps: StoredStep, priority: Callable[[StoredStep], jax.Array] | None = None
    ) -> ReplayState:
        """Add `unroll` steps of every environment: [time, env, ...].

        `priority` computes the priority of one item from its steps; without `priority`, new items have priority 1.
        """
        num_envs, ring = state.steps.last.shape
        self._check_added(steps, num_envs)
        steps = steps._replace(obs=newest(steps.obs, self.stack))
        start = state.inserted.rest % ring
        read_token = jnp.stack([table.read_token for table in state.tables.values()]).any(axis=0)

        def write(stored: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.moveaxis(new, 0, 1)
            new = jnp.where(jax.lax.broadcast_in_dim(read_token, new.shape, (0,)), jnp.zeros_like(new), new)
            return jax.lax.dynamic_update_slice_in_dim(stored, new, start, axis=1)

        stored = jax.tree.map(write, state.steps, steps)
        tables = {}
        for table in self.tables:
            starts = new_item_starts(state.inserted.rest, self.unroll, table.length)
            priorities = None
            if table.has_priorities and priority is not None:
                windows = jax.tree.map(lambda x, s=starts, t=table: x[:, ring_positions(s, t.length, ring)], stored)
                priorities = jax.vmap(jax.vmap(priority))(windows)
            tables[table.name] = table.insert(state.tables[table.name], starts, priorities, ring, self.stack - 1)
        inserted = state.inserted.plus(self.unroll, round_of_steps(ring), kept=ring)
        subtracted = state.inserted.rest + self.unroll - inserted.rest
        tables = {name: table.renumbered(subtracted) for name, table in tables.items()}
        return ReplayState(stored, inserted, tables)

    def _check_added(self, steps: StoredStep, num_envs: int) -> None:
        if steps.last.shape != (self.unroll, num_envs):
            raise AlgorithmError(
                f"Each call of `add` needs arrays of shape [{self.unroll}, {num_envs}, ...]; the given arrays begin with "
                f"{list(steps.last.shape)}.",
                fix="Set Replay(unroll=...) to the number of time steps, and the `num_envs` of Replay.init to the number of "
                "environments.",
            )

    def sample(self, state: ReplayState, key: Key, table: str | None = None) -> tuple[ReplayState, Sample]:
        """Draw a batch of items from a table (default: the first table)."""
        drawn = self.table(table)
        num_envs, ring = state.steps.last.shape
        after, ready, where = drawn.draw(state.tables[drawn.name], state.inserted, ring, num_envs, self.stack - 1, key)
        steps = self.window(state, where.env, where.time, drawn.length)
        after = after._replace(read_token=after.read_token | _read_token(steps, state.inserted.rest))
        return state._replace(tables=state.tables | {drawn.name: after}), Sample(steps, where, ready)

    def window(self, state: ReplayState, env: jax.Array, time: jax.Array, length: int) -> StoredStep:
        """The steps of the items at (env, time): [item, step, ...]."""
        ring = state.steps.last.shape[1]
        at = (env[:, None], ring_positions(time, length, ring))
        if self.stack == 1:
            return jax.tree.map(lambda x: x[at], state.steps)
        steps = jax.tree.map(lambda x: x[at], state.steps._replace(obs=None))
        frames = ring_positions(time - (self.stack - 1), length + self.stack - 1, ring)  # [item, before + step]
        last = state.steps.last[env[:, None], frames[:, :-1]]
        # A table draws only items of which all frames are still stored. So a frame is missing only if it would come before the
        # first step of the run.
        missing = (state.inserted.rest < ring) & (frames[:, : self.stack - 1] > time[:, None])
        of_stack = jax.vmap(lambda frames, source: frames[source])(frames, stacks(last, missing, self.stack))
        at = (env[:, None, None], of_stack)
        return steps._replace(obs=jax.tree.map(lambda x: jnp.moveaxis(x[at], 2, -1), state.steps.obs))

    def set_priorities(
        self, state: ReplayState, where: Draw, priorities: jax.Array, table: str | None = None
    ) -> ReplayState:
        """Set the priorities of items that were drawn from a table.

        Call this before the next `add`: after it, new items may be at the places of the drawn items. If a priority is NaN, the
        probabilities of all items drawn later are NaN. Then the loss is NaN too, and the run ends.
        """
        changed = self.table(table)
        return state._replace(
            tables=state.tables
            | {changed.name: changed.set_priorities(state.tables[changed.name], where.env, where.time, priorities)}
        )

    def table(self, name: str | None) -> Table:
        """The table with this name; with None, the first table."""
        found = [table for table in self.tables if name in (None, table.name)]
        if not found:
            raise AlgorithmError(
                f"This replay has no table {name!r}.",
                fix=f"It has {', '.join(repr(table.name) for table in self.tables)}.",
            )
        return found[0]

    def metrics(self, state: ReplayState) -> dict[str, jax.Array]:
        """The number of stored steps, and the samples per insert of each table."""
        num_envs, ring = state.steps.last.shape
        found = {"replay_size": jnp.minimum(state.inserted.rest, ring).astype(jnp.float32) * num_envs}
        for table in self.tables:
            prefix = "" if len(self.tables) == 1 else f"{table.name}_"
            drawn = table.drawn_per_insert(state.tables[table.name], state.inserted, ring, num_envs)
            found[f"{prefix}samples_per_insert"] = drawn
        return found


def _read_token(steps: StoredStep, inserted: jax.Array) -> jax.Array:
    """A boolean that is always False, although XLA cannot know it. It depends on every leaf of `steps`.

    The leaves of `steps` were read from the storage. XLA updates an array in place only if all reads of the old array come before
    the write, and only a data dependence fixes this order. The next `add` depends on this boolean, and so on the reads. Without
    this dependence, XLA would copy the whole storage in every iteration.
    (`optimization_barrier` does not help: XLA removes it before it decides about copies.)
    """
    some = [x.ravel()[0].astype(bool) for x in jax.tree.leaves(steps)]
    return (inserted < 0) & jnp.stack(some).any()


def ring_positions(start: jax.Array, length: int, ring: int) -> jax.Array:
    """For each window that begins at `start`, the positions of its steps in the ring buffer: [..., step]."""
    return jnp.add.outer(start, jnp.arange(length, dtype=start.dtype)) % ring
