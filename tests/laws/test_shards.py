"""With S learner shards, results do not depend on the number of sites or devices on which the shards run.

The reference is `vmap` of `iterate` over the shards. Each shard has E/S of the E environments, and a separate key. Results agree
with the reference to 1e-10 in float64 with plain SGD, and to 1e-5 in float32 (level 3 of docs/law.md). Worker processes give the
same bits as one process (level 1). Choreo refuses a program or a layout that does not fit the shards.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import choreo
from choreo import envs, networks
from choreo.algos import A2C
from choreo.errors import AlgorithmError, LayoutError, PartitionError
from choreo.plans.build import plan, plan_traced, trace_for
from choreo.roles import SHARD_AXIS
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from laws.reference import Run, assert_close, assert_same_bits, reference_run, run_of, sharded_reference
from partition.ponds import Functions, Pond, pushed, still

KEY = jax.random.key(3)
SHARDS = 4
ENV = envs.make("jax:CartPole-v1", 8)


LAYOUTS = {
    "one site": choreo.fused(shards=SHARDS),
    "2 devices": choreo.fused(devices=2, shards=SHARDS),
    "4 devices": choreo.fused(devices=4),
    "coarse x2": choreo.coarse(2, shards=SHARDS),
    "fine x2": choreo.fine(2, shards=SHARDS),
    "2 sites": choreo.multi_learner(2, shards=SHARDS),
    "4 workers, 2 learners": choreo.sebulba(4, 2),
    "2 workers, 4 learners": choreo.sebulba(2, 4),
}
ON_ONE_SITE = ["one site", "2 devices", "4 devices"]
NETWORK = functools.partial(networks.mlp, hidden=(16,))


def ppo(optimizer=None):
    return choreo.PPO(unroll=4, minibatch_size=4, epochs=2, network=NETWORK, optimizer=optimizer)


def a2c(optimizer=None):
    """For tests of the transfers between sites: A2C compiles in half the time of PPO."""
    return A2C(unroll=4, network=NETWORK, optimizer=optimizer)


@functools.cache
def reference(make, float64: bool) -> Run:
    return sharded_reference(make(optax.sgd if float64 else None), ENV, SHARDS, KEY)


@functools.cache
def traced(make, float64: bool):
    return trace_for(make(optax.sgd if float64 else None), ENV, LAYOUTS["one site"])


@functools.cache
def planned(make, float64: bool, layout: str):
    return plan_traced(traced(make, float64), LAYOUTS[layout], title=layout)


@pytest.mark.long
@pytest.mark.parametrize("layout", ON_ONE_SITE)
def test_any_number_of_devices_gives_the_same_results(layout):
    run = run_of(InProcess(planned(ppo, False, layout)), KEY)
    assert_close(run, reference(ppo, float64=False), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("layout", ON_ONE_SITE)
def test_any_number_of_devices_gives_the_same_results_in_float64(layout):
    """`make test` skips this test, because PPO compiles slowly. In its place, the next test checks float64 with A2C."""
    with jax.enable_x64(True):
        run = run_of(InProcess(planned(ppo, True, layout)), KEY)
        assert_close(run, reference(ppo, float64=True), 1e-10)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.long] if name == "4 devices" else []) for name in LAYOUTS],
)
def test_any_number_of_sites_or_devices_gives_the_same_results(layout):
    with jax.enable_x64(True):
        run = run_of(InProcess(planned(a2c, True, layout)), KEY)
        assert_close(run, reference(a2c, float64=True), 1e-10)


@pytest.mark.long
def test_two_processes_give_the_same_results():
    """`make test` skips this test, because `test_python_environments_give_the_same_results` also runs two processes."""
    with jax.enable_x64(True):
        the_plan = planned(ppo, True, "2 sites")
        run = run_of(Local(the_plan), KEY)
        assert_close(run, reference(ppo, float64=True), 1e-10)
        assert_same_bits(run, run_of(InProcess(the_plan), KEY))


@pytest.mark.long  # `make test` runs fewer replicas, in `test_any_number_of_sites_or_devices_gives_the_same_results`
def test_more_replicas_than_devices_give_the_same_results():
    """Eight replicas run on four devices, so two replicas take turns on each device."""
    run = run_of(InProcess(plan(a2c(), ENV, choreo.multi_learner(8))), KEY)
    assert_close(run, sharded_reference(a2c(), ENV, 8, KEY), 1e-5)


def test_one_shard_on_several_devices_is_divided_by_the_compiler():
    runtime = InProcess(plan(a2c(), ENV, choreo.fused(devices=4, shards=1)))
    runtime.start(KEY)
    runtime.run(0, 1)
    (leaves,) = runtime.execution.leaves.values()
    obs = next(leaf for leaf in leaves if leaf.shape == (8, 4))
    assert len(obs.sharding.device_set) == 4 and obs.addressable_shards[0].data.shape == (2, 4)
    assert_close(run_of(runtime, KEY), reference_run(a2c(), ENV, KEY), 1e-5)


def test_more_devices_than_jax_sees_are_refused():
    with pytest.raises(LayoutError) as refusal:
        InProcess(plan(a2c(), ENV, choreo.fused(devices=8)))
    assert str(refusal.value).startswith(
        "The layout wants 8 devices for `env+actor+buffer+learner`, but JAX sees 4 (cpu) here.\nUse devices=4; on a CPU"
    )


def test_statistics_of_observations_are_those_of_all_shards():
    algo = A2C(unroll=4, network=NETWORK, normalise_obs=True)
    run = run_of(InProcess(plan(algo, ENV, choreo.multi_learner(2))), KEY)
    assert_close(run, sharded_reference(algo, ENV, 2, KEY), 1e-5)


def test_python_environments_give_the_same_results():
    """The environments are stepped by one site, by one site with two devices, or by two processes."""
    algo, env = a2c(), envs.make("CartPole-v1", 8)
    one, two = (
        run_of(InProcess(plan(algo, env, layout)), KEY) for layout in (LAYOUTS["one site"], LAYOUTS["2 devices"])
    )
    assert_close(two, one, 1e-5)
    assert_same_bits(run_of(Local(plan(algo, env, LAYOUTS["2 sites"])), KEY), two)


class Carry(NamedTuple):
    train: jax.Array
    """State of the learner. It has no env axis, so it must be equal on all shards."""
    env_state: jax.Array
    """State of each environment."""
    obs: jax.Array
    """Observation of each environment."""


def test_a_carry_that_differs_between_shards_is_refused():
    class Selfish:
        def init(self, env, key):
            return Carry(jnp.zeros(()), *env.reset(env.keys(key)))

        def iterate(self, env, carry, key):
            return carry._replace(train=carry.train + jnp.mean(carry.obs)), {}

    with pytest.raises(AlgorithmError) as refusal:
        plan(Selfish(), ENV, choreo.multi_learner(2))
    assert str(refusal.value).startswith(
        "With 2 learner shards, `Selfish.iterate` would return a different `carry.train` on each shard. "
        "`carry.train` has no env axis"
    )
    assert "choreo.all_reduce(x)" in str(refusal.value)


@pytest.mark.parametrize("layout", [choreo.multi_learner(2), choreo.fused(shards=2)])
def test_a_gradient_through_all_reduce_is_refused_or_right(layout):
    class Coupled:
        def init(self, env, key):
            return Carry(jnp.ones(4), *env.reset(env.keys(key)))

        @choreo.fragment("learner")
        def learn(self, train, obs):
            def loss(w):
                return jnp.sum(jnp.tanh(obs @ w) * choreo.all_reduce(jnp.sin(jnp.mean(obs @ w))))

            return train - 0.1 * choreo.all_reduce(jax.grad(loss)(train))

        def iterate(self, env, carry, key):
            return carry._replace(train=self.learn(carry.train, carry.obs)), {"w": jnp.sum(carry.train)}

    try:
        runtime = InProcess(plan(Coupled(), ENV, layout))
    except PartitionError:
        assert layout.name == "multi_learner", "only multi_learner may refuse this program: fused runs it unchanged"
        return
    assert_close(run_of(runtime, KEY), sharded_reference(Coupled(), ENV, 2, KEY), 1e-5)


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        (choreo.multi_learner(3), "8 environments cannot be divided evenly among 3 learner shards."),
        (choreo.coarse(4, shards=2), "2 learner shards cannot be divided evenly among 4 replicas of `env+actor`."),
        (choreo.coarse(2, shards=2, exact=True), "exact=True cannot be combined with 2 learner shards"),
    ],
)
def test_layouts_that_do_not_fit_the_shards_are_refused(layout, what):
    with pytest.raises(LayoutError) as refusal:
        plan(ppo(), ENV, layout)
    assert str(refusal.value).startswith(what)


def step_and_learn(learn):
    """An algorithm that steps all environments once and learns with the given function."""

    def go(env, carry, key):
        s = pushed(env, carry)
        return carry | {"s": s, "w": learn(carry["w"], s)}, {"m": jnp.mean(s)}

    return Functions(still, go)


@choreo.fragment("learner")
def learn_from_flags(w, s):
    """Learn from reductions of bools: the sum is the number of True values, the maximum is a bool, the mean is a float."""
    flags = [choreo.all_reduce(s[:, 0] > 0.1, op) for op in ("sum", "max", "mean")]
    return w - 0.1 * choreo.all_reduce(jnp.mean(s, 0)) * sum(jnp.mean(flag.astype(s.dtype)) for flag in flags)


@pytest.mark.parametrize("layout", [choreo.sebulba(2, 2), choreo.multi_learner(2)], ids=lambda layout: layout.name)
def test_all_reduce_of_bools(layout):
    algo, env = step_and_learn(learn_from_flags), Pond(6)
    assert_close(run_of(InProcess(plan(algo, env, layout)), KEY), sharded_reference(algo, env, 2, KEY), 1e-5)


@pytest.mark.parametrize("op", ["mean", "sum", "max"])
@pytest.mark.parametrize(
    "dtype", [bool, jnp.int32, jnp.int8, jnp.float32, jnp.bfloat16], ids=lambda t: jnp.dtype(t).name
)
def test_the_type_of_all_reduce_does_not_depend_on_the_number_of_shards(dtype, op):
    x = jnp.ones((2, 3), dtype)
    several = jax.vmap(lambda x: choreo.all_reduce(x, op), axis_name=SHARD_AXIS)(x)
    assert choreo.all_reduce(x[0], op).dtype == several.dtype


def test_a_hard_coded_number_of_environments_is_refused_with_a_hint_at_shards():
    def learn(w, s):
        return w - 0.1 * choreo.all_reduce(jnp.mean(jnp.stack([s, s]).reshape(12, 3), 0))

    with pytest.raises(AlgorithmError) as refusal:
        plan(step_and_learn(learn), Pond(6), choreo.sebulba(2, 2))
    assert re.sub(r"  at  .*test_shards.py:\d+", "  at  FILE:LINE", str(refusal.value)) == (
        "With 2 learner shards, `Functions.iterate` is given 3 environments at a time, not all 6, and fails: cannot reshape array "
        "of shape (2, 3, 3) (size 18) into shape (12, 3) (size 36)\n"
        "  at  FILE:LINE (learn)\n"
        "Take the number of environments from the environment that `iterate` is given (env.num_envs) or from shapes. "
        "Or use one shard."
    )


def test_an_error_that_also_occurs_with_one_shard_is_raised_unchanged():
    with pytest.raises(TypeError, match=r"cannot reshape array of shape \(6, 3\)"):
        plan(step_and_learn(lambda w, s: s.reshape(5, 5)), Pond(6), choreo.sebulba(2, 2))
