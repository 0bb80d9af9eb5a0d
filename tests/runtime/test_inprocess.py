"""The results of `InProcess` do not depend on restarts, or on how a run is divided into calls. `restore` and `carry` copy the
carry."""

import pickle
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo.errors import ChoreoError, LayoutError
from choreo.layouts import Group, Layout, coarse, fine, fused
from choreo.plans.build import plan
from choreo.plans.plan import Plan
from choreo.runtime.base import Runtime
from choreo.runtime.inprocess import InProcess
from laws.reference import assert_same_bits
from partition.ponds import WALK, Functions, Pond, learn, push, pushed, still

LAYOUTS = {"fused": fused(), "coarse x2": coarse(2), "fine x2": fine(2)}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
KEY = jax.random.key(11)


@pytest.fixture(scope="module")
def plans():
    return {layout: plan(WALK, Pond(), layout) for layout in LAYOUTS.values()}


def started(planned: Plan) -> InProcess:
    runtime = InProcess(planned)
    runtime.start(KEY)
    return runtime


def leaves(carry) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(carry)}


def joined(*chunks):
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


@every_layout
def test_a_restored_run_continues_bit_for_bit(plans, layout):
    whole, before = started(plans[layout]), started(plans[layout])
    metrics = whole.run(0, 5)
    first = before.run(0, 2)
    carry = jax.tree.map(np.asarray, before.carry())  # a checkpoint file holds numpy arrays
    after = InProcess(plans[layout])
    after.restore(jax.tree.map(jnp.asarray, carry), KEY)
    assert_same_bits(leaves(after.carry()), leaves(carry))
    assert_same_bits(joined(first, after.run(2, 5)), metrics)
    assert_same_bits(leaves(after.carry()), leaves(whole.carry()))


def test_a_carry_can_be_restored_into_a_different_layout(plans):
    """The carry of a layout with two workers is restored into a layout with one program."""
    two, one = started(plans[LAYOUTS["coarse x2"]]), InProcess(plans[LAYOUTS["fused"]])
    two.run(0, 2)
    one.restore(two.carry(), KEY)
    for name, value in leaves(two.carry()).items():
        np.testing.assert_array_equal(leaves(one.carry())[name], value)
    np.testing.assert_allclose(one.run(2, 4)["loss"], two.run(2, 4)["loss"], rtol=1e-5)


@every_layout
def test_dividing_a_run_into_calls_does_not_change_its_results(plans, layout):
    at_once, divided = started(plans[layout]), started(plans[layout])
    metrics = at_once.run(0, 7)
    assert_same_bits(joined(divided.run(0, 3), divided.run(3, 7)), metrics)
    assert_same_bits(leaves(divided.carry()), leaves(at_once.carry()))


def test_a_shorter_chunk_after_a_longer_one_is_not_compiled_again(plans):
    runtime = InProcess(plans[LAYOUTS["fused"]])
    runtime.start(KEY)
    runtime.run(0, 4)
    spent = runtime.compile_seconds
    assert spent > 0
    assert runtime.run(4, 6)["loss"].shape == (2,) and runtime.run(6, 7)["loss"].shape == (1,)
    assert runtime.compile_seconds == spent


@every_layout
def test_the_key_of_an_iteration_depends_on_its_number_only(plans, layout):
    runtime, other = started(plans[layout]), started(plans[layout])
    carry = runtime.carry()
    assert not np.array_equal(runtime.run(5, 6)["loss"], other.run(0, 1)["loss"])
    runtime.restore(carry, KEY)
    other.restore(carry, KEY)
    assert_same_bits(runtime.run(3, 4), other.run(3, 4))


@every_layout
def test_metrics_have_one_entry_per_iteration(layout):
    def go(env, carry, key):
        s = pushed(env, carry)
        w, slow, loss = learn(carry["w"], carry["slow"], s[None])
        return {"w": w, "slow": slow, "s": s}, {
            "loss": loss,
            "per_env": s[:, 0],
            "number": 2.5,
            "literal": jnp.int32(7),
            "matrix": jnp.eye(2),
        }

    runtime = started(plan(Functions(still, go), Pond(), layout))
    for first, stop in ((0, 1), (1, 4)):
        metrics = runtime.run(first, stop)
        n = stop - first
        assert {name: value.shape for name, value in metrics.items()} == {
            "loss": (n,), "per_env": (n, 6), "number": (n,), "literal": (n,), "matrix": (n, 2, 2),
        }  # fmt: skip
        assert all(isinstance(value, np.ndarray) for value in metrics.values())
        assert (metrics["number"] == 2.5).all() and (metrics["literal"] == 7).all()


@every_layout
def test_running_no_iterations_changes_nothing(plans, layout):
    runtime = started(plans[layout])
    before = leaves(runtime.carry())
    assert not runtime.run(0, 0).keys() - {"loss"}
    assert_same_bits(leaves(runtime.carry()), before)


@every_layout
def test_a_returned_carry_is_a_copy(plans, layout):
    runtime = started(plans[layout])
    runtime.run(0, 1)
    carry = runtime.carry()
    copied = leaves(jax.tree.map(jnp.copy, carry))
    runtime.run(1, 4)
    assert_same_bits(leaves(carry), copied)
    assert not np.array_equal(copied["['s']"], leaves(runtime.carry())["['s']"])


