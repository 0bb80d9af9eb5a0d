"""Law level 3 for fragments under `vmap` whose primitives see the whole batch, such as a callback or `unvmap_any`.

On a block of environments such a fragment could give a different result than on all environments, without any error. Choreo
must either refuse the fragment, with the user's line and a remedy (`independent=True`), or prove that it is harmless. A harmless
fragment gives the result of the program without marks, up to 1e-5.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.interpreters import batching, mlir

import choreo
from choreo import _compat
from choreo.errors import AlgorithmError, PartitionError
from choreo.layouts import coarse
from choreo.partition.program import Transfer, walk
from choreo.partition.trace import trace
from choreo.plans.build import plan_traced
from choreo.testing import unmarked
from laws.reference import assert_close
from laws.refuse_or_equal import KEY, OpByOp, Pond, planned_run, reference_op_by_op, refuse_or_equal

E = 6
COARSE = {"coarse x2": coarse(2)}
MARK = '@choreo.fragment("actor", independent=True)'


@choreo.fragment("learner")
def learn(w, action):
    return w - 0.1 * jnp.mean(jnp.tanh(action), axis=0)


@dataclass(frozen=True)
class Acts:
    """An algorithm that calls the given actor once per environment, under `vmap`."""

    act: Any

    def init(self, env, key):
        return {"state": env.reset(env.keys(key)), "weights": jnp.linspace(0.5, 1.5, env.width)}

    def iterate(self, env, carry, key):
        action = self.actions(env, carry, key)
        state = env.step(carry["state"], action)
        return {"state": state, "weights": learn(carry["weights"], action)}, {"action": jnp.mean(action)}

    def actions(self, env, carry, key):
        return jax.vmap(self.act, (None, 0, 0))(carry["weights"], carry["state"], env.keys(key))


@dataclass(frozen=True)
class ActsOnTheBatch(Acts):
    """An algorithm that calls its actor once for all environments, without `vmap` and without a key."""

    def actions(self, env, carry, key):
        return self.act(carry["weights"], carry["state"], None)


def mixing_primitive(name: str) -> jec.Primitive:
    """A user's primitive that adds two numbers; under `vmap` it also subtracts the mean of all rows."""
    add = jec.Primitive(name)
    add.def_impl(lambda x, y: x + y)
    add.def_abstract_eval(lambda x, y: x)
    mlir.register_lowering(add, mlir.lower_fun(lambda x, y: x + y, multiple_results=False))

    def mix(args, axes):
        x, y = args
        return add.bind(x - jnp.mean(x, axis=axes[0], keepdims=True), y), axes[0]

    batching.primitive_batchers[add] = mix
    return add


NAMED_ADD = mixing_primitive("add")
NAMED_MIXES = mixing_primitive("mixes")


def by_unvmap(fold):
    """An actor in which `fold` sees the states of all environments. The result of `fold` decides the sign of all actions."""

    def act(w, s, key):
        return jnp.where(fold(s > 0.3), w * s, -w * s)

    return act


def by_max(w, s, key):
    """An actor that divides by the maximum over all environments."""
    return w * s / (1.0 + eqxi.unvmap_max((10 * s[0]).astype(jnp.int32)).astype(s.dtype))


def by_primitive(primitive):
    def act(w, s, key):
        return primitive.bind(w * s, s)

    return act


def by_error_if(w, s, key):
    """Equinox's check looks at all environments, although each environment gets its own value back."""
    return eqx.error_if(w * s, jnp.any(s > 1e6), "the state is too large")


def by_diffrax(w, s, key):
    """A solver of diffrax for differential equations. It uses primitives that see the whole batch."""
    import diffrax

    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: -y * args),
        diffrax.Tsit5(),
        t0=0.0,
        t1=0.2,
        dt0=0.1,
        y0=s,
        args=w,
        max_steps=4,
    ).ys[0]


def by_callback(w, s, key):
    """A Python callback on the whole batch. It computes each row separately, but no compiler can see that."""
    return w * jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(s.shape, s.dtype), s, vmap_method="expand_dims")


