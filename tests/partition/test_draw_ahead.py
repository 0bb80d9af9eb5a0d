"""Random numbers for a loop around Python environments are drawn before the loop, with the same bits as inside the loop.

There are two exceptions: random numbers from rbg keys, and loops without Python. In these cases, the numbers are drawn inside the
loop.
"""

import functools

import jax
import pytest

from choreo.algos.dqn import DQN
from choreo.envs import make
from choreo.layouts import coarse, fine, fused
from choreo.networks import q_mlp
from choreo.partition import passes
from choreo.partition.draw_ahead import DRAWS, _primitives
from choreo.partition.program import Loop, Segment
from choreo.plans.build import plan
from choreo.runtime.inprocess import InProcess
from laws.reference import assert_same_bits, run_of
from tiny import Tiny

LAYOUTS = {"fused": fused(), "coarse x2": coarse(2), "fine x2": fine(2)}


def primitives(planned):
    """The primitives of the segments inside loops ("within") and of all other segments ("before", but some run after a loop)."""
    found = {"before": set(), "within": set()}
    for step in planned.iterate.steps:
        for segment in step.body if isinstance(step, Loop) else [step]:
            if isinstance(segment, Segment):
                number = jax.ShapeDtypeStruct((), "int32")
                jaxpr = jax.make_jaxpr(segment.fn)(number, number, *(given.aval for given in segment.ins))
                found["within" if isinstance(step, Loop) else "before"] |= set(_primitives(jaxpr))
    return found


@pytest.mark.parametrize(
    "name", ["coarse x2", *(pytest.param(name, marks=pytest.mark.long) for name in ("fused", "fine x2"))]
)
def test_numbers_are_drawn_before_the_loop_with_the_same_bits(name, monkeypatch):
    algo, env = Tiny(unroll=3), make("CartPole-v1", 4)
    ahead = plan(algo, env, LAYOUTS[name])
    assert DRAWS & primitives(ahead)["before"] and not DRAWS & primitives(ahead)["within"]
    got = run_of(InProcess(ahead), jax.random.key(3), 3)

    monkeypatch.setattr(passes, "draw_ahead", lambda program: program)
    in_the_loop = plan(algo, env, LAYOUTS[name])
    assert DRAWS & primitives(in_the_loop)["within"]
    assert_same_bits(got, run_of(InProcess(in_the_loop), jax.random.key(3), 3))


def test_a_loop_without_python_draws_inside_the_loop():
    loops = [step for step in plan(Tiny(unroll=3), make("jax:CartPole-v1", 4), fine(2)).iterate.steps
             if isinstance(step, Loop)]  # fmt: skip
    assert loops and not any("drawn" in given.label for loop in loops for step in loop.body
                             if isinstance(step, Segment) for given in step.ins)  # fmt: skip


def test_numbers_from_rbg_keys_are_drawn_inside_the_loop():
    """Before the loop, Choreo would draw for all keys at once, under `vmap`. With keys of the rbg generator, this gives different
    numbers than one draw for each key."""
    with jax.default_prng_impl("rbg"):
        planned = plan(Tiny(unroll=3), make("CartPole-v1", 4), fused())
    assert DRAWS & primitives(planned)["within"]


def test_draws_become_part_of_the_segment_before_the_loop():
    algo = DQN(
        unroll=2,
        updates_per_step=1 / 8,
        batch_size=8,
        capacity=100,
        min_size=8,
        network=functools.partial(q_mlp, hidden=(8,)),
    )
    learn, loop, add = plan(algo, make("CartPole-v1", 4), fused()).iterate.steps
    assert isinstance(learn, Segment) and isinstance(loop, Loop) and isinstance(add, Segment)
    assert learn.name == "sample_items+learn" and add.name == "add"
