"""Placement reaches its fixed point even if a home must pass through many leaves of the carry, one after the other.

If a fragment mixes environments, the error names this fragment.
"""

import jax
import jax.numpy as jnp
import pytest

import choreo
from choreo.errors import PartitionError
from choreo.layouts import Group, Layout, coarse, fine
from choreo.partition.place import place
from choreo.partition.trace import trace
from choreo.plans.build import plan
from laws.reference import assert_close, planned_run, reference_run
from partition.ponds import Functions, Pond, learn, push, still

LENGTH = 10
"""The length of the queues. A placement that stops after a small, fixed number of rounds would fail this test."""


def start(env, key):
    return still(env, key) | {"line": [jnp.zeros(env.width) for _ in range(LENGTH)]}


def go(env, carry, key):
    """Two queues of LENGTH leaves. `line` moves on by one leaf in every iteration, and `rows` moves on by one leaf in every step of
    the scan. Only the first leaf of each queue is read."""

    def step(state, _):
        s, rows = state
        s = env.step(s, 0.1 * rows[0])
        return (s, [*rows[1:], s]), s[:, 0]

    rows = [jnp.zeros((env.num_envs, env.width)) for _ in range(LENGTH)]
    (s, _), first = jax.lax.scan(step, (carry["s"], rows), None, length=LENGTH + 2)
    w, slow, _ = learn(carry["w"], carry["slow"], s[None])
    line = [*carry["line"][1:], w]
    return {"w": w, "slow": slow, "s": s, "line": line}, {"m": jnp.sum(carry["line"][0]), "first": jnp.sum(first)}


@pytest.mark.parametrize("layout", [pytest.param(coarse(2), marks=pytest.mark.long), fine(2)], ids=["coarse", "fine"])
def test_placement_reaches_its_fixed_point_through_long_queues(layout):
    algo, env, key = Functions(start, go), Pond(6), jax.random.key(0)
    traced = trace(algo, env)
    placement = place(traced.iterate, layout.sites(traced.iterate.roles, 6), traced.carry_axes)
    homes = [
        placement.home(v)
        for v, name in zip(traced.iterate.body.ins, traced.iterate.in_names, strict=True)
        if "line" in name
    ]
    assert len(homes) == LENGTH and set(homes) == {placement.sites.default}, homes
    assert_close(planned_run(algo, env, layout, key), reference_run(algo, env, key), 1e-5)


@choreo.fragment("env")
def stir(s, action):
    return jnp.cumsum(0.6 * s + action, axis=0)


def test_the_error_names_the_fragment_that_mixes_environments_and_not_its_reader():
    def stirred(env, carry, key):
        s = stir(carry["s"], jax.vmap(push, (None, 0))(carry["w"], carry["s"]))
        w, slow, _ = learn(carry["w"], carry["slow"], jax.vmap(push, (None, 0))(carry["w"], s)[None])
        return {"w": w, "slow": slow, "s": s}, {}

    layout = Layout(Group("env", replicas=2), Group("actor", replicas=3), Group("learner"))
    with pytest.raises(PartitionError) as refusal:
        plan(Functions(still, stirred), Pond(6), layout)
    what, line, fix = str(refusal.value).splitlines()
    assert what == (
        "`cumsum` runs along the env axis: the fragment `stir` cannot run on `env`, which is divided into 2 blocks of "
        "environments."
    )
    assert "test_place.py" in line and fix.startswith("Use one site for `env`, ")
