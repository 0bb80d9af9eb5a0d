"""Arrays of every dtype that JAX has cross between sites bit for bit, or the plan refuses them and names the dtype."""

import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import choreo
from choreo.dtypes import FOUR_BITS, NAMES, dtype_named, name_of
from choreo.envs import make
from choreo.errors import PartitionError
from choreo.layouts import coarse, fine, fused
from choreo.partition.program import ArrayType, KeyType
from choreo.plans.build import plan
from choreo.runtime.channels.base import message_bytes
from choreo.runtime.coordinator.control_frames import receive_frame, send_frame
from choreo.runtime.engine.backend import PythonOnly
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from choreo.testing import unmarked
from laws.reference import named, reference_run, run_of
from runtime.channels.test_channel import at_once, make_shm, make_tcp
from tiny import Tiny, Train

DTYPES = (
    "bool", "int4", "int8", "int16", "int32", "uint4", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32",
    "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "complex64",
)  # fmt: skip
WIDE = ("int64", "uint64", "float64", "complex128")
FEW = ("float32", "bfloat16", "float8_e5m2", "int4", "float4_e2m1fn")
"""float32, and one type of each kind that needs special handling."""
IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
KEY = jax.random.key(5)


@dataclass(frozen=True)
class Counters:
    """Environments that add up their actions. The actions are whole numbers, so every program computes the same sums exactly."""

    num_envs: int = 6

    def with_num_envs(self, n):
        return Counters(n)

    def keys(self, key):
        return jax.random.split(key, self.num_envs)

    @choreo.fragment("env")
    def reset(self, keys):
        return jnp.zeros(self.num_envs)

    @choreo.fragment("env")
    def step(self, state, action):
        return state + action


@dataclass(frozen=True)
class Zoo:
    """An algorithm whose carry has two leaves of every type: one in `kept`, which the learner holds, and one in `rows`, with a row
    per environment. The actors read `kept` and return new rows. The learner replaces `kept` with one of these rows."""

    dtypes: tuple[str, ...] = DTYPES

    def init(self, env, key):
        kept = {name: consecutive_bits(name, (3,), first=1) for name in self.dtypes}
        rows = {name: consecutive_bits(name, (env.num_envs, 3), first=5) for name in self.dtypes}
        keys = {impl: jax.random.key(7, impl=impl) for impl in IMPLS}
        return {"s": env.reset(env.keys(key)), "kept": kept, "rows": rows, "keys": keys}

    def iterate(self, env, carry, key):
        act = jax.vmap(self.act, (None, None, 0, 0))
        action, rows = act(carry["kept"], carry["keys"], carry["rows"], carry["s"])
        kept, keys, count = self.learn(carry["kept"], carry["keys"], rows)
        return {"s": env.step(carry["s"], action), "kept": kept, "rows": rows, "keys": keys}, {"count": count}

    @choreo.fragment("actor")
    def act(self, kept, keys, row, s):
        """The new row is the kept leaf, except that its last number is the first number of the old row."""
        drawn = [jax.random.bits(key, (), jnp.uint32) & jnp.uint32(1) for key in keys.values()]
        row = {name: kept[name].at[2].set(row[name][0]) for name in kept}
        return s + sum(drawn).astype(s.dtype), row

    @choreo.fragment("learner")
    def learn(self, kept, keys, rows):
        """Keep the second row, reversed."""
        keys = {impl: jax.random.clone(jax.random.fold_in(key, 3)) for impl, key in keys.items()}
        count = sum(jnp.sum(row == row, dtype=jnp.int32) for row in rows.values())
        return {name: rows[name][1][::-1] for name in kept}, keys, count


@dataclass(frozen=True)
class Relay:
    """An algorithm with a loop that runs at several sites. In every step, rows of every type go to the sites of the environments
    and come back. The learner reads the rows of all steps."""

    dtypes: tuple[str, ...] = DTYPES

    def init(self, env, key):
        rows = {name: consecutive_bits(name, (env.num_envs, 3), first=5) for name in self.dtypes}
        kept = {name: consecutive_bits(name, (4, env.num_envs, 3), first=2) for name in self.dtypes}
        return {"s": env.reset(env.keys(key)), "rows": rows, "kept": kept}

    def iterate(self, env, carry, key):
        def step(c, _):
            s, rows = c
            rows = jax.vmap(self.turn)(rows)
            s = env.step(s, jax.vmap(self.act)(rows, s))
            return (s, rows), rows

        (s, rows), seen = jax.lax.scan(step, (carry["s"], carry["rows"]), None, length=4)
        kept, count = self.learn(carry["kept"], seen)
        return {"s": s, "rows": rows, "kept": kept}, {"count": count}

    @choreo.fragment("env")
    def turn(self, row):
        return {name: jnp.roll(values, 1) for name, values in row.items()}

    @choreo.fragment("actor")
    def act(self, row, s):
        return s + sum(jnp.any(values == values).astype(s.dtype) for values in row.values())

    @choreo.fragment("learner")
    def learn(self, kept, seen):
        return {name: kept[name].at[1].set(seen[name][2]) for name in kept}, jnp.int32(len(kept))


