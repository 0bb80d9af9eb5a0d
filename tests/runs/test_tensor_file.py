"""`tensor_file.write` writes the same bytes as the library safetensors."""

import io

import numpy as np
import pytest
import safetensors.numpy

from choreo.runs import tensor_file
from choreo.runs.tensor_file import CODES, StoredArray, in_file_order


def written(arrays, metadata):
    stored = in_file_order(
        StoredArray(name=name, kind=array.dtype.name, shape=array.shape) for name, array in arrays.items()
    )
    file = io.BytesIO()
    tensor_file.write(file, stored, metadata, iter([arrays[each.name] for each in stored]))
    return file.getvalue()


def test_the_bytes_are_those_of_the_library():
    shapes = {"b": (3, 5), "a": (), "['ü'].x": (0, 2), 'with "quotes"\n': (1,), ".train.w[0]": (7,)}
    arrays = {
        f"{name}{kind}": np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2, kind)
        for name, shape in shapes.items()
        for kind in CODES
    }
    metadata = {"choreo-1": '{"iteration": 3, "name": "ä"}'}
    assert written(arrays, metadata) == safetensors.numpy.save(arrays, metadata)
    assert written({}, metadata) == safetensors.numpy.save({}, metadata)


def test_a_stream_may_divide_arrays_and_leave_out_empty_ones():
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.ones(0, np.float32), "c": np.array(True)}
    stored = in_file_order(StoredArray(name=name, kind=x.dtype.name, shape=x.shape) for name, x in arrays.items())
    for stream in (["a0", "a1", "b", "c"], ["b", "a0", "a1", "c", "b"], ["a0", "a1", "c"]):
        parts = {"a0": arrays["a"][0, :2], "a1": np.array([2, 3, 4, 5], np.int32), "b": arrays["b"], "c": arrays["c"]}
        file = io.BytesIO()
        tensor_file.write(file, stored, {}, iter([parts[name] for name in stream]))
        assert file.getvalue() == safetensors.numpy.save(arrays, {})


@pytest.mark.parametrize("kind", ["float32", "int64", "uint16"])
def test_arrays_in_any_layout_of_memory_are_written_in_order(kind):
    plain = np.arange(24).reshape(2, 3, 4).astype(kind)
    odd = {
        "strided": plain[:, :, ::2],
        "transposed": plain.T,
        "big-endian": plain.astype(plain.dtype.newbyteorder(">")),
    }
    back = safetensors.numpy.load(written(odd, {}))
    for name, array in odd.items():
        np.testing.assert_array_equal(back[name], array)


def test_an_array_that_differs_from_the_header_is_not_written():
    stored = [StoredArray(name="a", kind="float32", shape=(3,))]
    for wrong in (np.zeros(4, np.float32), np.zeros(3, np.int32)):
        with pytest.raises(AssertionError):
            tensor_file.write(io.BytesIO(), stored, {}, iter([wrong]))