REFUSED = {
    "unvmap_any": by_unvmap(eqxi.unvmap_any),
    "unvmap_all": by_unvmap(lambda x: eqxi.unvmap_all(x[0])),
    "unvmap_max": by_max,
    "a user's primitive named add": by_primitive(NAMED_ADD),
    "a user's primitive": by_primitive(NAMED_MIXES),
    "error_if": by_error_if,
    "a callback": by_callback,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fragment_that_sees_the_batch_is_refused_with_a_remedy(name):
    algo = Acts(choreo.fragment("actor")(REFUSED[name]))
    refusals = refuse_or_equal(algo, Pond(E), __file__, COARSE)
    assert refusals["coarse x2"] is not None
    assert MARK in str(refusals["coarse x2"])


def test_diffrax_is_refused_with_a_remedy():
    pytest.importorskip("diffrax")
    # diffrax relies on JAX's usual promotion of types.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        refusals = refuse_or_equal(Acts(choreo.fragment("actor")(by_diffrax)), Pond(E), __file__, COARSE)
    assert MARK in str(refusals["coarse x2"])


@pytest.mark.parametrize("mark", [choreo.fragment("actor"), lambda fn: fn], ids=["fragment", "glue"])
def test_a_users_primitive_named_add_does_not_get_the_rule_of_add(mark):
    """The primitive is called on the whole batch, without `vmap`, and mixes environments in spite of its name."""
    flip = jec.Primitive("add")
    flip.def_impl(lambda x, y: x[::-1] + y)
    flip.def_abstract_eval(lambda x, y: x)
    mlir.register_lowering(flip, mlir.lower_fun(lambda x, y: x[::-1] + y, multiple_results=False))
    act = mark(lambda w, s, key: flip.bind(s, s) * jnp.broadcast_to(w, s.shape))

    refuse_or_equal(ActsOnTheBatch(act), Pond(E), __file__, COARSE)


@pytest.mark.parametrize("rule_is", ["a function", "a wrapper of JAX's rule", "JAX's rule for another primitive"])
def test_a_batching_rule_that_a_user_registered_for_a_primitive_of_jax_is_not_trusted(rule_is):
    from jax import lax

    assert _compat.has_own_batching_rule(lax.tan_p)
    rules = dict(_compat._batching.fancy_primitive_batchers)
    rule = lambda args, axes, **_: (lax.tan(args[0] - jnp.mean(args[0])), axes[0])  # noqa: E731
    if rule_is == "JAX's rule for another primitive":
        _compat._batching.fancy_primitive_batchers[lax.tan_p] = rules[lax.reduce_max_p]
    else:
        wrap = functools.wraps(rules[lax.tan_p].func) if rule_is == "a wrapper of JAX's rule" else lambda rule: rule
        batching.primitive_batchers[lax.tan_p] = wrap(rule)
    try:
        assert not _compat.has_own_batching_rule(lax.tan_p)
        if rule_is == "JAX's rule for another primitive":
            return
        algo = Acts(choreo.fragment("actor")(lambda w, s, key: w * lax.tan(s)))
        refuse_or_equal(algo, Pond(E), __file__, COARSE)
    finally:
        _compat._batching.fancy_primitive_batchers[lax.tan_p] = rules[lax.tan_p]


@pytest.mark.parametrize(
    "named_like_threefry", [{"name": "mine", "tag": "fry"}, {"name": "threefry2x32", "tag": "mine"}], ids=str
)
def test_a_generator_that_is_merely_named_threefry_is_not_trusted(named_like_threefry):
    from jax.extend import random

    ours = random.threefry_prng_impl

    def bits(key, width, shape):
        @jax.custom_batching.custom_vmap
        def draw(key):
            return ours.random_bits(key, width, shape)

        @draw.def_vmap
        def _(size, batched, key):
            return jnp.broadcast_to(draw(jnp.sum(key, 0, key.dtype)), (size, *shape)), True

        return draw(key)

    mine = random.define_prng_impl(
        key_shape=(2,), seed=ours.seed, split=ours.split, random_bits=bits, fold_in=ours.fold_in, **named_like_threefry
    )

    def act(w, s, key):
        return w * s + jax.random.normal(jax.random.wrap_key_data(jax.random.key_data(key), impl=mine), (3,))

    refuse_or_equal(Acts(choreo.fragment("actor")(act)), Pond(E), __file__, COARSE)


def counter():
    """A function that returns 1 in its first call, 2 in its second, and so on."""
    calls = itertools.count(1)
    return lambda: np.float32(next(calls))


@pytest.mark.parametrize("what", ["io_callback", "rng_uniform"])
@pytest.mark.parametrize("where", ["mapped", "batched", "in a jit"])
def test_an_impure_call_is_not_made_by_each_replica(what, where):
    """The operands are equal on all replicas, but the results of two calls differ."""
    count = counter()

    def draw():
        if what == "rng_uniform":
            return jax.lax.rng_uniform(np.float32(0), np.float32(1), ())
        return io_callback(count, jax.ShapeDtypeStruct((), jnp.float32))

    draw = jax.jit(draw) if where == "in a jit" else draw

    act = choreo.fragment("actor")(lambda w, s, key: jnp.broadcast_to(w, s.shape) * s + draw())
    with pytest.raises(PartitionError, match=f"`{what}` may give a different result in every call"):
        plan_traced(trace((Acts if where == "mapped" else ActsOnTheBatch)(act), Pond(E)), coarse(2), title="")


def test_an_impure_value_is_computed_once_and_sent():
    """Usually each site computes glue without operands itself. But a random number must be drawn once and sent to other sites."""

    @dataclass(frozen=True)
    class Drawn(Acts):
        def iterate(self, env, carry, key):
            drawn = jax.lax.rng_uniform(np.float32(0), np.float32(1), ())
            action = jax.vmap(self.act, (None, 0, None))(carry["weights"], carry["state"], drawn)
            weights = push(carry["weights"], action, drawn)
            return {"state": env.step(carry["state"], action), "weights": weights}, {"drawn": drawn}

    act = choreo.fragment("actor")(lambda w, s, drawn: w * s + drawn)
    push = choreo.fragment("learner")(lambda w, action, drawn: w - 0.1 * jnp.mean(action, 0) + drawn)
    for layout in (coarse(1), coarse(2)):
        planned = plan_traced(trace(Drawn(act), Pond(E)), layout, title="")
        sent = [
            move.label for step, _ in walk(planned.iterate.steps) if isinstance(step, Transfer) for move in step.moves
        ]
        assert any("rng_uniform" in label for label in sent)


def test_a_fragment_that_the_user_vouches_for_is_replicated_and_the_plan_says_so():
    algo = Acts(choreo.fragment("actor", independent=True)(by_callback))
    assert refuse_or_equal(algo, Pond(E), __file__, COARSE) == {"coarse x2": None}
    plan = plan_traced(trace(algo, Pond(E)), coarse(2), title="")
    printed = " ".join(str(plan).split())  # the printer breaks lines
    assert "It is trusted, not proved, that environments do not mix in `by_callback`." in printed


def test_the_plan_names_no_trusted_fragment_if_it_is_proved_or_not_divided():
    algo = Acts(choreo.fragment("actor", independent=True)(lambda w, s, key: w * s))
    assert "trusted" not in str(plan_traced(trace(algo, Pond(E)), coarse(2), title=""))
    algo = Acts(choreo.fragment("actor", independent=True)(by_callback))
    assert "trusted" not in str(plan_traced(trace(algo, Pond(E)), coarse(1), title=""))


def test_mctx_is_proved_harmless_and_gives_the_reference_result():
    mctx = pytest.importorskip("mctx")

    def recurrent(w, key, action, embedding):
        value = jnp.tanh(embedding @ w)
        nxt = 0.5 * embedding + action[:, None].astype(jnp.float32) * jnp.ones((1, 3))
        logits = jnp.stack([value, -value, 0.0 * value], axis=-1)
        return mctx.RecurrentFnOutput(
            reward=value, discount=0.9 * jnp.ones_like(value), prior_logits=logits, value=value
        ), nxt

    def act(w, s, key):
        """A search for one environment, as a batch of one."""
        value = jnp.tanh(s @ w)[None]
        logits = jnp.stack([value, -value, 0.0 * value], axis=-1)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=s[None])
        found = mctx.gumbel_muzero_policy(w, key, root, recurrent, num_simulations=2, max_num_considered_actions=3)
        return s + found.action_weights[0]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        algo = Acts(choreo.fragment("actor")(act))
        planned = plan_traced(trace(algo, Pond(E)), coarse(2), title="")
        with unmarked():
            reference = reference_op_by_op(dataclasses.replace(algo), Pond(E), jax.random.key(KEY))
        assert_close(planned_run(planned, OpByOp), reference, 1e-5)


