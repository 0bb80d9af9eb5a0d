"""Level 3 of the law (docs/law.md) for carries that hold more than arrays: Python numbers, modules, strings, functions, weak types.

The reference is a Python loop that calls `iterate` without marks. Its first iteration gets the Python numbers that `init` returned.
The result of a run agrees with the reference up to 1e-6. Choreo refuses a carry with a leaf that it cannot carry, and the refusal
names the path of this leaf.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo.errors import AlgorithmError, PartitionError
from choreo.layouts import Group, Layout, coarse, fused
from choreo.plans.build import plan
from choreo.runtime.inprocess import InProcess
from choreo.testing import unmarked
from laws.refuse_or_equal import OpByOp, Pond
from partition.ponds import Functions

KEY = 7
ITERATIONS = 4


class Train(NamedTuple):
    w: Any
    """Weights."""
    more: Any
    """The leaf under test."""


class Carry(NamedTuple):
    train: Train
    """State of the learner."""
    s: Any
    """State of each environment."""


@choreo.fragment("actor")
def push(w, s):
    return w * jnp.tanh(s)


def program(more: Callable[[], Any], learn: Callable[..., Any]) -> Functions:
    """An algorithm whose train state holds the leaf `more()`.

    `learn(w, more, grad)` is the learner of this algorithm. It returns the new weights, the new leaf and the loss.
    """
    learner = choreo.fragment("learner")(learn)

    def start(env, key):
        s = jnp.linspace(-1.0, 1.0, env.num_envs * env.width).reshape(env.num_envs, env.width)
        return Carry(Train(jnp.linspace(0.5, 1.5, env.width), more()), s)

    def go(env, carry, key):
        s = env.step(carry.s, jax.vmap(push, (None, 0))(carry.train.w, carry.s))
        w, more, loss = learner(carry.train.w, carry.train.more, jnp.mean(s, 0))
        return Carry(Train(w, more), s), {"loss": loss}

    return Functions(start, go)


def count(w, updates, grad):
    return w - 0.1 * (updates + 1) * grad, updates + 1, jnp.sum(w)


def flip(w, negative, grad):
    return w - jnp.where(negative, -0.1, 0.1) * grad, jnp.logical_not(negative), jnp.sum(w)


def decay(w, rate, grad):
    return w - rate * grad, rate * 0.9, jnp.sum(w)


def change_one_by_the_other(w, pair, grad):
    """`b` grows by `a`. Choreo first traces `iterate` with the number 0 for `a`, and `b` comes back unchanged. Then it traces
    `iterate` with an array for `a`, because `a` changes. Only this second trace shows that `b` changes too."""
    return w - 0.1 * pair["b"] * grad, {"a": pair["a"] + 1, "b": pair["b"] + pair["a"]}, jnp.sum(w)


def become_an_array(w, best, grad):
    return w - 0.1 * grad, jnp.maximum(best, jnp.max(w)), jnp.sum(w)


def change_sign(w, zero, grad):
    return w - 0.01 * jnp.copysign(1.0, zero) * grad, -zero, jnp.sum(w)


def numpy_leaves(w, some, grad):
    return w - some["rate"] * grad, {"rate": some["rate"] / 2, "row": some["row"] + grad}, jnp.sum(some["row"])


def set_once(w, started, grad):
    return w - jnp.where(started, 0.1, 0.0) * grad, True, jnp.sum(w)


CHANGING = {
    "a counter": program(lambda: 0, count),
    "a flag that flips": program(lambda: False, flip),
    "a flag that is set": program(lambda: False, set_once),
    "a rate that decays": program(lambda: 0.5, decay),
    "a leaf that changes because another leaf changed": program(lambda: {"a": 0, "b": 5}, change_one_by_the_other),
    "a number that becomes an array": program(lambda: 0.0, become_an_array),
    "a zero that changes its sign": program(lambda: 0.0, change_sign),
    "numpy's numbers and arrays": program(
        lambda: {"rate": np.float32(0.5), "row": np.zeros(3, np.float32)}, numpy_leaves
    ),
}
"""Programs with a leaf that changes. If the leaf were frozen at its first value, the weights would be wrong."""
MERGED = Layout(Group("env", "actor", replicas=2), Group("learner"), max_lag=1, merge="any")


@pytest.mark.parametrize("layout", [fused(), coarse(2)], ids=["fused", "coarse x2"])
@pytest.mark.parametrize("name", CHANGING)
def test_changing_leaves_are_not_frozen(name, layout):
    assert_equals_python_loop(CHANGING[name], layout)


def test_learner_shards_share_a_counter():
    """The reference is the Python loop, although this loop has only one shard: the mean of the gradients of all shards equals the
    gradient for all environments."""

    def learn(w, updates, grad):
        return w - 0.1 * jnp.float32(updates) * choreo.all_reduce(grad), updates + 1, jnp.sum(w)

    assert_equals_python_loop(program(lambda: 0, learn), Layout(Group("env", "actor", "learner", replicas=2), shards=2))


def test_with_merge_any_the_learner_counts_every_part():
    running = InProcess(plan(program(lambda: 0, count), Pond(), MERGED))
    running.start(jax.random.key(KEY))
    running.run(0, ITERATIONS)
    assert running.carry().train.more == 2 * ITERATIONS


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGING)
def test_changing_leaves_are_not_frozen_in_compiled_iterations(name):
    assert_equals_python_loop(CHANGING[name], fused(), runtime=InProcess)


class Boxed(eqx.Module):
    """A value with a static unit."""

    value: Any
    unit: str = eqx.field(static=True)


def odd_leaves(env, key):
    """A carry with many kinds of leaves and containers: aliases, empty arrays, None, keys, small types, NumPy values."""
    shared = jnp.arange(3.0)
    return {
        "s": jnp.linspace(-1.0, 1.0, 18).reshape(6, 3),
        "w": shared,
        "alias": shared,
        "swapped": (jnp.zeros(3), jnp.ones(3)),
        "empty": jnp.zeros((env.num_envs, 0)),
        "nothing": None,
        "nested": OrderedDict(z=[jnp.int8(1), (jnp.bfloat16(2), Boxed(jnp.uint16(3), "m"))], a=defaultdict(int, n=0)),
        "key": key,
        "keys": env.keys(key),
        "flags": jnp.zeros(env.num_envs, bool),
        "passed": jnp.full((2, 3), 7.0),
        "twice": [jnp.zeros(3), jnp.zeros(3)],
        "numpy": [np.float64(1.5), np.arange(3, dtype=np.int64)],
    }


@choreo.fragment("learner")
def learn_odd_leaves(w, alias, nested, grad, numpy):
    one, (two, box) = nested["z"]
    counted = defaultdict(int, n=nested["a"]["n"] + 1)
    nested = OrderedDict(
        z=[one + jnp.int8(1), (two * jnp.bfloat16(0.5), Boxed(box.value + jnp.uint16(1), "m"))], a=counted
    )
    return w - 0.1 * grad + 0.01 * alias, nested, [numpy[0] * jnp.float32(0.5), numpy[1] + jnp.int32(1)]


def iterate_odd_leaves(env, carry, key):
    """Change some of the leaves, swap two, return one value twice, and return the other leaves unchanged."""
    s = env.step(carry["s"], jax.vmap(push, (None, 0))(carry["w"], carry["s"]))
    w, nested, numpy = learn_odd_leaves(carry["w"], carry["alias"], carry["nested"], jnp.mean(s, 0), carry["numpy"])
    a, b = carry["swapped"]
    after = carry | {
        "s": s,
        "w": w,
        "nested": nested,
        "swapped": (b, a),
        "twice": [w, w],
        "flags": jnp.logical_not(carry["flags"]),
        "key": jax.random.fold_in(carry["key"], 1),
        "numpy": numpy,
    }
    return after, {"w": w[0], "s": jnp.mean(s), "count": carry["nested"]["a"]["n"]}


@pytest.mark.parametrize("layout", [fused(), coarse(2)], ids=["fused", "coarse x2"])
@pytest.mark.parametrize("runtime", [OpByOp, InProcess], ids=["op by op", "compiled"])
def test_every_kind_of_leaf_and_container_is_carried(layout, runtime):
    assert_equals_python_loop(Functions(odd_leaves, iterate_odd_leaves), layout, runtime=runtime)


class TestUnchanged:
    """A Python leaf that `iterate` returns unchanged stays a Python value, because Equinox modules use such leaves in `if`."""

    def test_dropout_and_attention_keep_their_python_leaves(self):
        def more():
            key = jax.random.key(3)
            return {
                "dropout": eqx.nn.Dropout(0.5),
                "off": eqx.nn.Dropout(0.5, inference=True),
                "attention": eqx.nn.MultiheadAttention(1, 3, dropout_p=0.25, inference=True, key=key),
                "mlp": eqx.nn.MLP(3, 3, 2, 1, activation=jax.nn.relu, key=key),
                "updates": 0,
            }

        def learn(w, nets, grad):
            x = nets["attention"](*[w[None]] * 3)[0] + nets["off"](nets["mlp"](grad))
            x = nets["dropout"](x, key=jax.random.fold_in(jax.random.key(0), nets["updates"]))
            return w - 0.1 * x, nets | {"updates": nets["updates"] + 1}, jnp.sum(w)

        algo = program(more, learn)
        assert_equals_python_loop(algo, coarse(2))
        carry = plan(algo, Pond(), fused()).carry
        nets = carry.train.more
        assert type(nets["dropout"].p) is float and nets["dropout"].inference is False
        assert nets["off"].inference is True and nets["attention"].dropout.p == 0.25
        assert isinstance(nets["updates"], jax.ShapeDtypeStruct)

    @pytest.mark.parametrize(
        "value", [3, 2.5, True, float("nan"), -0.0, 1j, "name", jnp.tanh, None], ids=lambda x: repr(x)[:9]
    )
    def test_any_unchanged_leaf_stays_the_same_object(self, value):
        form = plan(program(lambda: value, lambda w, more, grad: (w, more, jnp.sum(w))), Pond(), fused()).carry
        assert form.train.more is value

    def test_a_computed_number_with_the_same_bits_stays_a_python_number(self):
        form = plan(program(lambda: 0.25, lambda w, x, grad: (w, x * 1.0, jnp.sum(w))), Pond(), fused()).carry
        assert type(form.train.more) is float


class TestRefused:
    """A part of the carry changes, but an array of one type cannot take its place. The refusal names the path of the leaf. A static
    field of a module is not a leaf: if such a field changes, the refusal shows the structures of both carries."""

    def test_a_string_that_changes(self):
        text = refusal(lambda: {"name": "warm"}, lambda w, more, grad: (w, {"name": "cold"}, jnp.sum(w)))
        assert text == (
            "`Functions.iterate` must return a carry of the same form: `carry.train.more['name']` goes in as the str 'warm' "
            "and comes back as the str 'cold'.\nOnly arrays and numbers may change from one iteration to the next. Let "
            "`iterate` return this leaf unchanged; or let the carry hold a number that selects one of several values."
        )

    def test_a_function_that_changes(self):
        text = refusal(lambda: jnp.tanh, lambda w, f, grad: (w, jnp.sin, jnp.sum(w)))
        assert "`carry.train.more` goes in as the function tanh and comes back as the function sin." in text

    def test_a_number_that_becomes_a_string(self):
        text = refusal(lambda: 0, lambda w, n, grad: (w, "done", jnp.sum(w)))
        assert "`carry.train.more` goes in as the int 0 and comes back as the str 'done'." in text

    def test_a_counter_that_becomes_a_float(self):
        text = refusal(lambda: 0, lambda w, n, grad: (w, n + 0.5, jnp.sum(w)))
        assert text == (
            "`Functions.iterate` must return a carry of the same form: `carry.train.more` goes in as the int 0 (int32[]) and "
            "comes back as float32[].\nMake `init` and `iterate` agree on shape and dtype. A number that changes becomes "
            "an array, and its type must stay the same: write jnp.zeros((), jnp.float32) in `init`, or convert the number in "
            "`iterate`."
        )

    @pytest.mark.parametrize(("value", "back"), [(1, True), (1, 1.0), (True, 1), (1.0, 1)])
    def test_a_number_that_becomes_an_equal_number_of_another_type(self, value, back):
        text = refusal(lambda: value, lambda w, n, grad: (w, back, jnp.sum(w)))
        assert f"goes in as the {type(value).__name__} {value}" in text and f"back as the {type(back).__name__}" in text

    def test_a_changing_number_that_is_used_as_a_python_number(self):
        text = refusal(lambda: False, lambda w, flag, grad: (w, not flag, jnp.sum(w)))
        assert text == (
            "`Functions.iterate` changes a number of the carry (`carry.train.more` goes in as the bool False and comes back "
            "as the bool True). Such a number is traced as an array, as in jax.jit(iterate); but `iterate` uses it as a Python "
            "number.\nIn place of `if`, `not`, `and`, range() and the like, use jnp.where, jnp.logical_not, lax.fori_loop; "
            "or let `iterate` return the number unchanged."
        )

    def test_a_number_that_no_array_can_hold(self):
        text = refusal(lambda: 2**40, lambda w, n, grad: (w, n + 1, jnp.sum(w)))
        assert text.startswith(
            "`carry.train.more` of `Functions` goes in as the int 1099511627776 and changes, so that it becomes an array; but "
            "it is too large for JAX's default type of integers."
        )

    def test_a_static_field_that_becomes_an_equal_value_of_another_type(self):
        class Net(eqx.Module):
            scale: Any = eqx.field(static=True)

        text = refusal(lambda: Net(1), lambda w, net, grad: (w, Net(1.0), jnp.sum(w)))
        assert "must return a carry of the same structure" in text


class TestWeakTypes:
    """A Python number has a weak type. If JAX combines it with an array, the type of the array decides the type of the result."""

    def test_a_leaf_that_is_weak_only_at_first_gets_the_strong_type(self):
        """`init` gives the leaf a weak type, and `iterate` a strong one. Choreo gives the leaf the strong type from the start, as
        `lax.scan` does. Choreo does so only if `iterate` computes in the same types for a weak and for a strong leaf."""

        def start():
            return jnp.full((3,), 0.5)  # has a weak type

        assert_equals_python_loop(program(start, lambda w, x, grad: (w - x * grad, x * w, jnp.sum(w))), fused())

    def test_a_literal_beside_a_weak_number_has_the_same_value_in_either_type(self):
        def learn(w, x, grad):
            return w - jnp.float32(x + 1) * grad, x + jnp.int32(2), jnp.sum(w)

        assert_equals_python_loop(program(lambda: 0, learn), fused())

    def test_a_leaf_that_is_weak_only_later_is_carried(self):
        def learn(w, x, grad):
            return w - x * grad, jnp.where(jnp.sum(w) > 0, 0.25, 0.5), jnp.sum(w)

        assert_equals_python_loop(program(lambda: jnp.zeros(()), learn), fused())

    def test_a_leaf_that_is_always_weak_stays_weak(self):
        algo = program(lambda: 0.5, lambda w, x, grad: (w, x * 0.5, jnp.sum(x * jnp.ones(2, jnp.bfloat16))))
        running = OpByOp(plan(algo, Pond(), fused()))
        running.start(jax.random.key(KEY))
        assert running.run(0, 1)["loss"].dtype == jnp.bfloat16
        assert running.carry().train.more.weak_type

    @pytest.mark.parametrize("value", [0.5, jnp.full((), 0.5)], ids=["a Python number", "an array"])
    def test_refused_if_the_second_iteration_computes_in_other_types(self, value):
        def learn(w, x, grad):
            narrow = x * jnp.ones((), jnp.bfloat16)  # bfloat16 if x is weak, else float32
            return w - narrow.astype(jnp.float32), x * jnp.float32(0.5), jnp.sum(w)

        with jax.numpy_dtype_promotion("standard"):
            text = refusal(lambda: value, learn)
        assert "computes in different types from its second iteration on: `carry.train.more` (" in text
        assert "Give this leaf a dtype in `init`" in text

    def test_refused_if_strict_promotion_refuses_the_second_iteration(self):
        def learn(w, x, grad):
            return w - (x * jnp.ones((), jnp.bfloat16)).astype(jnp.float32), x * jnp.float32(0.5), jnp.sum(w)

        assert "computes in different types from its second iteration on" in refusal(lambda: 0.5, learn)


class TestArrivingParts:
    """With merge="any", `init` runs for all E environments, and `iterate` runs for the environments of one worker. So Choreo must
    know how to divide each leaf. The same holds for learner shards, which the last test uses."""

    @pytest.mark.parametrize(
        "shape", [lambda n: (4 * n,), lambda n: (n + 1,), lambda n: (n // 2,), lambda n: (n, n), lambda n: (n,) * (1 + (n > 4))],
        ids=["4E", "E+1", "E/2", "ExE", "rank"],
    )  # fmt: skip
    def test_a_shape_without_an_axis_of_exactly_E_is_refused(self, shape):
        """Choreo once divided a leaf of 4E rows as if it had E rows. An algorithm then got 2.4 as the mean of numbers below 1."""
        text = merged_refusal(lambda env: {"ring": jnp.zeros(shape(env.num_envs))})
        assert text.startswith(
            f"`carry['more']['ring']` of `Functions` is float32{_shape_text(shape(6))} for 6 environments and "
            f'float32{_shape_text(shape(3))} for 3. With merge="any" a worker has 3 of the 6 environments, so its part must be '
            "a block of an axis of length 6; this leaf has no such axis.\n"
            "Give the leaf an axis for environments, as in [num_envs, 4] in place of [4 * num_envs]"
        )

    def test_a_number_that_depends_on_E_is_refused(self):
        assert "is the int 6 for 6 environments and the int 3 for 3" in merged_refusal(lambda env: env.num_envs)

    def test_a_type_that_depends_on_E_is_refused(self):
        text = merged_refusal(lambda env: jnp.zeros(2, jnp.float32 if env.num_envs > 4 else jnp.int32))
        assert "is float32[2] for 6 environments and int32[2] for 3" in text

    def test_blocks_and_shared_leaves_are_accepted(self):
        form = plan(
            unchanging_program(lambda env: {"none": None, "w": jnp.zeros(4), "empty": jnp.zeros((0, 2))}),
            Pond(),
            MERGED,
        ).carry
        assert form["s"].shape == (6, 3) and form["more"]["empty"].shape == (0, 2)

    def test_shards_refuse_a_shape_without_an_axis_of_exactly_E(self):
        with pytest.raises(AlgorithmError) as error:
            plan(
                unchanging_program(lambda env: jnp.zeros(4 * env.num_envs)),
                Pond(),
                Layout(Group("env", "actor", "learner"), shards=2),
            )
        assert str(error.value).startswith(
            "`carry['more']` of `Functions` is float32[24] for 6 environments and float32[48] for 12. To divide it among "
            "2 shards, Choreo needs exactly one axis of length 6.\nGive the leaf an axis for environments"
        )


def unchanging_program(more: Callable[[Any], Any]) -> Functions:
    """An algorithm that carries `more(env)` and never changes it."""

    @choreo.fragment("learner")
    def learn(w, grad):
        return w - 0.1 * grad

    def start(env, key):
        return {"s": jnp.ones((env.num_envs, env.width)), "w": jnp.ones(env.width), "more": more(env)}

    def go(env, carry, key):
        s = env.step(carry["s"], jax.vmap(push, (None, 0))(carry["w"], carry["s"]))
        w = learn(carry["w"], jnp.mean(s, 0))
        return carry | {"s": s, "w": w}, {"loss": jnp.sum(w)}

    return Functions(start, go)


def merged_refusal(more: Callable[[Any], Any]) -> str:
    """The message that refuses an algorithm with `more(env)` in its carry under merge="any"."""
    with pytest.raises(AlgorithmError) as error:
        plan(unchanging_program(more), Pond(), MERGED)
    return str(error.value)


def _shape_text(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda pairs: defaultdict(float, pairs)], ids=["dict", "ordered", "default"])  # fmt: skip
def test_metrics_keep_their_names_in_any_mapping(kind):
    def go(env, carry, key):
        return carry, kind([("z", jnp.float32(26)), ("a", jnp.float32(1)), ("m", 13.0), ("each", carry["s"][:, 0])])

    start = {"s": jnp.arange(18.0).reshape(6, 3)}
    running = OpByOp(plan(Functions(lambda env, key: start, go), Pond(), coarse(2)))
    running.start(jax.random.key(KEY))
    rows = running.run(0, 2)
    assert {name: rows[name].tolist() for name in "amz"} == {"a": [1, 1], "m": [13, 13], "z": [26, 26]}
    assert rows["each"].tolist() == [[0, 3, 6, 9, 12, 15]] * 2


def assert_equals_python_loop(algo: Any, layout: Layout, *, runtime: type[InProcess] = OpByOp) -> None:
    """Assert that a run under the layout gives the carry and the metrics of a Python loop over `iterate` without marks."""
    env = Pond()
    running = runtime(plan(algo, env, layout))
    running.start(jax.random.key(KEY))
    rows = running.run(0, ITERATIONS)
    init_key, run_key = jax.random.split(jax.random.key(KEY))
    with unmarked():
        carry, expected_rows = algo.init(env, init_key), []
        for i in range(ITERATIONS):
            carry, row = algo.iterate(env, carry, jax.random.fold_in(run_key, i))
            expected_rows.append(row)
    got, expected = jax.tree.leaves(running.carry()), jax.tree.leaves(carry)
    assert jax.tree.structure(running.carry()) == jax.tree.structure(carry)
    for a, b in zip(got, expected, strict=True):
        if callable(b):
            assert a is b
        else:
            assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
            a, b = (
                jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
                for x in map(jnp.asarray, (a, b))
            )
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-6, atol=1e-6)
    for name in expected_rows[0]:
        np.testing.assert_allclose(rows[name], [row[name] for row in expected_rows], rtol=1e-6, err_msg=name)


def refusal(more: Callable[[], Any], learn: Callable[..., Any]) -> str:
    """The message that refuses `program(more, learn)`."""
    with pytest.raises((AlgorithmError, PartitionError)) as error:
        plan(program(more, learn), Pond(), fused())
    return str(error.value)
