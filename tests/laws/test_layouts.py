"""Levels 2 and 3 of the law (docs/law.md) for PPO and for the program of `other.py`.

The reference is `jax.jit(iterate)`. The tests compare the results after three iterations.

Level 2: a layout that computes with arrays of the same shapes as the reference gives the same bits. Level 3: replicas compute
with smaller arrays, and rounding depends on the shape of an array. So layouts with replicas agree with the reference only to 1e-10
in float64 with plain SGD, and to 1e-5 in float32 with the algorithm's own optimiser. (The tests in float64 do not use Adam, because
Adam takes almost the same step for a gradient with a wrong factor.)

Level 2 has a limit: XLA on CPU rounds `a * b + c` once or twice, depending on the other ops of the compiled program. So the
last bit can differ if a program is cut between a fragment and the arithmetic next to it. In this file, this happens only in one
leaf of one program: `Other` with Adam, whose gradient crosses from one site to another.
`test_a_sum_that_xla_may_round_twice_agrees_to_1e_6` tests this program.
"""

import contextlib
import functools
import pickle

import jax
import optax
import pytest

from choreo import networks
from choreo.algos.ppo import PPO
from choreo.envs import make
from choreo.layouts import Group, Layout, coarse, fine, fused
from choreo.plans.build import plan, plan_traced, trace_for
from laws.other import Other
from laws.reference import assert_close, assert_same_bits, planned_run, reference_run
from tiny import Tiny

NUM_ENVS = 12
SMALL = {"unroll": 4, "epochs": 2, "minibatch_size": 24, "total_steps": 480}
SMALL_LSTM = functools.partial(networks.lstm, hidden=(8,), width=8)
SMALL_MLP = functools.partial(networks.mlp, hidden=(16,))

ALGORITHMS = {
    "ppo": (functools.partial(PPO, network=SMALL_MLP, **SMALL), "jax:CartPole-v1"),
    "ppo-lstm": (functools.partial(PPO, network=SMALL_LSTM, **SMALL), "jax:CartPole-v1"),
    "ppo-continuous": (functools.partial(PPO, network=SMALL_MLP, normalise_obs=True, **SMALL), "jax:Pendulum-v1"),
    "ppo-gymnasium": (functools.partial(PPO, network=SMALL_MLP, **SMALL), "CartPole-v1"),
    "other": (Other, "jax:CartPole-v1"),
}  # fmt: skip
OTHER_WITH_ADAM = functools.partial(Other, optimizer=optax.adam), "jax:CartPole-v1"

ONE_SITE_PER_GROUP = {
    "fused": fused(),
    "coarse x1": coarse(1),
    "fine x1": fine(1),
    "three sites": Layout(Group("env"), Group("actor"), Group("learner")),
}
REPLICAS = {
    "coarse x2": coarse(2),
    "coarse x4": coarse(4),
    "fine x2": fine(2),
    "env x2, actor x3": Layout(Group("env", replicas=2), Group("actor", replicas=3), Group("learner")),
    "env x6, actor x4": Layout(Group("env", replicas=6), Group("actor", replicas=4), Group("learner")),
}
FOUR_SITES = Layout(Group("env"), Group("actor"), Group("critic"), Group("learner"))
"""For `Other`: its gradient flows from the site of the critic to the site of the learner."""
MANY_SITES = Layout(Group("env", replicas=3), Group("actor", replicas=2), Group("critic"), Group("learner"))


OPTIMISED = {("ppo", "fused"), ("ppo", "three sites")}
"""Cells that run with XLA's optimisations (`pytest -m optimised`): one with one site, one with three sites. `test_runtimes.py` has
an optimised cell with workers."""
CI = {
    "other-fused", "ppo-gymnasium-three sites",
    "ppo-lstm-coarse x2", "ppo-continuous-coarse x4", "other-fine x2", "ppo-gymnasium-env x2, actor x3",
    "ppo-coarse x4", "ppo-env x6, actor x4",
}  # fmt: skip
"""Cells that `make test` runs without XLA's optimisations: each algorithm with one site per group or with replicas, and PPO in
float64. More cells are not needed, because `test_matrix.py` runs every algorithm of Choreo in coarse and fine."""


def cells(layouts):
    """Every algorithm in every layout, as parameters."""
    return [
        pytest.param(algorithm, layout, id=f"{algorithm}-{name}", marks=marks(algorithm, name))
        for algorithm in ALGORITHMS
        for name, layout in layouts.items()
    ]


def marks(algorithm, name):
    if (algorithm, name) in OPTIMISED:
        return [pytest.mark.optimised]
    return [] if f"{algorithm}-{name}" in CI else [pytest.mark.long]


@functools.cache
def reference_of(algorithm, x64=False):
    """The algorithm, its environment and its reference result."""
    build, env_name = OTHER_WITH_ADAM if algorithm == "other-adam" else ALGORITHMS[algorithm]
    algo = build(optimizer=optax.sgd) if x64 else build()
    env = make(env_name, NUM_ENVS)
    return algo, env, reference_run(algo, env, jax.random.key(3))


