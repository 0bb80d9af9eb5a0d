"""A mark does not change the results of a function, and Choreo finds the mark in the traced program.

The marks in these tests are `choreo.fragment`, `choreo.host_fragment` and `choreo.all_reduce`. There is one exception:
with several learner shards, `all_reduce` changes the results.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax import lax

import choreo
from choreo import _compat
from choreo._compat import Vmap
from choreo.errors import AlgorithmError, ChoreoError, PartitionError
from choreo.layouts import Group, Layout, coarse, fine, fused
from choreo.partition.program import HostCall, Loop, Segment, walk
from choreo.plans.build import plan
from choreo.roles import SHARD_AXIS, Call, find_call
from laws.reference import assert_close, assert_same_bits, planned_run, reference_run
from partition.ponds import Functions, Pond, still

X = jnp.linspace(-1.0, 1.0, 15).reshape(5, 3)
W = jnp.array([0.5, 1.0, 2.0])
KEY = jax.random.key(3)


@pytest.fixture
def unchecked(monkeypatch):
    """Disable the checks of annotations at run time. Then a wrong type reaches Choreo's own check, as in a user's program."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def score(w, x):
    return jnp.sum(jnp.tanh(x) @ w)


def calls_in(fn, *args) -> list[Call]:
    """The fragments in a traced function, in order, including those in inner programs."""
    return list(_calls(jax.make_jaxpr(fn)(*args)))


def _calls(closed):
    for eqn in closed.jaxpr.eqns:
        if call := find_call(_compat.call_name(eqn)):
            yield call
        else:
            for inner in _compat.inner_jaxprs(eqn):
                yield from _calls(inner)


def one_call(fn, *args) -> Call:
    (call,) = calls_in(fn, *args)
    return call


TRANSFORMS = {
    "plain": lambda f: f,
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x),
    "jit": jax.jit,
    "jit in jit": lambda f: jax.jit(lambda w, x: jax.jit(f)(w, 2 * x)),
    "grad": lambda f: jax.grad(lambda w, x: jnp.sum(f(w, x))),
    "remat": lambda f: jax.grad(jax.checkpoint(lambda w, x: jnp.sum(f(w, x)))),
    "scan": lambda f: lambda w, x: lax.scan(lambda c, row: (c, f(c, row)), w, x)[1],
    "cond": lambda f: lambda w, x: lax.cond(x[0, 0] < 0, f, lambda w, x: 0 * jnp.sum(x), w, x),
    "grad of vmap in scan": lambda f: jax.grad(
        lambda w, x: jnp.sum(lax.scan(lambda c, _: (c, jax.vmap(f, (None, 0))(w, c)), x, length=2)[1])
    ),
}


class TestAMarkChangesNothing:
    @pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
    def test_under_any_transformation_the_values_are_equal_and_the_mark_is_found(self, transform):
        marked = choreo.fragment("actor")(score)
        np.testing.assert_array_equal(transform(marked)(W, X), transform(score)(W, X))
        found = calls_in(transform(marked), W, X)
        assert found and {(call.role, call.name) for call in found} == {("actor", "score")}

    def test_the_recorded_program_has_the_shapes_inside_the_vmap(self):
        marked = choreo.fragment("actor")(score)
        call = one_call(lambda w, x: jax.vmap(marked, (None, 0))(w, x), W, X)
        assert [aval.shape for aval in call.in_avals] == [(3,), (3,)]
        assert [aval.shape for aval in call.jaxpr.in_avals] == [(3,), (3,)]
        assert [aval.shape for aval in call.jaxpr.out_avals] == [()]
        np.testing.assert_array_equal(_compat.eval_jaxpr(call.jaxpr, [W, X[0]])[0], score(W, X[0]))

    def test_it_keeps_the_name_and_docstring_of_the_function(self):
        @choreo.fragment("actor")
        def look(x):
            """Looks."""
            return x

        assert (look.__name__, look.__doc__, repr(look)) == ("look", "Looks.", "<fragment look of actor>")

    def test_calls_with_equal_shapes_and_static_values_share_one_compiled_function(self):
        traced = []

        @choreo.fragment("actor")
        def look(x, scale):
            traced.append(x.shape)
            return scale * x

        for x in (W, 2 * W):
            look(x, 2.0)
        assert traced == [(3,)]
        look(W, 3.0)
        look(X, 3.0)
        assert traced == [(3,), (3,), (5, 3)]


