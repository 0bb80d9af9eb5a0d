"""A replay draws the same items as a simple model made of Python lists. A replay also refuses wrong options."""

import dataclasses
import math
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import scipy.stats
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from buffers.model import ONE_STEP, Model, numbers, steps
from choreo.buffers import Replay, ReplayState, StoredStep, Table, memory, sum_tree
from choreo.buffers.counts import LARGEST_ROUND, Count, round_of_steps
from choreo.buffers.memory import check_fits, memory_bytes
from choreo.errors import AlgorithmError


def filled(replay: Replay, num_envs: int, times: int):
    """The state of a replay after `times` additions, and its model."""
    model = Model(num_envs, replay.ring(num_envs))
    for i in range(times):
        model.add(i * replay.unroll, replay.unroll)
    return fill(replay, num_envs, jnp.int32(times)), model


@partial(jax.jit, static_argnums=(0, 1))
def fill(replay: Replay, num_envs: int, times: jax.Array):
    def add(i, state):
        return replay.add(state, steps(i * replay.unroll, replay.unroll, num_envs))

    return jax.lax.fori_loop(0, times, add, replay.init(ONE_STEP, num_envs))


@partial(jax.jit, static_argnums=(0, 3))
def sample(replay: Replay, state, key, table=None):
    return replay.sample(state, key, table)


def one_table(batch: int = 64, *, capacity: int = 24, unroll: int = 2, length: int = 3, **options) -> Replay:
    return Replay(capacity=capacity, unroll=unroll, tables=(Table(length=length, batch=batch, **options),))


def replays(max_examples: int):
    """Run a test on random replays. Hypothesis does not shrink failures, because shrinking would compile a hundred more replays."""

    def decorate(test):
        run = settings(max_examples=max_examples, phases=[Phase.explicit, Phase.generate])
        return run(
            given(
                capacity=st.integers(4, 60),
                unroll=st.integers(1, 5),
                length=st.integers(1, 5),
                num_envs=st.integers(1, 4),
                additions=st.integers(0, 14),
            )(test)
        )

    return decorate


