import contextlib
import hashlib
import json
import re
import resource
import weakref
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from choreo.dtypes import KEY_IMPLS, NAMES, dtype_named
from choreo.errors import RunError, UnknownNameError
from choreo.host.states import HostStates, encode
from choreo.runs import checkpoint


class Carry(NamedTuple):
    weights: jax.Array
    key: jax.Array
    flags: dict[str, jax.Array]


@pytest.fixture
def carry():
    return Carry(
        weights=jnp.arange(6.0).reshape(2, 3).T,
        key=jax.random.split(jax.random.key(3), 4),
        flags={
            "done": jnp.array([True, False]),
            "half": jnp.bfloat16(1.5),
            "empty": jnp.zeros((0, 2)),
            "n": jnp.int32(7),
        },
    )


def test_every_leaf_is_loaded_as_it_was_saved(tmp_path, carry):
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, carry, iteration=12)
    back = checkpoint.load(path, jax.eval_shape(lambda: carry))
    assert checkpoint.iteration(path) == 12
    assert jax.tree.structure(back) == jax.tree.structure(carry)
    np.testing.assert_array_equal(jax.random.key_data(back.key), jax.random.key_data(carry.key))
    assert back.key.dtype == carry.key.dtype
    np.testing.assert_array_equal(back.weights, carry.weights)
    for name, leaf in carry.flags.items():
        assert back.flags[name].dtype == leaf.dtype and back.flags[name].shape == leaf.shape
        np.testing.assert_array_equal(back.flags[name], leaf)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_arrays_of_every_type_are_loaded_bit_for_bit(tmp_path, name):
    dtype, count = dtype_named(name), 7
    with jax.enable_x64(True):
        value = jnp.asarray((np.arange(count) % 5).astype(np.float32).astype(dtype))
        tree = {"x": value, "none": value[:0], "one": value[3]}
        checkpoint.save(tmp_path / "c", tree, iteration=0)
        back = checkpoint.load(tmp_path / "c", tree)
    for leaf, was in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert (leaf.dtype, leaf.shape, leaf.tobytes()) == (was.dtype, was.shape, was.tobytes())


@pytest.mark.parametrize("impl", KEY_IMPLS)
def test_keys_of_every_generator_are_loaded(tmp_path, impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 2)
    checkpoint.save(tmp_path / "c", {"key": keys}, iteration=0)
    (back,) = checkpoint.load(tmp_path / "c", {"key": keys}).values()
    assert back.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"views": {"['x']": "object"}}, "`['x']` has the type `object`, which is not known"),
        ({"views": {"['x']": "float64"}}, "`['x']` has the type `float64`, which does not match its bytes"),
        ({"keys": {"['x']": "mine"}}, "`['x']` has random keys of the generator `mine`, which is not known"),
    ],
)
def test_a_type_that_is_unknown_or_does_not_match_its_bytes_is_refused(tmp_path, header, why):
    """The names of types in a checkpoint are looked up in a table. They are never evaluated as code."""
    facts = {"iteration": 0, "keys": {}, "views": {}} | header
    arrays = {"['x']": np.zeros(3, np.uint8)}
    (tmp_path / "c").write_bytes(safetensors.numpy.save(arrays, {checkpoint.FORMAT: json.dumps(facts)}))
    with pytest.raises(RunError, match=re.escape(why)):
        checkpoint.load(tmp_path / "c", {"x": jnp.zeros(3, jnp.uint8)})


def test_an_array_of_an_unknown_type_is_not_saved(tmp_path):
    with pytest.raises(RunError, match=re.escape("`['x']` is datetime64[s][2], which a checkpoint cannot hold")):
        checkpoint.save(tmp_path / "c", {"x": np.zeros(2, "M8[s]")}, iteration=0)


def test_numpy_arrays_that_are_not_contiguous_are_saved_correctly(tmp_path):
    strided = np.arange(12.0, dtype=np.float32).reshape(3, 4)[:, ::2]
    checkpoint.save(tmp_path / "c", {"x": strided}, iteration=0)
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "c", {"x": strided})["x"], strided)


def test_load_takes_leaves_that_are_not_arrays_from_its_second_argument(tmp_path):
    network = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    other = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(1))
    checkpoint.save(tmp_path / "c", network, iteration=0)
    back = checkpoint.load(tmp_path / "c", other)
    obs = jnp.array([1.0, 2.0])
    np.testing.assert_array_equal(back(obs), network(obs))