class Pair(NamedTuple):
    x: jax.Array
    label: str


@dataclass(frozen=True, kw_only=True)
class Agent:
    scale: float = 2.0

    @choreo.fragment("actor")
    def act(self, x, *, greedy=False):
        return self.scale * x if greedy else x


class Network(eqx.Module):
    weights: jax.Array
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x):
        return self.activation(self.weights @ x)


class TestArguments:
    def test_a_method_sees_its_self_and_keywords(self):
        np.testing.assert_array_equal(Agent().act(W), W)
        np.testing.assert_array_equal(Agent(scale=3.0).act(W, greedy=True), 3.0 * W)
        np.testing.assert_array_equal(Agent().act(x=W, greedy=True), 2.0 * W)
        np.testing.assert_array_equal(jax.vmap(functools.partial(Agent().act, greedy=True))(X), 2.0 * X)
        assert isinstance(Agent.act, type(choreo.fragment("actor")(score)))

    def test_python_scalars_strings_none_and_functions_are_static(self):
        @choreo.fragment("actor")
        def apply(x, times, how, f, nothing):
            assert nothing is None and isinstance(times, int)  # control flow would fail on traced values
            for _ in range(times):
                x = f(x) if how == "apply" else x
            return x

        np.testing.assert_array_equal(apply(W, 2, "apply", jnp.tanh, None), jnp.tanh(jnp.tanh(W)))
        np.testing.assert_array_equal(jax.jit(lambda x: apply(x, 1, "skip", jnp.tanh, None))(W), W)

    def test_an_equinox_module_may_contain_a_function(self):
        network = Network(jnp.ones((2, 3)), jnp.tanh)
        marked = choreo.fragment("actor")(lambda network, x: network(x))
        np.testing.assert_array_equal(jax.vmap(marked, (None, 0))(network, X), jax.vmap(network)(X))
        call = one_call(lambda x: jax.vmap(marked, (None, 0))(network, x), X)
        assert [aval.shape for aval in call.in_avals] == [(2, 3), (3,)]

    def test_outside_of_a_trace_numpy_arrays_are_traced_arguments(self):
        marked, traced = choreo.fragment("actor")(lambda w, x: traced.append(w) or score(w, x)), []
        for _ in range(2):
            marked(np.asarray(W), np.ones(3, np.float32) + len(traced))
        assert len(traced) == 1 and isinstance(traced[0], jax.core.Tracer)

    def test_within_a_trace_numpy_arrays_are_constants(self):
        marked = choreo.fragment("actor")(score)
        assert len(one_call(lambda x: marked(np.asarray(W), x), jnp.ones(3)).in_avals) == 1

    def test_results_that_are_not_arrays_are_returned_unchanged(self):
        marked = choreo.fragment("actor")(lambda x: (Pair(2 * x, "double"), None, {"f": jnp.tanh, "n": 3}))
        pair, nothing, rest = jax.jit(lambda x: marked(x)[0].x)(W), *marked(W)[1:]
        np.testing.assert_array_equal(pair, 2 * W)
        assert marked(W)[0].label == "double" and nothing is None and rest == {"f": jnp.tanh, "n": 3}
        batched = jax.vmap(lambda x: marked(x)[0].x)(X)
        np.testing.assert_array_equal(batched, 2 * X)

    def test_the_record_names_each_result(self):
        marked = choreo.fragment("actor")(lambda x: (Pair(x, "x"), {"loss": jnp.sum(x)}))
        call = one_call(lambda x: marked(x)[1], W)
        assert call.out_names == ["[0].x", "[1]['loss']"]

    def test_an_argument_that_is_neither_an_array_nor_hashable_is_refused(self):
        marked = choreo.fragment("actor")(score)
        with pytest.raises(AlgorithmError) as refusal:
            marked({1, 2}, W)
        assert str(refusal.value) == (
            "Fragment `score` was called with a `set`, which is neither an array nor hashable.\n"
            "Pass arrays, or values that can be dictionary keys (a frozen dataclass, a tuple, a function)."
        )

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize(
        "role", ["", None, 3, "a:b", "env+actor", score], ids=lambda role: repr(role).split(" at ")[0]
    )
    def test_a_bad_role_is_refused(self, role):
        with pytest.raises(
            AlgorithmError, match=r'needs a role: a word such as "actor"\.\nWrite @choreo.fragment\("actor"\)'
        ):
            choreo.fragment(role)(score)


