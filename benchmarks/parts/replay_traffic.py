"""An algorithm that stores steps and draws items, but learns nothing: the learner only sums all numbers in the items.

    env, actor          buffer               learner
    4 steps per env --> stored
                        512 items drawn  --> summed
                        priorities      <--  new priorities, if drawn by priority

Actions are random. As in the rivals' programs, acting does not depend on the learner.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from parts import replay_numbers as same

import choreo
from choreo.buffers import Replay, ReplayState
from choreo.buffers.sharded import Batches, add, draw, init_replay, make_replay, step_types, update_priorities
from choreo.envs.base import Env
from choreo.loops import Position, begin, rollout
from choreo.types import Key


class Train(NamedTuple):
    """The learner's state."""

    total: jax.Array
    """The sum over all numbers in the batches of the last iteration."""


class Carry(NamedTuple):
    train: Train
    replay: ReplayState
    """The stored steps."""
    position: Position
    """State and observations of the environments."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Adds steps, draws items, and sets priorities."""

    prioritized: bool = False
    """Whether items are drawn in proportion to priorities, which the learner sets."""
    capacity: int = same.CAPACITY
    """Number of steps that the replay can store."""
    unroll: int = same.UNROLL
    """Steps per environment and iteration."""

    @property
    def replay(self) -> Replay:
        return make_replay(
            capacity=self.capacity, unroll=self.unroll, length=same.LENGTH, updates=same.BATCHES,
            batch_size=same.BATCH_SIZE, min_size=same.BATCH_SIZE, prioritized=self.prioritized, exponent=same.EXPONENT,
        )  # fmt: skip

    def init(self, env: Env, key: Key) -> Carry:
        step = step_types(env, self.act, ())
        replay = init_replay(self.replay, step, env.num_envs, 1)
        return Carry(Train(jnp.zeros(())), replay, begin(env, key))

    def policy(self, train: Train) -> tuple[()]:
        del train
        return ()

    @choreo.fragment("actor")
    def act(self, params: tuple[()], obs: jax.Array, key: Key, *, greedy: bool = False):
        """A random action for one environment; action 0 if `greedy`."""
        if greedy:
            return jnp.int32(0), None
        return jax.random.bernoulli(key).astype(jnp.int32), None

    @choreo.fragment("learner")
    def learn(self, batches: Batches) -> tuple[Train, jax.Array]:
        """Return the learner's state (the sum over all numbers in the batches), and a priority for each item: [batch, item]."""
        total = sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(batches))
        return Train(jnp.asarray(total)), jnp.abs(batches.steps.obs[:, :, 0, 0]) + batches.steps.reward[:, :, 0]

    def iterate(self, env: Env, carry: Carry, key: Key) -> tuple[Carry, dict[str, jax.Array]]:
        key_draw, key_act = jax.random.split(key)
        replay, batches, where = draw(self.replay, carry.replay, key_draw, updates=same.BATCHES, shards=1)
        train, priorities = self.learn(batches)
        end, trajectory, _ = rollout(env, self.act, (), carry.position, key_act, self.unroll)
        if self.prioritized:
            replay = update_priorities(self.replay, replay, where, priorities)
        replay, stored = add(self.replay, replay, trajectory, 1)
        return Carry(train, replay, end), {**stored, "total": train.total}
