"""Homes settle however long the way is on which a fact travels from leaf to leaf of the carry."""

import jax
import jax.numpy as jnp
import pytest

from choreo.layouts import coarse, fine
from choreo.partition.place import place
from choreo.partition.trace import trace
from laws.reference import assert_close, planned_run, reference_run
from partition.ponds import Functions, Pond, learn, still

LENGTH = 10
"""Longer than any number of rounds one would think of as enough."""


def start(env, key):
    return still(env, key) | {"line": [jnp.zeros(env.width) for _ in range(LENGTH)]}


def go(env, carry, key):
    """Each value waits LENGTH iterations, or steps of the loop, before it is read: one leaf back every time."""

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
def test_a_long_delay_line(layout):
    algo, env, key = Functions(start, go), Pond(6), jax.random.key(0)
    traced = trace(algo, env)
    placement = place(traced.iterate, layout.sites(traced.iterate.roles, 6), traced.carry_axes)
    homes = [
        placement.home(v)
        for v, name in zip(traced.iterate.block.ins, traced.iterate.in_names, strict=True)
        if "line" in name
    ]
    assert len(homes) == LENGTH and set(homes) == {placement.sites.default}, homes
    assert_close(planned_run(algo, env, layout, key), reference_run(algo, env, key), 1e-5)