def consecutive_bits(name, shape, *, first):
    """An array of the type `name` with many different bit patterns, so that a wrong conversion changes the bytes."""
    dtype = jnp.dtype(getattr(jnp, name))
    count = int(np.prod(shape))
    if name == "bool":
        return jnp.asarray((np.arange(count) + first) % 3 == 0).reshape(shape)
    bits = 4 if "4" in name[:6] and dtype.itemsize == 1 else 8 * dtype.itemsize
    if bits == 4:
        return jnp.asarray(((np.arange(count) + first) % 7).astype(np.int8).astype(dtype)).reshape(shape)
    # With bytes from 17 to 112, no number is NaN.
    patterns = np.arange(first, first + count * dtype.itemsize).astype(np.uint8) % 96 + 17
    return jnp.asarray(patterns.view(dtype)).reshape(shape)


def reference(algo, env, iterations=3):
    """The results of the plain functions, called one after the other without a plan."""
    init_key, run_key = jax.random.split(KEY)
    with unmarked():
        carry, rows = algo.init(env, init_key), []
        for i in range(iterations):
            carry, metrics = algo.iterate(env, carry, jax.random.fold_in(run_key, i))
            rows.append(metrics)
    return named(carry, {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]})


def assert_same_bytes(run, expected):
    assert run.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert (run[name].dtype, run[name].tobytes()) == (value.dtype, value.tobytes()), name
        else:  # the tree structure, or a leaf that is not an array
            assert run[name] == value, name


@pytest.mark.parametrize("carrier", ["shm", pytest.param("tcp", marks=pytest.mark.long)])
def test_every_type_crosses_between_workers_and_the_coordinator_unchanged(carrier):
    """The carry goes between workers, to the coordinator, back to the workers, and to the coordinator again."""
    algo, env = Zoo(DTYPES + WIDE), Counters()
    with jax.enable_x64(True):
        workers = Local(plan(algo, env, coarse(2)), carrier=carrier)
        try:
            workers.start(KEY)
            metrics = workers.run(0, 2)
            workers.restore(workers.carry(), KEY)
            metrics = {name: np.append(rows, workers.run(2, 3)[name]) for name, rows in metrics.items()}
            run = named(workers.carry(), metrics)
        finally:
            workers.close()
        assert_same_bytes(run, reference(algo, env))


@pytest.mark.parametrize("layout", [fused(), coarse(2)], ids=["fused", "coarse"])
def test_special_types_in_the_carry_of_one_process_keep_their_bits(layout):
    algo, env = Zoo(FEW), Counters()
    assert_same_bytes(run_of(InProcess(plan(algo, env, layout)), KEY), reference(algo, env))


@pytest.mark.parametrize(
    ("dtypes", "runtime"),
    [(FEW, InProcess), pytest.param(DTYPES, Local, marks=pytest.mark.long)],
    ids=["inprocess", "workers"],
)
def test_every_type_crosses_between_sites_in_a_loop_unchanged(dtypes, runtime):
    algo, env = Relay(dtypes), Counters()
    assert_same_bytes(run_of(runtime(plan(algo, env, fine(2))), KEY), reference(algo, env))


@pytest.mark.parametrize("layout", [fused(), coarse(2)], ids=["fused", "coarse"])
def test_a_type_that_cannot_leave_a_program_is_refused_by_the_plan(layout):
    """JAX cannot export 2-bit types. XLA on CPU would abort the process when it joins two blocks of 2-bit numbers."""
    with pytest.raises(PartitionError) as refused:
        plan(Zoo(dtypes=("float32", "int2")), Counters(), layout)
    assert str(refused.value).startswith(
        "`carry['kept']['int2']` is int2[3]: values of this type cannot go from one compiled"
    )
    assert "Keep it as int8" in str(refused.value)


@dataclass(frozen=True, kw_only=True)
class HalfTiny(Tiny):
    """`Tiny` with weights of 16 bits."""

    def init(self, env, key):
        carry = super().init(env, key)
        return carry._replace(train=carry.train._replace(weights=carry.train.weights.astype(jnp.bfloat16)))

    def policy(self, train):
        return train.weights

    @choreo.fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        return jax.random.categorical(key, obs @ params.astype(obs.dtype)), ()

    @choreo.fragment("learner")
    def learn(self, train, trajectory):
        def loss(weights):
            log_pi = jax.nn.log_softmax(trajectory.obs @ weights.astype(trajectory.obs.dtype))
            chosen = jnp.take_along_axis(log_pi, trajectory.action[..., None], axis=-1)
            return -jnp.mean(chosen[..., 0] * trajectory.reward)

        value, grad = jax.value_and_grad(loss)(train.weights)
        return Train(train.weights - jnp.bfloat16(0.1) * grad, train.iterations + 1), {"loss": value}


