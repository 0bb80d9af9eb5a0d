"""Formatting as text: sizes, types, tables, wrapped lines."""

import jax
import numpy as np
import pytest

from choreo.graph.text import WIDTH, format_bytes, format_type, table, wrap


@pytest.mark.parametrize(
    "number, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (36_613, "36.6 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (2.5e9, "2.5 GB"),
    ],
)
def test_sizes_have_at_most_three_digits_and_a_unit(number, text):
    assert format_bytes(int(number)) == text


@pytest.mark.parametrize(
    "dtype, text",
    [("float32", "f32[2,3]"), ("int8", "i8[2,3]"), ("uint32", "u32[2,3]"), ("bool", "bool[2,3]"),
     ("bfloat16", "bf16[2,3]"), ("complex64", "c64[2,3]")],
)  # fmt: skip
def test_types_are_written_as_jax_does(dtype, text):
    aval = jax.ShapeDtypeStruct((2, 3), jax.numpy.dtype(dtype))
    assert format_type(aval) == text == jax.core.ShapedArray(aval.shape, aval.dtype).str_short(short_dtypes=True)


def test_random_keys_have_the_type_key():
    assert format_type(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))) == "key[4]"


def test_table_wraps_the_flexible_column():
    lines = table(["a", "what"], [["1", "word " * 40]], align="<<", flexible=1)
    assert max(map(len, lines)) <= WIDTH and " ".join(lines).count("word") == 40


def test_wrap_loses_no_word():
    words = [str(n) for n in np.arange(300)]
    assert " ".join(wrap(" ".join(words), 30)).split() == words
