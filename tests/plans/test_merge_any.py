"""With merge="any", a carry that cannot be divided among the workers is refused. The message says what to do."""

import jax
import jax.numpy as jnp
import pytest

import choreo
from choreo.errors import PartitionError
from choreo.layouts import coarse
from choreo.plans.build import plan
from partition.ponds import Functions, Pond, learn, push, still


@choreo.fragment("actor")
def count_up(steps):
    return steps + 1


def begin(env, key):
    return {**still(env, key), "steps": jnp.int32(0)}


def go(env, carry, key):
    s = env.step(carry["s"], jax.vmap(push, (None, 0))(carry["w"], carry["s"]))
    w, slow, loss = learn(carry["w"], carry["w"], s[None])
    return {"w": w, "slow": slow, "s": s, "steps": count_up(carry["steps"])}, {"loss": loss}


def test_a_leaf_that_every_worker_would_compute_for_itself_is_refused():
    with pytest.raises(PartitionError) as refusal:
        plan(Functions(begin, go), Pond(4), coarse(2, max_lag=4, merge="any"))
    assert str(refusal.value) == (
        "With merge=\"any\" every worker would compute a different `carry['steps']`. The workers' values cannot be "
        "combined, because this leaf has no env axis.\n"
        'Let the learner compute it (a fragment of the role `learner` or `update`), or use merge="all".'
    )