@pytest.mark.parametrize(
    ("like", "why"),
    [
        ({"a": np.zeros(3, np.float32), "b": np.zeros(1)}, "it has no `['b']`"),
        ({"a": np.zeros(4, np.float32)}, "`['a']` is float32[3] in the file and float32[4] in the algorithm"),
        ({"a": np.zeros(3, np.int32)}, "`['a']` is float32[3] in the file and int32[3] in the algorithm"),
        ({}, "the algorithm has no `['a']`"),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_algorithm_is_refused(tmp_path, like, why):
    checkpoint.save(tmp_path / "c", {"a": np.zeros(3, np.float32)}, iteration=0)
    with pytest.raises(RunError, match=re.escape(f"does not fit the algorithm: {why}.")):
        checkpoint.load(tmp_path / "c", like)


def test_files_that_are_not_checkpoints_are_refused(tmp_path):
    with pytest.raises(RunError, match="There is no checkpoint at .*gone"):
        checkpoint.iteration(tmp_path / "gone")
    checkpoint.save(tmp_path / "truncated", {"a": np.zeros(100)}, iteration=0)
    (tmp_path / "truncated").write_bytes((tmp_path / "truncated").read_bytes()[:-5])
    with pytest.raises(RunError, match="truncated is damaged: "):
        checkpoint.iteration(tmp_path / "truncated")
    safetensors.numpy.save_file({"a": np.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(RunError, match="not a Choreo checkpoint"):
        checkpoint.iteration(tmp_path / "foreign")


@contextlib.contextmanager
def full_disk_after(size_bytes):
    """In the `with` block, a write that would make a file larger than `size_bytes` fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "c"
    large = {"a": np.zeros(100_000, np.float32)}
    with full_disk_after(50_000), pytest.raises(RunError) as failure:
        checkpoint.save(path, large, iteration=1)
    assert str(failure.value) == (
        f"The checkpoint {path} cannot be written: File too large.\nMake room on the disk, and train again."
    )
    assert not list(tmp_path.iterdir())
    checkpoint.save(path, {"a": np.zeros(3, np.float32)}, iteration=1)
    with full_disk_after(50_000), pytest.raises(RunError) as failure:
        checkpoint.save(path, large, iteration=2)
    assert failure.value.fix == (
        f"The older checkpoint is unchanged. Make room on the disk, and continue: choreo resume {tmp_path}"
    )
    assert checkpoint.iteration(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_elements_are_written_and_dropped_as_they_arrive(tmp_path):
    """Writing a checkpoint keeps only one array of the stream in memory at a time."""
    alive, most = weakref.WeakSet(), 0

    def stream(which):
        nonlocal most
        for i in which:
            for half in range(2):
                array = np.full(500, 10 * i + half, np.float32).view(Counted)
                alive.add(array)
                most = max(most, len(alive))
                yield array
                del array

    form = {name: jax.ShapeDtypeStruct((1000,), np.float32) for name in "abcde"}
    checkpoint.save_stream(tmp_path / "c", form, stream, iteration=1)
    assert most == 1
    assert [checkpoint.load(tmp_path / "c", form)["e"][i] for i in (0, 999)] == [40, 41]


class Counted(np.ndarray):
    """An array that a `WeakSet` can hold: it has a hash and allows weak references."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]
    __eq__ = object.__eq__  # pyright: ignore[reportAssignmentType]


def test_one_part_of_a_checkpoint_is_loaded_and_the_types_of_the_rest_are_checked(tmp_path, carry):
    checkpoint.save(tmp_path / "c", carry, iteration=1)
    form = jax.eval_shape(lambda: carry)
    flags = checkpoint.load(tmp_path / "c", form, part="flags")
    assert jax.tree.structure(flags) == jax.tree.structure(carry.flags)
    assert all(flags[name].tobytes() == leaf.tobytes() for name, leaf in carry.flags.items())
    assert checkpoint.load(tmp_path / "c", form, part="weights").tobytes() == carry.weights.tobytes()
    for wrong, why in [
        (form._replace(weights=jax.ShapeDtypeStruct((3, 3), np.float32)), "`.weights` is float32[3, 2] in the file"),
        (form._replace(key=jax.ShapeDtypeStruct((4,), np.uint32)), "`.key` is key<fry>[4] in the file and uint32[4]"),
        (form._replace(key=None), "the algorithm has no `.key`"),
        (form._replace(weights={"w": form.weights}), "it has no `.weights['w']`"),
    ]:
        with pytest.raises(RunError, match=re.escape(why)):
            checkpoint.load(tmp_path / "c", wrong, part="flags")
    with pytest.raises(UnknownNameError, match="There is no part of the carry `train`"):
        checkpoint.load(tmp_path / "c", form, part="train")


HOST = HostStates(
    objects={0: [{"x": np.arange(3, dtype=np.int8)}, {"x": jnp.ones(2, jnp.bfloat16).__array__()}], 2: [2**100, None]},
    lost=("`Robot` has no state.",),
)


def test_states_of_python_objects_are_stored_beside_the_carry(tmp_path, carry):
    for iteration, host in enumerate((None, HOST, HostStates(objects={}))):
        checkpoint.save_stream(tmp_path / "c", {}, lambda _: iter(()), iteration=iteration, host=host)
        back = checkpoint.load_host_states(tmp_path / "c")
        if host is None:
            assert back is None
            continue
        assert back is not None and back.lost == host.lost
        (tree, arrays), (expected, expected_arrays) = (
            encode([[n, list(each)] for n, each in h.objects.items()], "x") for h in (back, host)
        )
        assert tree == expected
        assert [(a.dtype, a.tobytes()) for a in arrays] == [(a.dtype, a.tobytes()) for a in expected_arrays]
        assert checkpoint.load(tmp_path / "c", {}) == {} and checkpoint.iteration(tmp_path / "c") == iteration


@pytest.mark.parametrize(
    "text",
    [
        b"{", b"[]", b'{"objects": {}}', b'{"objects": {"x": []}, "lost": []}', b'{"objects": {"0": 3}, "lost": []}',
        b'{"objects": {"0": [{"$array": 0}]}, "lost": []}', b'{"objects": {}, "lost": null}',
    ],
)  # fmt: skip
def test_stored_states_of_the_wrong_form_are_refused(tmp_path, text):
    facts = {checkpoint.FORMAT: json.dumps({"iteration": 0, "keys": {}, "views": {}})}
    (tmp_path / "c").write_bytes(safetensors.numpy.save({"$host": np.frombuffer(text, np.uint8)}, facts))
    with pytest.raises(RunError, match="c is damaged: "):
        checkpoint.load_host_states(tmp_path / "c")


def test_the_hash_depends_on_every_bit_of_the_arrays_and_on_nothing_else():
    tree = {"a": np.zeros(3, np.float32), "f": jnp.tanh}
    same = {"a": jnp.zeros(3), "f": jnp.sin}
    changed = {"a": np.array([0, -0.0, 0], np.float32), "f": jnp.tanh}
    assert checkpoint.sha256(tree) == checkpoint.sha256(same)
    assert checkpoint.sha256(tree) != checkpoint.sha256(changed)
    # An independent reference: the hash of the 12 bytes of `a`.
    assert checkpoint.sha256(tree) == hashlib.sha256(bytes(12)).hexdigest()


@pytest.mark.parametrize(
    "header",
    [
        "null", "[]", "{", "[" * 5000, '{"iteration": "3", "keys": {}, "views": {}}', '{"iteration": 3, "keys": {}}',
        '{"iteration": -1, "keys": {}, "views": {}}', '{"iteration": 3, "keys": [], "views": {}}',
        '{"iteration": 3, "keys": {"x": 7}, "views": {}}',
    ],
)  # fmt: skip
def test_a_header_of_the_wrong_form_is_refused(tmp_path, header):
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(safetensors.numpy.save({"x": np.zeros(2, np.float32)}, {checkpoint.FORMAT: header}))
    with pytest.raises(RunError, match="its header is not that of a checkpoint"):
        checkpoint.load(file, {"x": jax.ShapeDtypeStruct((2,), np.float32)})


def test_an_array_whose_bytes_cannot_be_random_keys_is_refused_as_keys(tmp_path):
    file = tmp_path / "checkpoint.safetensors"
    header = json.dumps({"iteration": 0, "keys": {"['x']": "threefry2x32"}, "views": {}})
    file.write_bytes(safetensors.numpy.save({"['x']": np.zeros(3, np.float32)}, {checkpoint.FORMAT: header}))
    with pytest.raises(RunError, match="do not match its bytes"):
        checkpoint.load(file, {"x": jax.ShapeDtypeStruct((3,), np.float32)})


@pytest.mark.parametrize(
    ("kind", "shape"), [("BF16", [1]), ("F8_E4M3", [1]), ("F4", [2]), ("F32", [2**62, 0]), ("F32", [0] * 70)]
)
def test_types_and_shapes_that_no_checkpoint_has_are_refused(tmp_path, kind, shape):
    sizes = {"BF16": 2, "F8_E4M3": 1, "F4": 1, "F32": 0}
    facts = json.dumps({"iteration": 0, "keys": {}, "views": {}})
    header = {
        "__metadata__": {checkpoint.FORMAT: facts},
        "x": {"dtype": kind, "shape": shape, "data_offsets": [0, sizes[kind]]},
    }
    text = json.dumps(header).encode()
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(sizes[kind]))
    with pytest.raises(RunError, match="is damaged: "):
        checkpoint.load(file, {})
