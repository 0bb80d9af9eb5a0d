"""Level 3 of the law (docs/law.md) for edge cases: unusual leaves, containers, static values, configurations and sizes.

`edge_cases/` has the programs. The reference is the program without marks. The tests compare all that a user can see: the
structure and the types of the carry, and every metric of every iteration under its own name; for whole runs, also the summary
and the evaluation. Floats agree up to 1e-5. For a type with fewer digits than that, such as bfloat16, the tolerance is twice the
precision of the type. Everything else agrees bit for bit. E is the number of environments.

`runs` asserts that a program runs under the given layouts and gives the reference result. `refused_or_equal` also allows a
refusal that names the leaf, the metric or the user's line. Only a refusal about merge="any" need not name any of these.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo.errors import AlgorithmError
from choreo.layouts import Group, Layout, coarse, fine, fused
from choreo.partition.trace import trace
from choreo.plans.build import plan
from choreo.runs.config import RunConfig
from choreo.runs.evaluation import evaluate
from choreo.runs.run import Run, Timing
from choreo.testing import unmarked
from laws.edge_cases import FOLDER
from laws.edge_cases.containers import (
    CONTAINERS,
    METRICS,
    METRICS_THAT_RUN,
    in_container,
    through_fragments,
    with_metrics,
)
from laws.edge_cases.leaves import ARRAYS, COUNTERS, MODULES, PYTHON, with_leaf
from laws.edge_cases.program import learn
from laws.edge_cases.sizes import ONE_AXIS, SHAPES, SIZED, with_rows, with_shape
from laws.edge_cases.statics import EQUALS, HOLDERS, NUMBERS, with_static
from laws.edge_cases.whole_run import Learned, Learner
from laws.reference import assert_same_leaf, named, reference_run
from laws.refuse_or_equal import EVERYTHING_REPLICATED, LAYOUTS, Pond, refuse_or_equal
from partition.ponds import Functions

E = 6
POND = Pond(E)
FUSED = {"fused": fused()}
COARSE = {"coarse x2": coarse(2)}
FINE = {"fine x2": fine(2)}
UNEVEN = {"env x2, actor x3": LAYOUTS["env x2, actor x3"]}
ONE_SITE_EACH = {"three sites": Layout(Group("env"), Group("actor"), Group("learner"))}
RELAXED = {"lag": coarse(2, max_lag=2)}
ANY = {"any": coarse(2, merge="any")}
SHARDS = {"shards": coarse(2, shards=2)}
EVERY_LAYOUT = (
    FUSED | COARSE | FINE | UNEVEN | ONE_SITE_EACH | RELAXED | ANY | SHARDS
    | {"everything x2": EVERYTHING_REPLICATED, "exact": coarse(3, exact=True), "fused, shards": fused(shards=2)}
)  # fmt: skip


def runs(algo: Functions, layouts: dict[str, Layout], env: Pond = POND, *, compiled: bool = False) -> None:
    """Assert that under each layout the program is not refused and gives the reference result."""
    refusals = refuse_or_equal(algo, env, FOLDER, layouts, compiled=compiled)
    refused = {name: str(refusal) for name, refusal in refusals.items() if refusal}
    assert not refused, refused


def refused_or_equal(algo: Functions, layouts: dict[str, Layout], env: Pond = POND) -> None:
    """Assert that under each layout the program is refused or gives the reference result."""
    refuse_or_equal(algo, env, FOLDER, layouts)


def cases(*names: Collection[Any], ci: Callable[..., bool]) -> list[Any]:
    """All combinations of `names`, as parameters. Only `make test-long` runs the combinations for which `ci` is False."""
    return [
        pytest.param(*cell, id=" - ".join(map(str, cell)), marks=[] if ci(*cell) else [pytest.mark.long])
        for cell in itertools.product(*names)
    ]


def never(*_: Any) -> bool:
    """A value for the argument `ci` of `cases`. With it, `make test` runs no combination."""
    return False


# Leaves


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_every_kind_is_carried_swapped_aliased_and_returned_by_the_actor(name):
    runs(with_leaf(*ARRAYS[name]), COARSE)


@pytest.mark.parametrize(("name", "layout"), cases(ARRAYS, [*EVERY_LAYOUT], ci=never))
def test_arrays_are_refused_or_equal_in_every_layout(name, layout):
    refused_or_equal(with_leaf(*ARRAYS[name]), {layout: EVERY_LAYOUT[layout]})


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "int4", "bool", "key", "key rbg", "old-style key", "zero-size"]
)
def test_no_memory_is_donated_that_is_still_used(name):
    """Segments are compiled as in a run. Donating memory that another leaf still uses would give a wrong result."""
    runs(with_leaf(*ARRAYS[name]), FUSED, compiled=True)


@pytest.mark.parametrize("name", PYTHON)
def test_a_python_number_is_carried_swapped_and_changed(name):
    runs(with_leaf(*PYTHON[name]), FUSED)


@pytest.mark.parametrize(
    ("name", "layout"),
    cases(
        COUNTERS,
        ["fused", "coarse x2"],
        ci=lambda name, layout: layout == "fused" or name in ("int", "bool that flips", "changed by an actor"),
    ),
)
def test_the_learner_reads_the_current_value_of_a_python_number(name, layout):
    runs(COUNTERS[name], {layout: EVERY_LAYOUT[layout]})


@pytest.mark.parametrize("name", ["int", "bool that flips", "a chain of changes"])
def test_the_learner_reads_the_current_value_in_compiled_iterations(name):
    runs(COUNTERS[name], FUSED, compiled=True)


@pytest.mark.parametrize(
    ("name", "layout"),
    cases(
        MODULES,
        ["coarse x2", "fused"],
        ci=lambda name, layout: layout == "coarse x2" and name in ("Dropout", "MultiheadAttention"),
    ),
)
def test_a_module_keeps_its_python_leaves(name, layout):
    runs(MODULES[name], {layout: EVERY_LAYOUT[layout]})


# Containers


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_carry_may_be_in_any_container(name):
    runs(in_container(name), COARSE)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_fragment_takes_and_returns_every_container(name):
    runs(through_fragments(name), COARSE)


@pytest.mark.parametrize(("name", "layout"), cases(CONTAINERS, [*EVERY_LAYOUT], ci=never))
def test_containers_are_refused_or_equal_in_every_layout(name, layout):
    refused_or_equal(in_container(name), {layout: EVERY_LAYOUT[layout]})


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_every_container_and_type_are_refused_or_equal(name):
    check = runs if name in METRICS_THAT_RUN else refused_or_equal
    check(with_metrics(name), FUSED | COARSE)


def test_a_random_key_is_refused_as_a_metric():
    with pytest.raises(AlgorithmError, match="The metric `.*` of `Functions` is a random key, not a number"):
        plan(with_metrics("key"), POND, FUSED["fused"])


@pytest.mark.parametrize(("name", "layout"), cases(METRICS, [*EVERY_LAYOUT], ci=never))
def test_metrics_are_refused_or_equal_in_every_layout(name, layout):
    refused_or_equal(with_metrics(name), {layout: EVERY_LAYOUT[layout]})


@pytest.mark.parametrize("layout", ["any", "shards", "lag"])
def test_metrics_keep_their_names_in_relaxed_and_sharded_layouts(layout):
    runs(with_metrics("OrderedDict"), {layout: EVERY_LAYOUT[layout]})


# Static values that compare equal


MOST_USED = ("argument", "self", "static field")
"""The most common places of a static value. `make test` tries every group of values in these places. In all other places, it tries
only the groups "one" and "zero"."""


def types_and_bits(result: Any) -> list[Any]:
    """Types, shapes and bits of a result."""
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(result)]


@pytest.mark.parametrize(
    ("holder", "values"),
    cases(HOLDERS, EQUALS, ci=lambda holder, values: values in ("one", "zero") or holder in MOST_USED),
)
def test_statics_that_compare_equal_are_told_apart(holder, values):
    """The test uses the values one after the other, in both orders. A value must never get the program of an earlier value."""
    call, x = HOLDERS[holder], jnp.float32([0.5, -2.0])
    for value in (*EQUALS[values], *reversed(EQUALS[values])):
        with unmarked():
            wanted = types_and_bits(call(value, x))
        assert types_and_bits(call(value, x)) == wanted, f"{value!r} in {holder}"


@pytest.mark.parametrize("holder", ["self", "static field", "partial", "NamedTuple"])
def test_statics_that_compare_equal_are_told_apart_under_jit_vmap_and_grad(holder):
    x = jnp.float32([0.5, -2.0])
    for value in (1, 1.0, True, 0.0, -0.0):
        call = functools.partial(HOLDERS[holder], value)
        for around in (jax.jit, jax.vmap, lambda f: jax.grad(lambda x: jnp.sum(f(x)[1]))):
            with unmarked():
                wanted = types_and_bits(around(lambda x, call=call: call(x))(x))
            assert types_and_bits(around(lambda x, call=call: call(x))(x)) == wanted, f"{value!r} in {holder}"


@pytest.mark.parametrize(
    ("holder", "values"),
    cases(HOLDERS, NUMBERS, ci=lambda holder, values: (holder, values) in (("self", "one"), ("static field", "zero"))),
)
def test_programs_with_statics_that_compare_equal_give_the_reference_result(holder, values):
    for value in EQUALS[values][:3]:
        runs(with_static(value, holder), COARSE)


# Configurations changed between two traces


@choreo.fragment("actor")
def under_configuration(w, s, key):
    """A fragment whose result or program depends on each of the configurations below."""
    drawn = jax.random.normal(jax.random.split(key, 3)[1], (3,)) + jax.random.normal(jax.random.key(3), (3,))
    return jnp.tanh(w @ s) + jnp.asarray(drawn, s.dtype), jnp.zeros(2) + 0.1


CONFIGURATIONS: dict[str, Any] = {
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "x64": lambda: jax.enable_x64(True),
    "threefry": lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),  # pyright: ignore[reportAttributeAccessIssue]
    "kind of keys": lambda: jax.default_prng_impl("rbg"),
    "matmul precision, lower": lambda: jax.default_matmul_precision("bfloat16"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("first", ["with", "without"])
def test_a_configuration_changed_between_two_calls_takes_effect(name, first):
    given = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3), jnp.float32([0.1, 0.2, 0.3]), jax.random.key(1)
    around = [CONFIGURATIONS[name], contextlib.nullcontext]
    for configuration in around if first == "with" else around[::-1]:
        with configuration():
            fragment = choreo.fragment("actor")(lambda *args: under_configuration(*args))
            with unmarked():
                wanted = types_and_bits(under_configuration(*given))
                text = program_of(under_configuration, *given)
            assert types_and_bits(under_configuration(*given)) == wanted
            assert program_of(fragment, *given).count("HIGHEST") == text.count("HIGHEST")
            assert program_of(under_configuration, *given).count("HIGHEST") == text.count("HIGHEST")


def program_of(fn: Any, *args: Any) -> str:
    """The jaxpr of a call as text."""
    return str(jax.make_jaxpr(lambda *args: fn(*args))(*args))


def configured() -> Functions:
    """A program with `under_configuration` as its actor."""

    def init(env, key):
        return {"s": env.reset(env.keys(key)), "w": jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)}

    def iterate(env, c, key):
        a, b = jax.vmap(under_configuration, (None, 0, 0))(c["w"], c["s"], env.keys(key))
        s = env.step(c["s"], a)
        return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s), "b": jnp.mean(b)}

    return Functions(init, iterate)


@pytest.mark.parametrize("name", cases(CONFIGURATIONS, ci=lambda name: name == "threefry"))
def test_a_configuration_changed_between_two_plans_takes_effect(name):
    algo = configured()
    for configuration in (CONFIGURATIONS[name], contextlib.nullcontext):
        with configuration():
            refuse_or_equal(algo, Pond(E), __file__, COARSE)


def test_the_precision_of_a_plan_is_that_of_its_own_trace():
    """On a CPU, every precision gives the same numbers. So this test reads the precision in the program of the fragment."""
    algo = configured()
    for configuration, found in ((CONFIGURATIONS["matmul precision"], True), (contextlib.nullcontext, False)):
        with configuration():
            traced = trace(algo, Pond(E))
        calls = [op.call for op in traced.iterate.fragments() if op.call and op.call.name == "under_configuration"]
        assert [("HIGHEST" in str(call.jaxpr)) for call in calls] == [found]


def test_strict_promotion_refuses_again_after_standard_promotion():
    mixed = choreo.fragment("actor")(lambda x, n: x * n)
    with jax.numpy_dtype_promotion("standard"):
        mixed(jnp.float32(2.0), jnp.int32(3))
    with pytest.raises(ValueError, match="implicit dtype promotion"):
        mixed(jnp.float32(2.0), jnp.int32(3))


# Shapes that depend on E, and other sizes that equal E


@pytest.mark.parametrize("name", SHAPES)
def test_leaves_whose_shape_depends_on_the_number_of_environments_are_carried(name):
    runs(with_shape(name), FUSED | COARSE)


@pytest.mark.parametrize(
    ("name", "layout"), cases(SHAPES, ["any", "shards"], ci=lambda name, layout: layout == "any" or name in ONE_AXIS)
)
def test_shapes_are_refused_or_equal_for_workers_and_shards(name, layout):
    """`init` makes the carry for all environments. Each worker (merge="any") or shard has only its share of the environments."""
    refused_or_equal(with_shape(name), {layout: EVERY_LAYOUT[layout]})


@pytest.mark.parametrize(
    ("name", "layout"),
    cases(ONE_AXIS, ["any", "shards", "lag", "env x2, actor x3"], ci=lambda name, layout: layout in ("any", "shards")),
)
def test_rows_are_refused_or_equal_for_workers_and_shards(name, layout):
    refused_or_equal(with_rows(name), {layout: EVERY_LAYOUT[layout]})


@pytest.mark.parametrize(("name", "layout"), cases(SHAPES, [*EVERY_LAYOUT], ci=never))
def test_shapes_are_refused_or_equal_in_every_layout(name, layout):
    refused_or_equal(with_shape(name), {layout: EVERY_LAYOUT[layout]})


SIZES = [(3, 3), (2, 2), (2, 3), (1, 1), (1, 3), (4, 2), (6, 6)]
"""Pairs: the number of environments, and the width of a state. In each pair, a number is 1, or equals the other number or the
number of replicas. So Choreo cannot recognise the env axis by its length."""


@pytest.mark.parametrize(
    ("name", "sizes"),
    cases(
        SIZED, SIZES, ci=lambda name, sizes: sizes == (3, 3) or (name, sizes) in (("dense", (2, 2)), ("dense", (1, 3)))
    ),
)
def test_programs_with_other_sizes_equal_to_E_are_refused_or_equal(name, sizes):
    env = Pond(*sizes)
    replicas = next(n for n in (3, 2, 1) if env.num_envs % n == 0)
    layouts = {"coarse": coarse(replicas), "everything": Layout(Group("env", "actor", "learner", replicas=replicas))}
    refused_or_equal(SIZED[name], FUSED | layouts, env)


@pytest.mark.parametrize(("name", "sizes"), cases(SIZED, SIZES, ci=never))
def test_sizes_are_refused_or_equal_in_every_layout(name, sizes):
    # "fused" and "three sites" do not divide the environments. All other layouts divide them among 2 or 3 replicas or shards.
    fits = EVERY_LAYOUT if sizes[0] % 6 == 0 else {layout: EVERY_LAYOUT[layout] for layout in ("fused", "three sites")}
    refused_or_equal(SIZED[name], fits, Pond(*sizes))


# Whole runs, as a user sees them


@pytest.mark.parametrize(
    "layout", [fused(), pytest.param(coarse(2), marks=pytest.mark.long)], ids=["fused", "coarse x2"]
)
def test_a_run_shows_the_results_of_the_reference(layout):
    """Check the rows, the train state, the summary and the evaluation of `choreo.train`. E, `unroll` and the size of an observation
    are all 4, so that their axes have the same length."""
    algo, env = Learner(), choreo.envs.make("jax:CartPole-v1", 4)
    run = choreo.train(algo, env, steps=48, layout=layout, runtime="inprocess", eval_every=3, eval_episodes=2)
    wanted = reference_run(algo, env, run.config.key)
    metrics = {name.removeprefix("metrics/"): value for name, value in wanted.items() if name.startswith("metrics/")}
    added = {"iteration", "env_steps", "seconds", "train_return", "eval_return"}
    assert {name for row in run.rows for name in row} == added | set(metrics)
    for name, values in metrics.items():
        np.testing.assert_allclose([row[name] for row in run.rows], values, rtol=1e-5, atol=1e-5, err_msg=name)
    assert [(row["iteration"], row["env_steps"]) for row in run.rows] == [(0, 16), (1, 32), (2, 48)]

    learned = named(run.train_state, {})
    for name, value in wanted.items():
        if name.startswith(".train"):
            assert_same_leaf(name, learned[name.removeprefix(".train")], value, 1e-5)

    assert (run.summary["iterations"], run.summary["env_steps"]) == (3, 48)
    evaluation = run.evaluate(episodes=3)
    with unmarked():
        plain = run.evaluate(episodes=3)
    np.testing.assert_array_equal(evaluation.returns, plain.returns)
    assert run.rows[-1]["eval_return"] > 0


MARKS = pytest.mark.parametrize("marks", [contextlib.nullcontext, unmarked], ids=["marked", "unmarked"])
"""With marks, the cache of fragments must distinguish the algorithms. Without marks, this cache is not used, so other caches must
distinguish the algorithms."""


@MARKS
def test_evaluation_tells_algorithms_apart_that_compare_equal(marks):
    """`Learner(sign=1.0)` and `Learner(sign=1)` compare equal. But the evaluation of one must not use the policy of the other."""
    env, params = choreo.envs.make("jax:CartPole-v1", 4), jnp.zeros((4, 2))
    play = functools.partial(evaluate, env=env, params=params, key=jax.random.key(1), episodes=2)
    with marks():
        assert play(Learner(sign=1)).mean > 50
        assert play(Learner(sign=1.0)).mean < 20
        assert play(Learner(sign=True)).mean > 50


@MARKS
def test_act_tells_algorithms_apart_that_compare_equal(marks):
    """`Run.act` of a run of `Learner(sign=1.0)` must not use the policy of `Learner(sign=1)`."""
    env, obs = choreo.envs.make("jax:CartPole-v1", 4), np.array([0.0, 0.0, 0.1, 0.1], np.float32)
    actions = {}
    for sign in (1, 1.0):
        config = RunConfig(
            algo=Learner(sign=sign), env=env, layout=fused(), steps=16, seed=0, runtime=None, eval_every=None,
            eval_episodes=2, stop_at_return=None, checkpoint_every=None,
        )  # fmt: skip
        train = Learned(jnp.zeros((4, 2)), jnp.int32(0), None)
        run = Run(config=config, train_state=train, rows=[], timing=Timing(), path=None)
        with marks():
            actions[type(sign)] = int(run.act(obs))
    assert actions == {int: 1, float: 0}