def test_streaming_copies_nothing_and_the_next_iteration_still_works_in_place(plans):
    runtime = started(plans[LAYOUTS["fused"]])
    runtime.run(0, 1)
    (leaves_before,) = runtime.execution.leaves.values()
    addresses = [leaf.unsafe_buffer_pointer() for leaf in leaves_before]
    del leaves_before
    for i, address in enumerate(addresses):
        (flat,) = runtime.stream([i])
        assert flat.ctypes.data == address and flat.ndim == 1
        del flat
    runtime.run(1, 2)
    (leaves_after,) = runtime.execution.leaves.values()
    assert sorted(leaf.unsafe_buffer_pointer() for leaf in leaves_after) == sorted(addresses)


@every_layout
def test_a_restored_carry_is_copied_not_donated(plans, layout):
    source = started(plans[layout])
    carry = source.carry()
    copied = leaves(jax.tree.map(jnp.copy, carry))
    runtime = InProcess(plans[layout])
    runtime.restore(carry, KEY)
    runtime.run(0, 2)
    assert_same_bits(leaves(carry), copied)


class Network(eqx.Module):
    weights: jax.Array
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x):
        return self.activation(self.weights @ x)


@every_layout
def test_the_carry_keeps_its_static_leaves(layout):
    def start(env, key):
        return still(env, key) | {"net": Network(jnp.eye(3), jnp.tanh)}

    def go(env, carry, key):
        s = pushed(env, carry)
        w, slow, loss = learn(carry["net"](carry["w"]), carry["slow"], s[None])
        return {"w": w, "slow": slow, "s": s, "net": carry["net"]}, {"loss": loss}

    runtime = started(plan(Functions(start, go), Pond(), layout))
    runtime.run(0, 2)
    net = runtime.carry()["net"]
    assert net.activation is jnp.tanh and net(jnp.ones(3)).shape == (3,)


def test_inprocess_implements_runtime_and_close_frees_the_carry(plans):
    runtime = InProcess(plans[LAYOUTS["fused"]])
    assert isinstance(runtime, Runtime)
    runtime.start(KEY)
    runtime.close()
    assert not runtime.execution.leaves


def test_a_missing_platform_is_refused():
    layout = Layout(Group("env", "actor"), Group("learner", device="quantum"))
    with pytest.raises(LayoutError) as refusal:
        InProcess(plan(WALK, Pond(), layout))
    assert str(refusal.value) == (
        "The layout wants `learner` on 'quantum', but JAX sees only cpu here.\n"
        "Change the group's `device`, or install JAX for that platform."
    )
    assert started(plan(WALK, Pond(), Layout(Group("env", "actor"), Group("learner", device="cpu")))).run(0, 1)


@choreo.fragment("learner")
def print_and_learn(w, slow, path):
    w, slow, loss = learn.fn(w, slow, path)
    jax.debug.print("the loss is {loss}", loss=loss)
    return w, slow, loss


@choreo.fragment("actor")
def print_and_push(w, s):
    jax.debug.print("pushing {x}", x=s[0])
    return push.fn(w, s)


def printing(env, carry, key):
    s = env.step(carry["s"], jax.vmap(print_and_push, (None, 0))(carry["w"], carry["s"]))
    w, slow, loss = print_and_learn(carry["w"], carry["slow"], s[None])
    return {"w": w, "slow": slow, "s": s}, {"loss": loss}


PRINTING = Functions(still, printing)


@pytest.mark.parametrize("layout", [fused(), coarse(1), fine(1)], ids=["fused", "coarse x1", "fine x1"])
def test_debug_print_prints_the_values_of_every_iteration(layout, capfd):
    runtime = started(plan(PRINTING, Pond(), layout))
    losses = runtime.run(0, 2)["loss"]
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert [float(line.rsplit(" ", 1)[1]) for line in out.splitlines() if "the loss is" in line] == pytest.approx(
        losses
    )
    assert out.count("pushing") == 2 * 6


def test_debug_print_with_replicas_is_refused_or_prints_once_per_environment(capfd):
    try:
        planned = plan(PRINTING, Pond(), coarse(2))
    except ChoreoError as refusal:
        assert "test_inprocess.py" in str(refusal)
        return
    started(planned).run(0, 2)
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert (out.count("pushing"), out.count("the loss is")) == (2 * 6, 2)


@pytest.mark.parametrize("layout", [fused(), coarse(1)], ids=["fused", "coarse x1"])
def test_a_plan_with_debug_print_cannot_be_pickled_and_the_error_says_so(layout):
    """A callback is a Python function of this process. StableHLO cannot hold such a function."""
    planned = plan(PRINTING, Pond(), layout)
    with pytest.raises(ChoreoError) as refusal:
        pickle.dumps(planned)
    assert "jax.debug.print" in str(refusal.value)


def test_a_leaf_whose_shape_differs_from_the_plan_is_refused():
    """Without this check, JAX would compile the program for the wrong shape and report no error."""
    running = InProcess(plan(WALK, Pond(), fused()))
    running.start(jax.random.key(0))
    (row,) = running.execution.leaves.values()
    names = [port.name for port in running.plan.iterate.ins]
    row[names.index("['slow']")] = jnp.zeros((1,))  # a shape that would broadcast
    with jax.numpy_rank_promotion("allow"), pytest.raises(AssertionError, match=r"as float32\[1\], but the plan says"):
        running.run(0, 1)
