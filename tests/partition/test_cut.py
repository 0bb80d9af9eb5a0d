"""The cut sends each value once to the sites that need it, in as few messages as possible. It splits a scan only if it must."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import choreo
from choreo.errors import PartitionError
from choreo.layouts import Group, Layout, coarse, fine, fused
from choreo.partition.cut import _Cutter
from choreo.partition.program import Loop, Program, Segment, Transfer
from choreo.partition.program import walk as walk_steps
from choreo.partition.verify import verify_program
from choreo.plans.build import plan
from choreo.plans.plan import Plan
from laws.reference import assert_close, assert_same_bits, planned_run, reference_run
from partition.ponds import STEPS, WALK, Functions, Pond, learn, push, pushed, reset, still, walk

WORKERS, LEARNER, INFERENCE = "env+actor", "buffer+learner", "actor+buffer+learner"
THREE = Layout(Group("env"), Group("actor"), Group("learner"))
KEY = jax.random.key(1)


def sent(planned: Plan) -> list[tuple[str, str, list[str], int]]:
    """For each transfer, in order: the sender, the receiver, the types of the values, and the number of runs per iteration."""
    return [
        (step.src, step.dst, [move.aval.str_short(short_dtypes=True) for move in step.moves], times)
        for step, times in walk_steps(planned.iterate.steps)
        if isinstance(step, Transfer)
    ]


def segments(planned: Plan) -> list[tuple[str, str, int]]:
    """For each segment, in order: the group, the name, and the number of runs per iteration."""
    return [(s.group, s.name, times) for s, times in walk_steps(planned.iterate.steps) if isinstance(s, Segment)]


class TestWhatCrosses:
    def test_nothing_crosses_in_fused(self):
        planned = plan(WALK, Pond(), fused())
        assert sent(planned) == [] and planned.single is not None

    def test_glue_at_the_end_becomes_part_of_the_only_segment(self):
        """The glue computes a counter, a key and a constant. If this glue were a second segment, Choreo could not compile several
        iterations as one loop, and could not divide an iteration among several devices."""

        def start(env, key):
            return still(env, key) | {"n": jnp.int32(0), "key": key, "ones": jnp.zeros(2)}

        def count(env, carry, key):
            s = pushed(env, carry)
            w, slow, loss = learn(carry["w"], carry["slow"], s[None])
            after = {"n": carry["n"] + 1, "key": jax.random.split(key)[0], "ones": jnp.ones(2)}
            return {"w": w, "slow": slow, "s": s} | after, {"loss": loss, "twice": 2 * carry["n"]}

        algo = Functions(start, count)
        assert segments(plan(algo, Pond(), fused())) == [(fused().groups[0].name, "push+step+learn", 1)]
        assert plan(algo, Pond(), fused(devices=2, shards=1)).partitioned
        assert_same_bits(planned_run(algo, Pond(), fused(), KEY), reference_run(algo, Pond(), KEY))
        at_workers = [name for group, name, _ in segments(plan(algo, Pond(), coarse(2))) if group == WORKERS]
        assert at_workers == ["push+step"]

    @pytest.mark.parametrize("metrics", [{}, {"m": 3.0}], ids=["no metrics", "a constant"])
    @pytest.mark.parametrize("layout", [fused(), fused(devices=2, shards=1), coarse(2), THREE], ids=str)
    def test_an_iteration_that_computes_nothing_has_no_steps(self, layout, metrics):
        """The iteration only swaps two leaves of the carry. All other leaves stay as they are."""
        algo = Functions(
            still, lambda env, c, key: (c | {"w": c["slow"], "slow": c["w"]}, jax.tree.map(jnp.float32, metrics))
        )
        planned = plan(algo, Pond(), layout)
        assert planned.iterate.steps == () and "nothing" in str(planned)
        assert_same_bits(planned_run(algo, Pond(), planned, KEY), reference_run(algo, Pond(), KEY))

    def test_a_graph_whose_ops_cannot_be_ordered_is_refused(self, monkeypatch):
        monkeypatch.setattr(_Cutter, "_can_run", lambda *_: False)
        with pytest.raises(PartitionError) as refusal:
            plan(Functions(still, lambda env, c, key: (c | {"s": pushed(env, c)}, {})), Pond(), coarse(1))
        assert str(refusal.value).startswith(
            "`push` needs a value that no site (`env+actor`, `buffer+learner`) can compute before `push` runs."
        )
        assert "ponds.py" in str(refusal.value)

    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_coarse_sends_parameters_to_workers_and_trajectories_to_the_learner(self, workers):
        """`slow` and the last states are not sent, because only the learner reads `slow`, and only the environments read the last
        states."""
        assert sent(plan(WALK, Pond(), coarse(workers))) == [
            (LEARNER, WORKERS, ["f32[3]"], 1),
            (WORKERS, LEARNER, ["f32[4,6,3]"], 1),
        ]

    @pytest.mark.parametrize("workers", [1, 2])
    def test_fine_sends_one_message_each_way_per_step(self, workers):
        """Actor and learner share a site. This site receives the states in each step and stacks them. So the stacked states are
        not sent."""
        assert sent(plan(WALK, Pond(), fine(workers))) == [
            ("env", INFERENCE, ["f32[6,3]"], STEPS),
            (INFERENCE, "env", ["f32[6,3]"], STEPS),
        ]

    def test_with_three_sites_each_value_goes_only_to_its_readers(self):
        assert sent(plan(WALK, Pond(), THREE)) == [
            ("learner", "actor", ["f32[3]"], 1),
            ("env", "actor", ["f32[6,3]"], STEPS),
            ("actor", "env", ["f32[6,3]"], STEPS),
            ("env", "learner", ["f32[4,6,3]"], 1),
        ]

    def test_keys_are_computed_where_they_are_read_and_never_sent(self):
        for layout in (coarse(2), fine(2), THREE):
            program = plan(WALK, Pond(), layout).iterate
            moved = [
                move.aval for step, _ in walk_steps(program.steps) if isinstance(step, Transfer) for move in step.moves
            ]
            assert not any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) for aval in moved)

    def test_no_value_is_sent_twice(self):
        """At one site, a segment before the scan and a segment after the scan read the same value. The value is sent only once."""

        @choreo.fragment("learner")
        def judge(w, s):
            return jnp.mean(s @ w)

        def go(env, carry, key):
            first = judge(carry["w"], carry["s"])
            after, metrics = walk(env, carry, key)
            return after, metrics | {
                "before": first,
                "after": judge(carry["w"], carry["s"]),
                "end": judge(after["w"], after["s"]),
            }

        for layout in (coarse(1), coarse(2), fine(2), THREE):
            for step, _ in walk_steps(plan(Functions(reset, go), Pond(), layout).iterate.steps):
                if isinstance(step, Transfer):
                    assert max(Counter((move.src, move.dst) for move in step.moves).values()) == 1
        found = Counter(
            (src, dst, what)
            for src, dst, types, _ in sent(plan(Functions(reset, go), Pond(), coarse(2)))
            for what in types
        )
        # Two values are f32[6,3]: the states before and after the iteration.
        assert found == {
            (LEARNER, WORKERS, "f32[3]"): 1,
            (WORKERS, LEARNER, "f32[6,3]"): 2,
            (WORKERS, LEARNER, "f32[4,6,3]"): 1,
        }

    def test_an_argument_that_a_fragment_returns_unchanged_is_not_sent(self):
        """Many fragments return one of their arguments among their results. Here, the actor returns its parameters. The learner has
        these parameters already, so the workers must not send them back."""

        @choreo.fragment("actor")
        def act_and_return(w, s):
            return w, s, w * jnp.tanh(s)

        @choreo.fragment("learner")
        def improve(w, unchanged, s):
            return w - 0.1 * jnp.mean(unchanged * s, 0)

        def go(env, carry, key):
            w, s, action = act_and_return(jnp.tile(carry["w"], (6, 1)), carry["s"])
            s = env.step(s, action)
            return carry | {"s": s, "w": improve(carry["w"], w, s)}, {"m": jnp.sum(w)}

        algo = Functions(still, go)
        for layout in (coarse(1), coarse(2)):
            to_learner = [types for src, _, types, _ in sent(plan(algo, Pond(), layout)) if src == WORKERS]
            assert to_learner == [["f32[6,3]"]]
        assert_same_bits(planned_run(algo, Pond(), coarse(1), KEY), reference_run(algo, Pond(), KEY))

    def test_results_without_a_reader_are_not_sent(self):
        @choreo.fragment("actor")
        def act_and_more(w, s):
            return w * jnp.tanh(s), jnp.exp(s), {"entropy": jnp.sum(s)}

        def go(env, carry, key):
            action, *_ = jax.vmap(act_and_more, (None, 0))(carry["w"], carry["s"])
            s = env.step(carry["s"], action)
            w, slow, loss = learn(carry["w"], carry["slow"], s[None])
            return {"w": w, "slow": slow, "s": s}, {"loss": loss}

        assert [types for *_, types, _ in sent(plan(Functions(still, go), Pond(), coarse(2)))] == [
            ["f32[3]"],
            ["f32[6,3]"],
        ]

    def test_only_the_parameters_that_the_actor_reads_are_sent(self):
        @choreo.fragment("actor")
        def act_with_all(params, s):
            return params["policy"] * jnp.tanh(s)  # does not read the weights of the value function

        @choreo.fragment("learner")
        def improve(params, s):
            return jax.tree.map(lambda w: w - 0.1 * jnp.mean(s), params)

        def start(env, key):
            return {"params": {"policy": jnp.ones(3), "value": jnp.ones(7)}, "s": env.reset(env.keys(key))}

        def go(env, carry, key):
            s = env.step(carry["s"], jax.vmap(act_with_all, (None, 0))(carry["params"], carry["s"]))
            return {"params": improve(carry["params"], s), "s": s}, {"m": jnp.mean(s)}

        for layout in (coarse(1), coarse(2)):
            assert sent(plan(Functions(start, go), Pond(), layout))[0] == (LEARNER, WORKERS, ["f32[3]"], 1)

    def test_a_value_that_never_changes_is_not_sent_at_all(self):
        def go(env, carry, key):
            after, metrics = walk(env, carry, key)
            return after | {"w": carry["w"]}, metrics

        assert sent(plan(Functions(still, go), Pond(), coarse(2))) == [(WORKERS, LEARNER, ["f32[4,6,3]"], 1)]


class TestSegments:
    def test_a_scan_whose_roles_are_in_one_group_stays_whole(self):
        assert segments(plan(WALK, Pond(), fused())) == [("env+actor+buffer+learner", "4 x (act+step)+learn", 1)]
        assert segments(plan(WALK, Pond(), coarse(2))) == [(WORKERS, "4 x (act+step)", 1), (LEARNER, "learn", 1)]
        assert not any(isinstance(step, Loop) for step in plan(WALK, Pond(), coarse(2)).iterate.steps)

    def test_a_split_scan_becomes_a_loop(self):
        planned = plan(WALK, Pond(), fine(2))
        (loop,) = [step for step in planned.iterate.steps if isinstance(step, Loop)]
        assert (loop.length, set(loop.parts)) == (STEPS, {"env", INFERENCE})
        assert segments(planned) == [
            (INFERENCE, "glue", 1),
            (INFERENCE, "act", STEPS),
            ("env", "step", STEPS),
            (INFERENCE, "learn", 1),
        ]

    def test_only_readers_stack_the_slices_of_a_loop(self):
        (loop,) = [step for step in plan(WALK, Pond(), fine(2)).iterate.steps if isinstance(step, Loop)]
        assert {group: len(part.ys) for group, part in loop.parts.items()} == {"env": 0, INFERENCE: 1}

    def test_a_group_without_roles_is_dropped(self):
        layout = Layout(Group("env", "actor", replicas=2), Group("buffer"), Group("learner"))
        planned = plan(WALK, Pond(), layout)
        assert list(planned.sites.replicas) == [WORKERS, "learner"] and planned.num_sites == 3
        assert {group for group, *_ in segments(planned)} == {WORKERS, "learner"}


@pytest.mark.parametrize(
    ("env_sites", "actor_sites", "num_envs"), [pytest.param(2, 3, 6, marks=pytest.mark.long), (3, 2, 6), (2, 3, 12)]
)
def test_blocks_are_redistributed_between_groups_with_different_numbers_of_replicas(env_sites, actor_sites, num_envs):
    layout = Layout(Group("env", replicas=env_sites), Group("actor", replicas=actor_sites), Group("learner"))
    env = Pond(num_envs=num_envs)
    planned = plan(WALK, env, layout)
    axes = [
        (step.src, step.dst, move.src_axis, move.dst_axis)
        for step, _ in walk_steps(planned.iterate.steps)
        if isinstance(step, Transfer)
        for move in step.moves
    ]
    assert axes[1:3] == [("env", "actor", 0, 0), ("actor", "env", 0, 0)]
    assert_close(planned_run(WALK, env, planned, KEY), reference_run(WALK, env, KEY), 1e-5)


class TestRefused:
    """A `cond` or `while` with fragments of two sites is refused. The error shows the user's line and says what to do. If all
    fragments are at one site, the program is accepted."""

    def refusal(self, branch) -> list[str]:
        def go(env, carry, key):
            return carry | {"s": branch(env, carry)}, {"m": jnp.ones(())}

        algo = Functions(still, go)
        assert len(plan(algo, Pond(), fused()).iterate.steps) == 1, "with one site, the program must be accepted"
        with pytest.raises(PartitionError) as error:
            plan(algo, Pond(), fine(1))
        return str(error.value).splitlines()

    def check(self, lines, primitive):
        assert lines[0] == (
            f"`{primitive}` contains fragments of the roles `actor`, `env`, which this layout puts on different sites "
            f"(`{INFERENCE}`, `env`)."
        )
        assert lines[1].startswith("  at  ") and "test_cut.py:" in lines[1]
        assert lines[2:] == [
            "Only `lax.scan` can be split over sites. Put these roles into one group, or move the branch inside one fragment."
        ]

    def step(self, env, carry, s):
        return env.step(s, jax.vmap(push, (None, 0))(carry["w"], s))

    def test_a_cond_over_two_sites_is_refused(self):
        def branch(env, carry):
            s = carry["s"]
            return lax.cond(jnp.sum(s) > 0, lambda: self.step(env, carry, s), lambda: s)  # the user's line

        self.check(self.refusal(branch), "cond")

    def test_a_while_over_two_sites_is_refused(self):
        def branch(env, carry):
            return lax.while_loop(lambda s: jnp.sum(s) > 100, lambda s: self.step(env, carry, s), carry["s"])

        self.check(self.refusal(branch), "while")

    def test_the_error_names_the_line_of_the_branch(self):
        def branch(env, carry):
            return lax.cond(jnp.sum(carry["s"]) > 0, lambda: self.step(env, carry, carry["s"]), lambda: carry["s"])

        line = self.refusal(branch)[1]
        assert f"test_cut.py:{branch.__code__.co_firstlineno + 1}:" in line and line.endswith("branch)")

    def test_a_cond_inside_of_one_site_is_accepted(self):
        def go(env, carry, key):
            s = lax.cond(jnp.sum(carry["w"]) > 0, lambda: self.step(env, carry, carry["s"]), lambda: carry["s"])
            w, slow, loss = learn(carry["w"], carry["slow"], s[None])
            return {"w": w, "slow": slow, "s": s}, {"loss": loss}

        algo = Functions(still, go)
        assert_same_bits(planned_run(algo, Pond(), coarse(1), KEY), reference_run(algo, Pond(), KEY))


class TestTheVerifier:
    """The verifier finds bugs of the compiler. Most of the broken programs below read a slot that was not written: then the
    message names the slot and the step that reads it."""

    def program(self, layout=None) -> Program:
        return plan(WALK, Pond(), layout or coarse(2)).iterate

    def test_a_good_program_passes(self):
        for layout in (fused(), coarse(2), fine(2), THREE):
            program = self.program(layout)
            assert verify_program(program) is program

    def test_a_missing_transfer_is_found(self):
        program = self.program()
        for i, step in enumerate(program.steps):
            if isinstance(step, Transfer):
                broken = replace(program, steps=program.steps[:i] + program.steps[i + 1 :])
                with pytest.raises(
                    AssertionError,
                    match=rf"segment `.*` of `{step.dst.replace('+', '.')}` .* is read before it is written",
                ):
                    verify_program(broken)

    def test_a_transfer_without_moves_is_found(self):
        program = self.program(THREE)
        first = next(step for step in program.steps if isinstance(step, Transfer))
        broken = replace(program, steps=tuple(replace(s, moves=()) if s is first else s for s in program.steps))
        with pytest.raises(AssertionError, match="input of a loop at `actor`: slot .* is read before it is written"):
            verify_program(broken)

    def test_swapped_steps_are_found(self):
        program = self.program()
        for i in range(len(program.steps) - 1):
            steps = list(program.steps)
            steps[i], steps[i + 1] = steps[i + 1], steps[i]
            with pytest.raises(AssertionError, match="is read before it is written"):
                verify_program(replace(program, steps=tuple(steps)))

    def test_a_missing_transfer_inside_a_loop_is_found(self):
        program = self.program(fine(2))
        (loop,) = [step for step in program.steps if isinstance(step, Loop)]
        for step in loop.body:
            if isinstance(step, Transfer):
                body = tuple(other for other in loop.body if other is not step)
                steps = tuple(replace(s, body=body) if s is loop else s for s in program.steps)
                with pytest.raises(AssertionError, match=r"`iterate`, loop, .* is read before it is written"):
                    verify_program(replace(program, steps=steps))

    def test_a_group_that_sends_to_itself_is_found(self):
        program = self.program()
        steps = tuple(replace(s, dst=s.src) if isinstance(s, Transfer) else s for s in program.steps)
        with pytest.raises(AssertionError, match="sends to itself"):
            verify_program(replace(program, steps=steps))

    def test_an_output_that_no_group_holds_is_found(self):
        program = self.program()
        outs = (*program.outs[:-1], replace(program.outs[-1], held={}))
        with pytest.raises(AssertionError, match="no group holds the output `loss`"):
            verify_program(replace(program, outs=outs))

    def test_an_output_that_never_reaches_its_group_is_found(self):
        program = self.program()
        outs = (*program.outs[:-1], replace(program.outs[-1], held={WORKERS: program.outs[-1].held[LEARNER]}))
        with pytest.raises(AssertionError, match="output `loss` of `iterate`: slot .* is read before it is written"):
            verify_program(replace(program, outs=outs))


def test_a_reversed_scan_can_be_split_over_sites():
    """A reversed scan reads its slices from the last to the first. In the stacked result, the result for slice i is at index i."""

    def go(env, carry, key):
        weights = jnp.arange(1.0, 5.0)

        def step(s, weight):
            s = env.step(s, jax.vmap(push, (None, 0))(carry["w"] * weight, s))
            return s, s * weight

        s, path = lax.scan(step, carry["s"], weights, reverse=True)
        w, slow, loss = learn(carry["w"], carry["slow"], path * weights[:, None, None])
        return {"w": w, "slow": slow, "s": s}, {"loss": loss, "last": path[0, 0, 0], "first": path[-1, 0, 0]}

    algo, env = Functions(still, go), Pond()
    reference = reference_run(algo, env, KEY)
    assert_same_bits(planned_run(algo, env, coarse(1), KEY), reference)
    for layout in (THREE, fine(2)):
        assert_close(planned_run(algo, env, layout, KEY), reference, 1e-6)
    assert not np.allclose(reference["metrics/first"], reference["metrics/last"])