@functools.cache
def traced(algorithm, x64=False):
    algo, env, _ = reference_of(algorithm, x64)
    return trace_for(algo, env, fused())


def run_in(layout, algorithm, x64=False):
    algo, env, _ = reference_of(algorithm, x64)
    planned = plan_traced(traced(algorithm, x64), layout, title=algorithm)
    return planned_run(algo, env, planned, jax.random.key(3))


def without_repeats(cells):
    """Leave out the cells with Python environments that would only repeat what other cells test."""
    return [c for c in cells if c.values[0] != "ppo-gymnasium" or c.id.endswith(("fused", "sites", "x2", "actor x3"))]


@pytest.mark.parametrize(
    ("algorithm", "layout"),
    [*without_repeats(cells(ONE_SITE_PER_GROUP)), pytest.param("other", FOUR_SITES, id="other-four sites")],
)
def test_same_shapes_give_the_same_bits(algorithm, layout):
    assert_same_bits(run_in(layout, algorithm), reference_of(algorithm)[-1])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(coarse(1), marks=pytest.mark.long),
        pytest.param(fine(1), marks=pytest.mark.long),
        pytest.param(FOUR_SITES, marks=pytest.mark.optimised),
    ],
    ids=["coarse", "fine", "four"],
)
def test_a_sum_that_xla_may_round_twice_agrees_to_1e_6(layout):
    """A gradient crosses sites and goes into Adam, which adds two products. XLA may round this sum once or twice."""
    assert_close(run_in(layout, "other-adam"), reference_of("other-adam")[-1], 1e-6)


FLOAT64 = {
    "ppo-coarse x4",
    "ppo-fine x2",
    "ppo-env x6, actor x4",
    "ppo-lstm-env x2, actor x3",
    "ppo-continuous-coarse x2",
}
"""The cells for float64. Each layout of `REPLICAS`, and each variant of PPO on JAX environments, has at least one such cell."""


def float32_cells():
    """Cells for float32: the cells of `REPLICAS` that do not run in float64, without the largest layout and without some cells
    with Python environments."""
    found = [cell for cell in without_repeats(cells(REPLICAS)) if cell.id not in FLOAT64 and "env x6" not in cell.id]
    return [cell for cell in found if cell.id != "ppo-gymnasium-fine x2"]


@pytest.mark.parametrize(("algorithm", "layout"), float32_cells())
def test_replicas_agree_in_float32(algorithm, layout):
    assert_close(run_in(layout, algorithm), reference_of(algorithm)[-1], 1e-5)


def float64_cells():
    found = [cell for cell in cells(REPLICAS) if cell.id in FLOAT64]
    assert len(found) == len(FLOAT64)
    return [*found, pytest.param("other", MANY_SITES, id="other-many sites")]


@contextlib.contextmanager
def x64_everywhere():
    """Enable float64 in all threads: callbacks of the reference can run in another thread, where `jax.enable_x64` has no effect."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize(("algorithm", "layout"), float64_cells())
def test_replicas_agree_in_float64(algorithm, layout):
    with x64_everywhere():
        assert_close(run_in(layout, algorithm, x64=True), reference_of(algorithm, x64=True)[-1], 1e-10)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ppo-lstm", "ppo-continuous"])
def test_exact_gives_the_same_bits_for_any_number_of_workers(algorithm):
    one = run_in(coarse(1, exact=True), algorithm)
    for workers in (2, 6):
        assert_same_bits(run_in(coarse(workers, exact=True), algorithm), one)
    # An LSTM on blocks rounds differently from the reference. The program of the next test gives the bits of the reference.
    assert_close(one, reference_of(algorithm)[-1], 1e-5)


def test_exact_with_an_mlp_gives_the_bits_of_the_reference():
    algo, env = ALGORITHMS["ppo"][0](minibatch_size=16), make("jax:CartPole-v1", 8)
    reference = reference_run(algo, env, jax.random.key(3))
    for layout in (coarse(2, exact=True), coarse(4, exact=True), fine(4, exact=True)):
        assert_same_bits(planned_run(algo, env, layout, jax.random.key(3)), reference)


@pytest.mark.parametrize("layout", [pytest.param(fused(), marks=pytest.mark.long), fine(2)], ids=["fused", "fine"])
def test_an_unpickled_plan_gives_the_same_bits(layout):
    algo, env = Tiny(unroll=4), make("jax:CartPole-v1", 4)
    here = plan(algo, env, layout)
    there = pickle.loads(pickle.dumps(here))
    assert there == here and hash(there) == hash(here)
    assert there != plan(algo, env, coarse(4))
    direct, sent = (planned_run(algo, env, p, jax.random.key(3)) for p in (here, _with_carry(there, here)))
    assert_same_bits(sent, direct)
    assert_close(sent, reference_run(algo, env, jax.random.key(3)), 1e-5)


def _with_carry(there, here):
    object.__setattr__(there, "carry", here.carry)  # a pickled plan has no carry: only the coordinator needs it
    return there