class TestTheRecordOfVmaps:
    def test_is_empty_without_a_vmap(self):
        assert one_call(choreo.fragment("actor")(score), W, X[0]).vmaps == ()

    def test_says_along_which_axis_each_argument_is_mapped(self):
        marked = choreo.fragment("actor")(score)
        assert one_call(lambda w, x: jax.vmap(marked, (None, 0))(w, x), W, X).vmaps == (Vmap(None, 5, (None, 0)),)
        assert one_call(lambda w, x: jax.vmap(marked, (None, 1))(w, x), W, X.T).vmaps == (Vmap(None, 5, (None, 1)),)

    def test_lists_nested_vmaps_innermost_first_with_their_names(self):
        marked = choreo.fragment("actor")(score)
        nested = jax.vmap(jax.vmap(marked, (None, 0), axis_name="env"), (0, None), axis_name="agent")
        call = one_call(nested, jnp.stack([W, W]), X)
        assert call.vmaps == (Vmap("env", 5, (None, 0)), Vmap("agent", 2, (0, None)))

    def test_calls_with_different_axis_names_are_traced_separately(self):
        marked = choreo.fragment("actor")(lambda x: lax.psum(x, "agent"))
        np.testing.assert_allclose(
            jax.vmap(marked, axis_name="agent")(X), jnp.tile(jnp.sum(X, 0), (5, 1)), rtol=1e-6, atol=1e-6
        )
        with pytest.raises(NameError, match="agent"):
            jax.vmap(marked, axis_name="other")(X)


