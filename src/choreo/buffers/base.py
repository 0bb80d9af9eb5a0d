"""Experience replay: steps are stored once, and tables say which windows of them are drawn, how, and how often.

    storage     [env, time, ...]      a ring of steps for each environment; the oldest are overwritten
    item        (env, time)           a window of `table.length` steps, from there on
    table       "items", "queue"      its own sampler over the same storage

                 oldest                               newest
    steps        |5 |6 |7 |8 |9 |10|11|12|13|14|15|16|
    items of 3    *  *  *  *  *  *  *  *  *  *           each begins with an observation and ends with one

An item of n + 1 steps holds what an n-step return needs, so observations are stored once: there is no second copy of each
as somebody's successor. All of it is arrays in an algorithm's carry. Everything large has the env axis first, so that a
layout can divide it among sites as it divides environments; no sampler looks further than the environments it is given.

Written by hand, though flashbax has such buffers: those keep one tree of priorities over all environments, which cannot be
divided among sites; draw one kind of item; know no stacks of frames; and are copied whole where an iteration draws before it adds
(`benchmarks/replay.py` measures it). An algorithm of your own may use them as they are: `docs/replay.md`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from choreo.buffers.counts import LARGEST_ROUND, Count, none_counted, round_of_steps
from choreo.buffers.frames import newest, stacks
from choreo.buffers.memory import check_fits
from choreo.buffers.tables import Draw, Table, TableState, new_items
from choreo.errors import AlgorithmError
from choreo.types import Key, PyTree

source_info_util.register_exclusion(__file__)


class StoredStep(NamedTuple):
    """What is stored of one step of one environment."""

    obs: PyTree
    """What was acted on."""
    action: PyTree
    """What was done."""
    reward: jax.Array
    """What it gave."""
    discount: jax.Array
    """0 where the episode terminated, else 1."""
    last: jax.Array
    """True where the episode ended, for either reason."""
    extras: PyTree = None
    """Whatever else an algorithm wants back."""


class ReplayState(NamedTuple):
    """Everything stored."""

    steps: StoredStep
    """[env, time, ...]"""
    inserted: Count
    """Steps of each environment so far, also those overwritten."""
    tables: dict[str, TableState]


class Sample(NamedTuple):
    """Items drawn."""

    steps: StoredStep
    """[item, step, ...]"""
    where: Draw
    """Which items they are."""
    ready: jax.Array
    """False while the table may not be drawn from (`min_size`, `samples_per_insert`): then these are no items at all."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What is stored, and the tables over it."""

    capacity: int
    """Steps of all environments together."""
    unroll: int
    """Steps of each environment that are added at a time."""
    tables: tuple[Table, ...]
    stack: int = 1
    """Frames in an observation, along its last axis; with several, each frame is stored once, and stacks are rebuilt."""

    def __post_init__(self):
        names = [table.name for table in self.tables]
        if not names or len(set(names)) < len(names):
            raise AlgorithmError(f"Replay(tables={names}) needs tables, each with a name of its own.")
        for table in self.tables:
            if table.min_size > self.capacity:
                raise AlgorithmError(
                    f"The table `{table.name}` is drawn from when {table.min_size:,} steps are stored (min_size), and there "
                    f"is room for {self.capacity:,} (capacity).",
                    fix="Use a smaller min_size, or a larger capacity.",
                )

    def ring(self, num_envs: int) -> int:
        """Steps stored of each environment: a multiple of `unroll`, so that what is added lies in one piece.

        Never too few for an item, however many environments there are: a plan also looks at twice as many as a run has.
        """
        longest = max(table.length for table in self.tables) + self.stack - 1
        steps = max(-(-self.capacity // num_envs), self.unroll + longest)
        return -(-steps // self.unroll) * self.unroll

    def init(self, step: StoredStep, num_envs: int) -> ReplayState:
        """Nothing stored yet; `step` is one of one environment, arrays or their types."""
        check_fits(jax.eval_shape(lambda: self._empty(step, num_envs)), capacity=self.capacity)
        if self.ring(num_envs) * num_envs >= LARGEST_ROUND:
            raise AlgorithmError(
                f"A replay of {self.capacity:,} steps has more than the {LARGEST_ROUND - 1:,} that can be told apart.",
                fix="Use a smaller capacity.",
            )
        return self._empty(step, num_envs)

    def _empty(self, step: StoredStep, num_envs: int) -> ReplayState:
        ring = self.ring(num_envs)
        step = step._replace(obs=jax.eval_shape(lambda obs: newest(obs, self.stack), step.obs))
        steps = jax.tree.map(lambda x: jnp.zeros((num_envs, ring, *x.shape), x.dtype), step)
        tables = {table.name: table.init(num_envs, ring) for table in self.tables}
        return ReplayState(steps, none_counted(), tables)

    def add(
        self, state: ReplayState, steps: StoredStep, priority: Callable[[StoredStep], jax.Array] | None = None
    ) -> ReplayState:
        """Add `unroll` steps of every environment: [time, env, ...].

        `priority` gives that of an item, from its steps; without it, all new ones have priority 1.
        """
        num_envs, ring = state.steps.last.shape
        self._check_added(steps, num_envs)
        steps = steps._replace(obs=newest(steps.obs, self.stack))
        start = state.inserted.rest % ring
        held = jnp.stack([table.held for table in state.tables.values()]).any(axis=0)

        def write(stored: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.moveaxis(new, 0, 1)
            new = jnp.where(jax.lax.broadcast_in_dim(held, new.shape, (0,)), jnp.zeros_like(new), new)
            return jax.lax.dynamic_update_slice_in_dim(stored, new, start, axis=1)

        stored = jax.tree.map(write, state.steps, steps)
        tables = {}
        for table in self.tables:
            begins = new_items(state.inserted.rest, self.unroll, table.length)
            first = None
            if table.has_priorities and priority is not None:
                windows = jax.tree.map(lambda x, b=begins, t=table: x[:, times(b, t.length, ring)], stored)
                first = jax.vmap(jax.vmap(priority))(windows)
            tables[table.name] = table.insert(state.tables[table.name], begins, first, ring, self.stack - 1)
        inserted = state.inserted.plus(self.unroll, round_of_steps(ring), kept=ring)
        back = state.inserted.rest + self.unroll - inserted.rest
        tables = {name: table.numbered_back(back) for name, table in tables.items()}
        return ReplayState(stored, inserted, tables)

    def _check_added(self, steps: StoredStep, num_envs: int) -> None:
        if steps.last.shape != (self.unroll, num_envs):
            raise AlgorithmError(
                f"This replay takes {self.unroll} steps of {num_envs} environments at a time, [time, env]; it was given "
                f"{list(steps.last.shape)}.",
                fix="Set Replay(unroll=...) to the number of steps that are added at a time.",
            )

    def sample(self, state: ReplayState, key: Key, table: str | None = None) -> tuple[ReplayState, Sample]:
        """Draw a batch of items of a table, by default the first."""
        drawn = self.table(table)
        num_envs, ring = state.steps.last.shape
        after, ready, where = drawn.draw(state.tables[drawn.name], state.inserted, ring, num_envs, self.stack - 1, key)
        steps = self.window(state, where.env, where.time, drawn.length)
        after = after._replace(held=after.held | _once_read(steps, state.inserted.rest))
        return state._replace(tables=state.tables | {drawn.name: after}), Sample(steps, where, ready)

    def window(self, state: ReplayState, env: jax.Array, time: jax.Array, length: int) -> StoredStep:
        """The items at (env, time): [item, step, ...]."""
        ring = state.steps.last.shape[1]
        at = (env[:, None], times(time, length, ring))
        if self.stack == 1:
            return jax.tree.map(lambda x: x[at], state.steps)
        steps = jax.tree.map(lambda x: x[at], state.steps._replace(obs=None))
        frames = times(time - (self.stack - 1), length + self.stack - 1, ring)  # [item, before + step]
        last = state.steps.last[env[:, None], frames[:, :-1]]
        # Nothing is before the first step ever stored; else an item has its frames (`Table.insert`).
        missing = (state.inserted.rest < ring) & (frames[:, : self.stack - 1] > time[:, None])
        of_stack = jax.vmap(lambda frames, source: frames[source])(frames, stacks(last, missing, self.stack))
        at = (env[:, None, None], of_stack)
        return steps._replace(obs=jax.tree.map(lambda x: jnp.moveaxis(x[at], 2, -1), state.steps.obs))

    def set_priorities(
        self, state: ReplayState, where: Draw, priorities: jax.Array, table: str | None = None
    ) -> ReplayState:
        """Of items drawn from a table, before anything else is added.

        If one is NaN, so is the probability of all that is drawn from then on, and whatever is learned with it: a run ends.
        """
        changed = self.table(table)
        return state._replace(
            tables=state.tables
            | {changed.name: changed.set_priorities(state.tables[changed.name], where.env, where.time, priorities)}
        )

    def table(self, name: str | None) -> Table:
        found = [table for table in self.tables if name in (None, table.name)]
        if not found:
            raise AlgorithmError(
                f"There is no table {name!r} in this replay.",
                fix=f"It has {', '.join(repr(table.name) for table in self.tables)}.",
            )
        return found[0]

    def metrics(self, state: ReplayState) -> dict[str, jax.Array]:
        """How much is stored, and how often it was drawn."""
        num_envs, ring = state.steps.last.shape
        found = {"replay_size": jnp.minimum(state.inserted.rest, ring).astype(jnp.float32) * num_envs}
        for table in self.tables:
            prefix = "" if len(self.tables) == 1 else f"{table.name}_"
            drawn = table.drawn_per_insert(state.tables[table.name], state.inserted, ring, num_envs)
            found[f"{prefix}samples_per_insert"] = drawn
        return found


def _once_read(steps: StoredStep, inserted: jax.Array) -> jax.Array:
    """False, but known only when every part of `steps` is.

    XLA orders reading an array and overwriting it only where one depends on the other. If what is added did not wait for what
    was drawn, the whole storage would be copied, in every iteration. (`optimization_barrier` is gone by the time it decides.)
    """
    some = [x.ravel()[0].astype(bool) for x in jax.tree.leaves(steps)]
    return (inserted < 0) & jnp.stack(some).any()


def times(start: jax.Array, length: int, ring: int) -> jax.Array:
    """Where in the ring the steps of a window lie: [..., step]."""
    return jnp.add.outer(start, jnp.arange(length, dtype=start.dtype)) % ring