@pytest.mark.long
def test_weights_of_16_bits_go_to_workers_and_back():
    """bfloat16 needs a test of its own: `dtype.str` of bfloat16 is `<V2`, from which the type cannot be found again."""
    algo, env = HalfTiny(unroll=4), make("jax:CartPole-v1", 4)
    planned = plan(algo, env, coarse(2))
    run = run_of(Local(planned), KEY)
    assert run[".train.weights"].dtype == jnp.bfloat16 and run[".train.weights"].any()
    assert_same_bytes(run, run_of(InProcess(planned), KEY))
    with unmarked():
        expected = reference_run(algo, env, KEY)
    np.testing.assert_array_equal(run[".train.weights"], expected[".train.weights"])


class TestHostSites:
    """A worker that runs only Python handles the types without JAX."""

    @pytest.mark.parametrize("impl", IMPLS)
    def test_random_keys_arrive_as_key_data(self, impl):
        words = jax.random.key_data(jax.random.key(0, impl=impl)).shape
        keys = ArrayType((5,), KeyType(impl, *words))
        assert PythonOnly().host_type(keys) == ((5, *words), np.uint32)
        assert PythonOnly().stack([], keys).shape == (5, *words)

    def test_importing_the_types_imports_neither_jax_nor_ml_dtypes(self):
        code = (
            "import sys, choreo.runtime.coordinator.control_frames, choreo.runtime.engine.machine\n"
            "assert 'jax' not in sys.modules and 'ml_dtypes' not in sys.modules\n"
            "from choreo.dtypes import dtype_named\n"
            "assert dtype_named('float32').kind == 'f' and 'ml_dtypes' not in sys.modules\n"
            "from choreo.host import HostMethod, HostObjects, Spec\n"
            "HostObjects().bind(HostMethod(print, 'step', (Spec((2,), 'bfloat16'),)))\n"
            "assert 'ml_dtypes' in sys.modules and 'jax' not in sys.modules\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@st.composite
def arrays(draw):
    """Arrays of any type with any bits, contiguous or as a strided view."""
    name = draw(st.sampled_from(sorted(NAMES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple) | st.just((300, 257)))
    whole, dtype = (*shape, 2), dtype_named(name)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    if name == "bool" or name in FOUR_BITS:  # a number of these types uses only some bits of its byte
        found = random.integers(0, 2 if name == "bool" else 8, whole).astype(np.uint8).astype(dtype)
    else:
        found = random.integers(0, 256, (*whole, dtype.itemsize)).astype(np.uint8).view(dtype)[..., 0]
    return found[..., 1] if draw(st.booleans()) else np.ascontiguousarray(found[..., 0]).reshape(shape)


@pytest.mark.parametrize("make_channel", [make_shm, make_tcp, None], ids=["shm", "tcp", "control"])
@settings(max_examples=30)
@given(message=st.lists(arrays(), max_size=4))
def test_messages_of_any_types_arrive_unchanged(make_channel, message):
    if make_channel is None:
        arrived = through_a_control_socket(message)
    else:
        arrived = [np.empty(a.shape, a.dtype) for a in message]
        sender, receiver = make_channel(message_bytes(message), timeout_s=20.0)
        with sender, receiver:
            sender.send(message)
            receiver.receive(arrived)
    for sent, found in zip(message, arrived, strict=True):
        assert (found.dtype, found.shape, found.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())


def through_a_control_socket(message):
    here, there = socket.socketpair()
    with here, there:
        frame, _ = at_once(partial(receive_frame, there), partial(send_frame, here, {"kind": "ran"}, message))
    header, found = frame
    assert header == {"kind": "ran"}
    return found


def test_the_table_has_every_type_of_jax_that_is_not_refused():
    have = {name for name in dir(jnp) if re.fullmatch(r"bool|(u?int|b?float|complex)\d\w*", name)}
    assert have - NAMES <= {"int1", "uint1", "int2", "uint2", "float6_e2m3fn", "float6_e3m2fn"}
    assert NAMES <= have
    assert all(name_of(dtype_named(name)) == name for name in NAMES)
    assert name_of(np.dtype(">f4")) == "float32"
    for unknown in ("V2", "O", "M8[s]", "U3", "f4,i4"):
        with pytest.raises(KeyError):
            name_of(np.dtype(unknown))
    with pytest.raises(KeyError):
        dtype_named("__class__")