class TestEveryItemExists:
    @pytest.mark.parametrize("sampler", ["uniform", "prioritized", "fifo", "shuffled"])
    @replays(max_examples=1)
    def test_items_are_consecutive_stored_steps_of_one_environment(self, sampler, **sizes):
        self.check(sampler, **sizes)

    @pytest.mark.long
    @pytest.mark.parametrize("sampler", ["uniform", "prioritized", "fifo", "shuffled"])
    @replays(max_examples=10)
    def test_items_are_consecutive_stored_steps_of_one_environment_in_more_replays(self, sampler, **sizes):
        self.check(sampler, **sizes)

    def check(self, sampler, *, capacity, unroll, length, num_envs, additions):
        options = {"sampler": "uniform", "max_times_sampled": 2} if sampler == "shuffled" else {"sampler": sampler}
        batch = 3 if sampler == "shuffled" else 16
        replay = one_table(batch, capacity=capacity, unroll=unroll, length=length, **options)
        state, model = filled(replay, num_envs, additions)
        items = model.items(length)
        _, drawn = sample(replay, state, jax.random.key(0))
        enough = {"fifo": 16, "shuffled": 3}.get(sampler, 1)
        assert bool(drawn.ready) == (len(items) >= enough)
        if drawn.ready:
            assert set(numbers(drawn.steps)) <= set(items)

    @pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
    @pytest.mark.parametrize("additions", [3, 40])
    def test_every_item_is_drawn(self, sampler, additions):
        replay = one_table(512, sampler=sampler)
        state, model = filled(replay, 2, additions)
        _, drawn = sample(replay, state, jax.random.key(1))
        assert set(numbers(drawn.steps)) == set(model.items(3))

    def test_after_many_additions_every_root_is_the_sum_of_its_leaves(self):
        replay = one_table(16, capacity=300, sampler="prioritized", length=4)

        def body(state, key):
            state, drawn = sample(replay, state, key)
            state = replay.set_priorities(state, drawn.where, jax.random.uniform(key, (16,)) * 9)
            return replay.add(state, steps(0, 2, 3)), drawn.where.probability

        state, probability = jax.lax.scan(body, filled(replay, 3, 3)[0], jax.random.split(jax.random.key(0), 400))
        tree = np.asarray(state.tables["items"].tree)
        leaves = -(-replay.ring(3) // tree.shape[-1])
        assert (tree[:, :leaves] > 0).sum() == 3 * (replay.ring(3) - 3)
        np.testing.assert_allclose(tree[:, -1].sum(-1), tree[:, :leaves].sum((1, 2)), rtol=1e-5)
        assert (np.asarray(probability) > 0).all()


class TestHowOften:
    def test_a_uniform_table_draws_all_items_equally_often(self):
        replay = one_table(20_000)
        state, model = filled(replay, 2, 20)
        _, drawn = sample(replay, state, jax.random.key(3))
        counts = Counter(numbers(drawn.steps))
        assert scipy.stats.chisquare([counts[item] for item in model.items(3)]).pvalue > 0.01
        np.testing.assert_allclose(drawn.where.probability, 1 / len(model.items(3)), rtol=1e-6)

    @pytest.mark.parametrize("num_envs", [pytest.param(1, marks=pytest.mark.long), 3, 20])
    def test_a_prioritized_table_draws_in_proportion_to_priorities(self, num_envs):
        replay = one_table(30_000, capacity=12 * num_envs, sampler="prioritized", exponent=0.5)
        state, model = filled(replay, num_envs, 20)
        items = model.items(3)
        # The priority of a new item follows from the number of its first step.
        add = jax.jit(partial(replay.add, priority=lambda s: 1 + s.action[0].astype(jnp.float32) % 5))
        state = replay.init(ONE_STEP, num_envs)
        for i in range(20):
            state = add(state, steps(2 * i, 2, num_envs))
        _, drawn = sample(replay, state, jax.random.key(3))
        weights = np.array([math.sqrt(1 + item[0] % 5) for item in items])
        counts = Counter(numbers(drawn.steps))
        expected = weights / weights.sum()
        observed = np.array([counts[item] for item in items])
        # Sampling is stratified, so the counts are closer to the expectation than those of independent draws.
        np.testing.assert_allclose(observed / 30_000, expected, atol=3 / 30_000)
        by_item = dict(zip(items, expected, strict=True))
        np.testing.assert_allclose(drawn.where.probability, [by_item[item] for item in numbers(drawn.steps)], rtol=1e-4)

    def test_new_priorities_change_what_is_drawn(self):
        replay = one_table(64, sampler="prioritized", exponent=1.0)
        state, _ = filled(replay, 2, 8)
        state, drawn = sample(replay, state, jax.random.key(0))
        chosen = jnp.where(drawn.where.time == drawn.where.time[0], 1e6, 1e-6)
        chosen = jnp.where(drawn.where.env == drawn.where.env[0], chosen, 1e-6)
        state = replay.set_priorities(state, drawn.where, chosen)
        _, after = sample(replay, state, jax.random.key(1))
        assert Counter(numbers(after.steps)).most_common(1)[0] == (numbers(drawn.steps)[0], 64)

    @pytest.mark.parametrize("batch", [32, 256])
    def test_an_item_without_weight_is_never_drawn(self, batch):
        """Rounding can move a position just below the total weight to the total weight. `find` must then return the last item."""
        weights = jnp.full((3, 5), 0.1)
        tree = jax.jit(lambda: sum_tree.set_consecutive(sum_tree.empty(3, 100, batch), jnp.arange(5), weights))()
        # The largest float32 below 1. In the last of the 32 strata, this position is rounded to the total weight.
        almost_one = jnp.full((32,), np.nextafter(np.float32(1), np.float32(0)))
        env, item, probability = jax.jit(sum_tree.find)(tree, almost_one)
        assert (np.asarray(probability) > 0).all()
        assert int(item.max()) == 4 and (int(env[-1]), int(item[-1])) == (2, 4)

    def test_a_nan_priority_makes_every_probability_nan(self):
        replay = one_table(8, sampler="prioritized")
        state, model = filled(replay, 2, 8)
        state, drawn = sample(replay, state, jax.random.key(0))
        state = replay.set_priorities(state, drawn.where, jnp.full((8,), jnp.nan))
        _, after = sample(replay, state, jax.random.key(1))
        assert np.isnan(np.asarray(after.where.probability)).all()
        assert set(numbers(after.steps)) <= set(model.items(3))


def test_set_priorities_creates_no_items():
    """A draw from an empty replay is not ready, but has positions. New priorities at these positions must not create items."""
    replay = one_table(batch=8, sampler="prioritized")
    empty = replay.init(ONE_STEP, 2)
    _, drawn = sample(replay, empty, jax.random.key(0))
    assert not drawn.ready
    after = replay.set_priorities(empty, drawn.where, jnp.full((8,), 3.0))
    np.testing.assert_array_equal(after.tables["items"].tree, 0)


class TestFifo:
    def test_a_fifo_table_draws_the_oldest_items_first(self):
        replay = one_table(4, capacity=40, sampler="fifo")
        state, model = filled(replay, 2, 10)
        seen = []
        for i in range(9):
            state, drawn = sample(replay, state, jax.random.key(i))
            assert drawn.ready
            seen += numbers(drawn.steps)
        assert seen == model.items(3)
        _, drawn = sample(replay, state, jax.random.key(0))
        assert not drawn.ready

    def test_overwritten_items_are_skipped(self):
        replay = one_table(4, capacity=24, sampler="fifo")
        state, model = filled(replay, 2, 3)
        state, drawn = sample(replay, state, jax.random.key(0))
        assert numbers(drawn.steps) == model.items(3)[:4]
        add = jax.jit(replay.add)
        for i in range(3, 30):
            state = add(state, steps(2 * i, 2, 2))
            model.add(2 * i, 2)
        _, drawn = sample(replay, state, jax.random.key(0))
        assert numbers(drawn.steps) == model.items(3)[:4]

    def test_max_times_sampled_repeats_each_item(self):
        replay = one_table(4, capacity=40, sampler="fifo", max_times_sampled=2)
        state, model = filled(replay, 2, 10)
        state, one = sample(replay, state, jax.random.key(0))
        _, two = sample(replay, state, jax.random.key(0))
        first = model.items(3)[:4]
        assert numbers(one.steps) + numbers(two.steps) == [item for item in first for _ in range(2)]


class TestMaxTimesSampled:
    def test_each_item_is_drawn_max_times_sampled_times_and_no_more(self):
        replay = one_table(5, capacity=40, max_times_sampled=2)
        state, model = filled(replay, 2, 10)
        items, counts = model.items(3), Counter()
        for i in range(len(items)):
            state, drawn = sample(replay, state, jax.random.key(i))
            if drawn.ready:
                counts.update(numbers(drawn.steps))
        assert max(counts.values()) == 2 and set(counts) <= set(items)
        # At the end, fewer than 5 items are left to draw. They are too few for a batch.
        assert sum(counts.values()) > 2 * len(items) - 2 * 5

    def test_a_prioritized_table_keeps_the_same_limit(self):
        replay = one_table(1, capacity=16, sampler="prioritized", max_times_sampled=3)
        state, model = filled(replay, 2, 4)
        items, counts = model.items(3), Counter()
        for i in range(3 * len(items)):
            state, drawn = sample(replay, state, jax.random.key(i))
            state = replay.set_priorities(state, drawn.where, jnp.full((1,), 7.0))
            counts.update(numbers(drawn.steps))
        assert counts == {item: 3 for item in items}
        _, drawn = sample(replay, state, jax.random.key(0))
        assert not drawn.ready

    def test_new_items_are_drawn_after_the_old_ones_reached_their_limit(self):
        replay = one_table(1, capacity=8, length=1, max_times_sampled=1)
        state, _ = filled(replay, 1, 4)
        for i in range(8):
            state, drawn = sample(replay, state, jax.random.key(i))
            assert drawn.ready
        assert not sample(replay, state, jax.random.key(0))[1].ready
        state, drawn = sample(replay, jax.jit(replay.add)(state, steps(8, 2, 1)), jax.random.key(0))
        assert drawn.ready and numbers(drawn.steps)[0] in [(8000,), (9000,)]


class TestReady:
    @pytest.mark.parametrize("sampler", ["uniform", "prioritized", "fifo"])
    def test_a_table_is_not_ready_before_min_size_steps_are_stored(self, sampler):
        replay = one_table(1, min_size=9, sampler=sampler)
        ready = [bool(sample(replay, filled(replay, 2, n)[0], jax.random.key(0))[1].ready) for n in range(5)]
        assert ready == [False, False, False, True, True]

    def test_samples_per_insert_limits_the_draws(self):
        replay = one_table(4, capacity=400, samples_per_insert=0.5)
        state, drawn_items = replay.init(ONE_STEP, 2), 0
        for i in range(40):
            state = replay.add(state, steps(2 * i, 2, 2))
            for j in range(3):
                state, drawn = sample(replay, state, jax.random.key(j))
                drawn_items += 4 * int(drawn.ready)
            assert drawn_items <= 0.5 * 4 * (i + 1)
        assert drawn_items == 0.5 * 4 * 40
        assert replay.metrics(state)["samples_per_insert"] == 0.5
        assert replay.metrics(state)["replay_size"] == 160

    def test_a_draw_that_is_not_ready_changes_nothing(self):
        for options in ({}, {"sampler": "fifo"}, {"max_times_sampled": 1}, {"sampler": "prioritized"}):
            replay = one_table(2, min_size=20, **options)
            state, _ = filled(replay, 2, 3)
            after, drawn = sample(replay, state, jax.random.key(0))
            assert not drawn.ready
            jax.tree.map(np.testing.assert_array_equal, after, state)


def test_several_tables_share_the_same_steps():
    replay = Replay(
        capacity=40,
        unroll=2,
        tables=(
            Table(name="transitions", length=2, batch=256),
            Table(name="sequences", length=5, batch=4, sampler="fifo", min_size=30),
            Table(name="surprising", length=3, batch=256, sampler="prioritized"),
        ),
    )
    state, model = filled(replay, 2, 7)
    for name, length in (("transitions", 2), ("surprising", 3)):
        state, drawn = sample(replay, state, jax.random.key(0), name)
        assert set(numbers(drawn.steps)) == set(model.items(length))
    assert not sample(replay, state, jax.random.key(0), "sequences")[1].ready
    state, model = filled(replay, 2, 8)
    state, drawn = sample(replay, state, jax.random.key(0), "sequences")
    assert numbers(drawn.steps) == model.items(5)[:4]
    assert set(replay.metrics(state)) == {
        "replay_size", "transitions_samples_per_insert", "sequences_samples_per_insert", "surprising_samples_per_insert",
    }  # fmt: skip


class TestCountersDoNotOverflow:
    """A `Count` is a number of rounds, of about 2^30 steps each, and a rest. A new round must not change which items are drawn."""

    @pytest.mark.parametrize("stack", [1, 2])
    @pytest.mark.parametrize(
        "options",
        [{}, {"sampler": "prioritized"}, {"sampler": "fifo"}, {"max_times_sampled": 2}],
        ids=["uniform", "prioritized", "fifo", "shuffled"],
    )
    def test_the_same_items_are_drawn_before_and_after_a_round_is_complete(self, options, stack):
        replay = dataclasses.replace(one_table(4, min_size=9, **options), stack=stack)
        young, _ = filled(replay, 2, 10)
        old = as_if_after(young, round_of_steps(replay.ring(2)) - replay.ring(2))

        @jax.jit
        def go_on(state, i):
            state, drawn = replay.sample(state, jax.random.key(i))
            if replay.tables[0].has_priorities:
                state = replay.set_priorities(state, drawn.where, 1 + drawn.steps.reward[:, 0] % 7)
            state = replay.add(state, steps(20 + 2 * i, 2, 2), lambda s: 1 + s.reward[0] % 5)
            return state, drawn

        for i in range(30):
            (young, drawn), (old, drawn_later) = go_on(young, i), go_on(old, i)
            assert drawn.ready or options.get("max_times_sampled")
            jax.tree.map(np.testing.assert_array_equal, drawn_later, drawn)
        assert young.inserted.rounds == 0 and old.inserted.rounds == 1
        assert replay.metrics(old)["replay_size"] == replay.metrics(young)["replay_size"]

    def test_a_fifo_table_skips_overwritten_items_after_a_round_is_complete(self):
        replay = one_table(4, sampler="fifo")
        state, model = filled(replay, 2, 10)
        size = round_of_steps(replay.ring(2))
        state = state._replace(inserted=Count(state.inserted.rest + size - replay.ring(2), state.inserted.rounds))
        for i in range(10, 22):
            state = jax.jit(replay.add)(state, steps(2 * i, 2, 2))
            model.add(2 * i, 2)
        assert state.inserted.rounds == 1
        _, drawn = sample(replay, state, jax.random.key(0))
        assert drawn.ready and numbers(drawn.steps) == model.items(3)[:4]

    def test_a_fifo_table_survives_many_rounds_without_a_draw(self):
        replay = one_table(4, sampler="fifo")
        state, model = filled(replay, 2, 10)
        table = state.tables["items"]
        for _ in range(5):
            table = table.renumbered(jnp.int32(round_of_steps(replay.ring(2))))
        _, drawn = sample(replay, state._replace(tables={"items": table}), jax.random.key(0))
        assert drawn.ready and numbers(drawn.steps) == model.items(3)[:4]

    def test_samples_per_insert_limits_the_draws(self):
        replay = one_table(4, samples_per_insert=0.5)
        state, _ = filled(replay, 2, 10)
        size = round_of_steps(replay.ring(2))
        # In each of the four rounds, about 2^30 steps of each of the two environments were stored.
        state = state._replace(inserted=Count(state.inserted.rest, jnp.int32(4)))
        # The product of samples per insert, environments, rounds and steps per round, divided by the batch size.
        most_draws = 0.5 * 2 * 4 * size / 4
        for share, ready in ((0.99, True), (1.01, False)):
            rounds, rest = divmod(int(share * most_draws), LARGEST_ROUND)
            table = state.tables["items"]._replace(draws=Count(jnp.int32(rest), jnp.int32(rounds)))
            after, drawn = sample(replay, state._replace(tables={"items": table}), jax.random.key(0))
            assert bool(drawn.ready) == ready
            np.testing.assert_allclose(replay.metrics(after)["samples_per_insert"], 0.5 * share, rtol=1e-6)

    def test_a_count_is_still_right_after_a_round_is_complete(self):
        count = Count(jnp.int32(LARGEST_ROUND - 2), jnp.int32(0))
        for more in range(4):
            assert int(count.rounds) * LARGEST_ROUND + int(count.rest) == LARGEST_ROUND - 2 + more
            count = count.plus(1)
        assert count == (2, 1)

    def test_a_replay_larger_than_a_round_is_refused(self, monkeypatch):
        monkeypatch.setattr(memory, "memory_bytes", lambda: 2**60)
        with pytest.raises(
            AlgorithmError, match=r"2,000,000,000 steps is too large: a replay can hold at most 1,073,741,823 steps"
        ):
            one_table(capacity=2 * 10**9).init(ONE_STEP, 8)


def as_if_after(state: ReplayState, more: int) -> ReplayState:
    """The same replay, as if `more` additional steps had been stored earlier. `more` is a multiple of the ring buffer's length."""

    def later(table):
        return table if table.next is None else table._replace(next=(table.next[0] + more, table.next[1]))

    inserted = Count(state.inserted.rest + more, state.inserted.rounds)
    return state._replace(inserted=inserted, tables={name: later(table) for name, table in state.tables.items()})


class TestMistakes:
    def test_names_of_tables_must_differ_and_exist(self):
        with pytest.raises(AlgorithmError, match="no two tables may have the same name"):
            Replay(capacity=9, unroll=1, tables=(Table(length=1, batch=1), Table(length=2, batch=1)))
        with pytest.raises(AlgorithmError, match="It has 'items'"):
            one_table().table("item")

    def test_wrong_options_are_refused(self):
        jaxtyping.config.update("jaxtyping_disable", True)  # users have no run-time type checks
        with pytest.raises(AlgorithmError, match="is not known"):
            Table(length=1, batch=1, sampler="lifo")  # pyright: ignore[reportArgumentType]
        with pytest.raises(AlgorithmError, match="at least 1"):
            Table(length=0, batch=1)
        with pytest.raises(AlgorithmError, match="a multiple of max_times_sampled"):
            Table(length=1, batch=3, sampler="fifo", max_times_sampled=2)

    def test_a_min_size_above_the_capacity_is_refused(self):
        with pytest.raises(AlgorithmError, match=r"(?s)1,000 steps are stored.*room for 24.*smaller min_size"):
            one_table(min_size=1000)

    def test_priorities_are_refused_for_a_table_without_priorities(self):
        replay = one_table()
        state, _ = filled(replay, 2, 4)
        state, drawn = sample(replay, state, jax.random.key(0))
        with pytest.raises(AlgorithmError, match='Table\\(sampler="prioritized"\\)'):
            replay.set_priorities(state, drawn.where, jnp.ones(64))

    def test_a_wrong_number_of_new_steps_is_refused(self):
        replay = one_table()
        state = replay.init(ONE_STEP, 2)
        with pytest.raises(AlgorithmError, match=r"needs arrays of shape \[2, 2, ...\]; .* begin with \[3, 2\]"):
            replay.add(state, steps(0, 3, 2))
        with pytest.raises(AlgorithmError, match=r"begin with \[2, 1\]"):
            replay.add(state, steps(0, 2, 1))

    def test_a_replay_larger_than_the_memory_is_refused(self):
        """`init` raises before it allocates memory, also under `jax.eval_shape`."""
        frame = ONE_STEP._replace(obs=jax.ShapeDtypeStruct((1000, 1000), jnp.float32))
        replay = one_table(capacity=10**9)
        for init in (replay.init, lambda step, n: jax.eval_shape(lambda: replay.init(step, n))):
            with pytest.raises(
                AlgorithmError, match=r"(?s)1,000,000,000 steps takes 4,0.* GB; this machine has.*uint8"
            ):
                init(frame, 8)

    def test_the_proposed_capacity_fits(self):
        limit = memory_bytes()
        with pytest.raises(AlgorithmError) as error:
            check_fits(jax.ShapeDtypeStruct((2 * limit,), jnp.uint8), capacity=2 * limit)
        proposed = int(error.value.fix.split("capacity of ")[1].split(" ")[0].replace(",", ""))
        assert 0.7 * limit < check_fits(jax.ShapeDtypeStruct((proposed,), jnp.uint8), capacity=proposed) <= limit


def test_extras_and_trees_are_stored_unchanged():
    one = StoredStep(
        {"a": jnp.zeros(3, jnp.uint8)}, jnp.zeros(2), jnp.zeros(()), jnp.zeros(()), jnp.zeros((), bool), jnp.zeros(())
    )
    replay = one_table(8)
    state = replay.init(one, 2)
    new = jax.tree.map(lambda x: jnp.ones((2, 2, *x.shape), x.dtype), one)
    for _ in range(3):
        state = replay.add(state, new)
    _, drawn = sample(replay, state, jax.random.key(0))
    assert drawn.steps.obs["a"].shape == (8, 3, 3) and drawn.steps.obs["a"].dtype == jnp.uint8
    assert all(bool(x.astype(bool).all()) for x in jax.tree.leaves(drawn.steps))