class TestCheckIndependent:
    """`choreo check` tries to disprove what the user vouches for with `independent=True`."""

    def test_an_honest_fragment_passes(self):
        algo = Acts(choreo.fragment("actor", independent=True)(by_callback))
        assert choreo.testing.check_independent(algo, Pond(E)) == ["by_callback"]

    @pytest.mark.parametrize("name", ["unvmap_any", "unvmap_max", "a user's primitive"])
    def test_a_fragment_that_mixes_environments_is_caught(self, name):
        algo = Acts(choreo.fragment("actor", independent=True)(REFUSED[name]))
        with pytest.raises(AlgorithmError, match="is marked independent=True, but environments mix in it: with"):
            choreo.testing.check_independent(algo, Pond(E))

    def test_a_fragment_that_counts_the_rows_is_caught(self):
        def act(w, s, key):
            share = lambda x: x / np.float32(x.shape[0] if x.ndim > 1 else 1)  # noqa: E731
            return w * jax.pure_callback(share, jax.ShapeDtypeStruct(s.shape, s.dtype), s, vmap_method="expand_dims")

        with pytest.raises(AlgorithmError, match="environments mix in it: in a batch of only one row, the result"):
            choreo.testing.check_independent(Acts(choreo.fragment("actor", independent=True)(act)), Pond(E))

    def test_rows_that_a_fragment_refuses_are_left_out(self):
        algo = Acts(choreo.fragment("actor", independent=True)(by_error_if))
        assert choreo.testing.check_independent(algo, Pond(E)) == ["by_error_if"]

    def test_a_fragment_that_refuses_all_other_rows_does_not_pass(self):
        def small(x):
            if np.abs(x).max() > 5 or not np.isfinite(x).all():
                raise ValueError("too large")
            return x

        def act(w, s, key):
            return w * jax.pure_callback(small, jax.ShapeDtypeStruct(s.shape, s.dtype), s, vmap_method="expand_dims")

        with pytest.raises(
            AlgorithmError, match="cannot be tested: it raises an error for every value that the test puts into"
        ):
            choreo.testing.check_independent(Acts(choreo.fragment("actor", independent=True)(act)), Pond(E))

    def test_a_proved_fragment_is_not_checked(self):
        algo = Acts(choreo.fragment("actor", independent=True)(lambda w, s, key: w * s))
        assert choreo.testing.check_independent(algo, Pond(E)) == []