class TestAllReduce:
    def test_with_one_shard_it_returns_its_argument(self):
        tree = {"w": W, "n": 3}
        assert choreo.all_reduce(tree) is tree
        assert choreo.all_reduce(tree, "sum") is tree

    @pytest.mark.parametrize(("op", "reduce"), [("mean", jnp.mean), ("sum", jnp.sum), ("max", jnp.max)])
    def test_it_combines_the_values_of_all_shards(self, op, reduce):
        shards = {"w": X, "b": X[:, 0]}
        out = jax.vmap(lambda x: choreo.all_reduce(x, op), axis_name=SHARD_AXIS)(shards)
        for name, x in shards.items():
            want = jnp.broadcast_to(reduce(x, axis=0), x.shape)
            np.testing.assert_allclose(out[name], want, rtol=1e-6, atol=1e-6)

    def test_it_works_inside_a_fragment(self):
        marked = choreo.fragment("learner")(lambda x: choreo.all_reduce(x, "sum"))
        np.testing.assert_array_equal(marked(W), W)
        np.testing.assert_allclose(jax.vmap(marked, axis_name=SHARD_AXIS)(X)[0], jnp.sum(X, 0), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(marked(W), W)

    @pytest.mark.usefixtures("unchecked")
    def test_an_unknown_op_is_refused_even_with_one_shard(self):
        with pytest.raises(AlgorithmError) as refusal:
            choreo.all_reduce(W, "median")  # pyright: ignore[reportArgumentType]
        assert str(refusal.value) == 'all_reduce(op=\'median\') is not known.\nUse "mean", "sum" or "max".'


E = 6
ROW = jax.ShapeDtypeStruct((E, 3), np.float32)


def simulate(state, action):
    return {"s": 0.5 * state["s"] + 0.1 * np.tanh(action)}


def host_program(host, *, loop: bool) -> Functions:
    """A learner, an actor, and a host fragment in place of the environment.

    With `loop`, a scan calls the host fragment in each step. Otherwise, `iterate` calls it once.
    """

    @choreo.fragment("actor")
    def act(w, s):
        return w * jnp.tanh(s)

    def start(env, key):
        return {"w": W, "s": jnp.linspace(-1.0, 1.0, 3 * E).reshape(E, 3)}

    def step(w, s):
        return host({"s": s}, action=jax.vmap(act, (None, 0))(w, s))["s"]

    def go(env, carry, key):
        w = carry["w"]
        if loop:
            s, path = lax.scan(lambda s, _: (step(w, s), s), carry["s"], length=3)
        else:
            s = step(w, carry["s"])
            path = s[None]
        return {"w": update(w, path), "s": s}, {"mean": jnp.mean(s)}

    return Functions(start, go)


@choreo.fragment("learner")
def update(w, path):
    return w - 0.1 * jnp.mean(path, (0, 1))


def test_a_host_fragment_is_a_callback_in_a_compiled_program():
    host = choreo.host_fragment("env", simulate, {"s": ROW})
    out = jax.jit(lambda s, a: host({"s": s}, a))(jnp.ones((E, 3)), jnp.zeros((E, 3)))
    np.testing.assert_array_equal(out["s"], np.full((E, 3), 0.5, np.float32))
    call = one_call(lambda s, a: host({"s": s}, a)["s"], jnp.ones((E, 3)), jnp.zeros((E, 3)))
    assert (call.role, call.name) == ("env", "simulate") and call.host is not None


HOST_LAYOUTS = {
    "fused": fused(),
    "coarse x1": coarse(1),
    "fine x1": fine(1),
    "three sites": Layout(Group("env"), Group("actor"), Group("learner")),
}


@pytest.mark.parametrize("loop", [False, True], ids=["alone", "in a scan"])
@pytest.mark.parametrize("layout", HOST_LAYOUTS.values(), ids=HOST_LAYOUTS)
def test_at_a_site_a_host_fragment_is_called_directly(layout, loop):
    given, copies = [], []

    def watched(state, action):
        given.extend([state["s"], action])
        copies.extend(np.array(x) for x in given[-2:])
        return simulate(state, action)

    host = choreo.host_fragment("env", watched, {"s": ROW}, name="simulator")
    algo, env = host_program(host, loop=loop), Pond()
    planned = plan(algo, env, layout)
    found = [(step, times) for step, times in walk(planned.iterate.steps) if isinstance(step, HostCall)]
    assert [(step.name, times) for step, times in found] == [("simulator", 3 if loop else 1)]
    assert any(isinstance(step, Loop) for step in planned.iterate.steps) == loop, (
        "a scan that calls Python must become a `Loop`, and nothing else must become one"
    )
    for step, _ in walk(planned.iterate.steps):
        if isinstance(step, Segment):
            scalar = jax.ShapeDtypeStruct((), np.int32)
            assert not jax.make_jaxpr(step.fn)(scalar, scalar, *(given.aval for given in step.ins)).effects

    run = planned_run(algo, env, planned, KEY)
    # Each of the three iterations calls the host fragment three times (with `loop`) or once. Each call gets two arrays.
    assert len(given) == (18 if loop else 6) and all(type(x) is np.ndarray for x in given)
    np.testing.assert_array_equal(
        given, copies, err_msg="an array that the host fragment received was overwritten later"
    )
    # The reference is one compiled program. In it, XLA may fuse the operations around the callback, and round differently.
    assert_close(run, host_reference(loop), 1e-6)


@functools.cache
def host_reference(loop: bool):
    return reference_run(host_program(choreo.host_fragment("env", simulate, {"s": ROW}), loop=loop), Pond(), KEY)


@pytest.mark.parametrize("layout", [fused(), fine(1)], ids=["fused", "fine"])
def test_a_simulator_may_reuse_its_buffer(layout):
    buffer = np.zeros((E, 3), np.float32)

    def reuse(state, action):
        buffer[:] = simulate(state, action)["s"]
        return {"s": buffer}

    env, key = Pond(), KEY
    run, fresh = (
        planned_run(host_program(choreo.host_fragment("env", fn, {"s": ROW}), loop=True), env, layout, key)
        for fn in (reuse, simulate)
    )
    assert_same_bits(run, fresh)


def test_a_host_fragment_gives_the_same_bits_at_any_site():
    host = choreo.host_fragment("env", simulate, {"s": ROW})
    algo, env = host_program(host, loop=True), Pond()
    one, other = (planned_run(algo, env, HOST_LAYOUTS[name], KEY) for name in ("fused", "three sites"))
    assert_same_bits(other, one)


def test_a_host_fragment_takes_python_numbers():
    seen = []

    def scale(s, by, *, times):
        seen.append((by.dtype, times.dtype))
        return s * by * times.astype(np.float32)

    host = choreo.host_fragment("env", scale, ROW)

    def go(env, carry, key):
        s = host(carry["s"], 0.5, times=2)
        return carry | {"s": s, "w": update(carry["w"], s[None])}, {"m": jnp.sum(s)}

    algo = Functions(still, go)
    assert_close(planned_run(algo, Pond(), fine(1), KEY), reference_run(algo, Pond(), KEY), 1e-6)
    assert set(seen) == {(np.dtype("float32"), np.dtype("int32"))}


class TestAHostFragmentIsRefused:
    def call(self, fn):
        """Call the host fragment directly, as a site does. In a compiled program, XLA would wrap the error in another error."""
        host = choreo.host_fragment("env", fn, {"s": ROW}, name="simulator")
        call = one_call(lambda s: host(s)["s"], jnp.ones((E, 3)))
        assert call.host is not None
        return call.host(np.ones((E, 3), np.float32))

    def test_unless_the_result_fits_its_spec(self):
        np.testing.assert_array_equal(self.call(lambda s: {"s": 2 * s}), [np.full((E, 3), 2, np.float32)])

    def test_for_a_wrong_shape(self):
        with pytest.raises(AlgorithmError) as refusal:
            self.call(lambda s: {"s": s[:2]})
        assert str(refusal.value) == (
            "Host fragment `simulator` returned float32[2, 3], but its out_spec says float32[6, 3].\n"
            "Correct the out_spec, or convert the results of the function."
        )

    def test_for_a_wrong_dtype(self):
        with pytest.raises(AlgorithmError, match=r"returned float64\[6, 3\], but its out_spec says float32\[6, 3\]"):
            self.call(lambda s: {"s": s.astype(np.float64)})

    def test_for_a_wrong_structure(self):
        with pytest.raises(AlgorithmError) as refusal:
            self.call(lambda s: (s, s))
        assert str(refusal.value) == (
            "Host fragment `simulator` returned PyTreeDef((*, *)), but its out_spec says PyTreeDef({'s': *})."
        )

    def test_when_its_group_is_replicated(self):
        host = choreo.host_fragment("env", simulate, {"s": ROW}, name="simulator")
        with pytest.raises(PartitionError) as refusal:
            plan(host_program(host, loop=False), Pond(), fine(2))
        lines = str(refusal.value).splitlines()
        assert lines[0] == (
            "The host fragment `simulator` cannot be replicated: Choreo does not know which of its rows belong to which "
            "environment."
        )
        assert "test_roles.py" in lines[1]
        assert lines[2] == "Use one site for `env`, or make it a method of an object: choreo.host_method."

    @pytest.mark.parametrize("layout", [fused(), fine(1)], ids=["fused", "fine"])
    def test_under_vmap(self, layout):
        """Under `vmap`, the Python function would get the whole batch instead of a row. The result could have the right shape and
        wrong numbers."""
        spec = jax.ShapeDtypeStruct((), np.float32)
        host = choreo.host_fragment("env", lambda row: np.float32(row.sum()), spec, name="total")

        def go(env, carry, key):
            total = jax.vmap(host)(carry["s"])
            return carry | {"w": update(carry["w"], (total[:, None] * carry["s"])[None])}, {"m": jnp.sum(total)}

        with pytest.raises(ChoreoError) as refusal:
            planned_run(Functions(still, go), Pond(), layout, KEY)
        lines = str(refusal.value).splitlines()
        assert lines[0] == (
            "The host fragment `total` is called under jax.vmap, but Python code is called once for all rows."
        )
        assert "test_roles.py" in lines[1]
        assert lines[-1] == "Call it on the whole batch, without jax.vmap."
