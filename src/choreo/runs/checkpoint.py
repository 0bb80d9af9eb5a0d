"""A pytree as one safetensors file: every array under its path, typed keys as their data. Never pickle.

    Carry(train=Train(params=...), key=...)   ->   ".train.params.weight"  float32[64, 4]
                                                   ".key"                  uint32[2], and its kind in the header
                                                   ".train.half"           uint8[64, 8], and "bfloat16" in the header

The file at its final name is always whole: it is written beside, flushed to the disk, and renamed. Leaves that are no
arrays (an activation function) are not stored; they come from the structure that `load` is given.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from choreo.dtypes import KEY_IMPLS, NAMES, dtype_named, name_of
from choreo.errors import RunError
from choreo.partition.carry import typed_as
from choreo.runs.safe_files import write_atomic
from choreo.static_key import is_array
from choreo.types import PyTree

FORMAT = "choreo-1"
AS_THEY_ARE = frozenset("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split())
"""Types that safetensors writes and reads. All others are stored as bytes, with the name of their type in the header."""


def save(path: Path, tree: PyTree, *, iteration: int) -> None:
    """Write `tree` as it is after `iteration` iterations; replaces an older file in one step."""
    arrays, kinds, views = {}, {}, {}
    for name, leaf in _named(tree):
        if _is_key(leaf):
            kinds[name] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        if is_array(leaf):
            array = np.ascontiguousarray(leaf).reshape(np.shape(leaf))  # safetensors writes strided data wrongly
            kind = _type_name(name, array)
            if kind not in AS_THEY_ARE:
                views[name], array = kind, _as_bytes(array)
            arrays[name] = array
    # One entry, since safetensors writes several in no particular order: the same tree gives the same bytes.
    header = {FORMAT: json.dumps({"iteration": iteration, "keys": kinds, "views": views}, sort_keys=True)}
    write_atomic(path, safetensors.numpy.save(arrays, header))


def load(path: Path, like: PyTree) -> PyTree:
    """Read back what `save` wrote, in the structure of `like` (arrays or `ShapeDtypeStruct`s)."""
    header = read_header(path)
    with whole(path):
        arrays = safetensors.numpy.load(path.read_bytes())
    leaves, unused = [], set(arrays)
    for name, leaf in _named(like):
        if name not in arrays:
            if hasattr(leaf, "dtype"):
                raise _unfit(path, f"it has no `{name}`")
            leaves.append(leaf)  # no array, so not in the file
            continue
        unused.discard(name)
        value = decode(path, header, name, arrays[name])
        if hasattr(leaf, "dtype") and (value.shape != leaf.shape or value.dtype != leaf.dtype):
            raise _unfit(path, f"`{name}` is {_form(value)} there and {_form(leaf)} here")
        leaves.append(typed_as(value, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else value)
    if unused:
        raise _unfit(path, f"`{min(unused)}` is unknown here")
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_header(path: Path) -> dict[str, Any]:
    """The few facts stored beside the arrays: `iteration`, and what the arrays do not say themselves."""
    if not path.is_file():
        raise RunError(
            f"There is no checkpoint at {path}.",
            fix="The run ended before its first; train again, with a smaller checkpoint_every.",
        )
    with whole(path), safetensors.safe_open(path, framework="numpy") as file:
        header = file.metadata() or {}
    if FORMAT not in header:
        raise RunError(f"{path} is a safetensors file, but no checkpoint of Choreo.", fix="Name a run folder.")
    facts: Any = None
    with contextlib.suppress(ValueError, RecursionError):  # refused below
        facts = json.loads(header[FORMAT])
    if not _is_header(facts):
        raise RunError(f"{path} is not a whole checkpoint (its header makes no sense).", fix="Restore it from a copy.")
    return facts


@contextlib.contextmanager
def whole(path: Path) -> Iterator[None]:
    """Whatever safetensors raises about a file that is none, or that has types and shapes no checkpoint has."""
    try:
        yield
    except (safetensors.SafetensorError, KeyError, AttributeError, TypeError, ValueError, OSError) as error:
        raise RunError(f"{path} is not a whole checkpoint ({error}).", fix="Restore it from a copy.") from error


def _is_header(facts: Any) -> bool:
    if not isinstance(facts, dict) or set(facts) != {"iteration", "keys", "views"}:
        return False
    count, kinds = facts["iteration"], (facts["keys"], facts["views"])
    texts = all(isinstance(kind, dict) and all(isinstance(name, str) for name in kind.values()) for kind in kinds)
    return isinstance(count, int) and not isinstance(count, bool) and count >= 0 and texts


def decode(path: Path, header: dict[str, Any], name: str, array: np.ndarray) -> jax.Array:
    """The leaf of this name, from what the file at `path` holds in its place."""
    if name in header["views"]:
        array = _viewed(path, name, array, header["views"][name])
    value = jnp.asarray(array)
    return _as_keys(path, name, value, header["keys"][name]) if name in header["keys"] else value


def iteration(path: Path) -> int:
    """How many iterations had been run when the checkpoint was written."""
    return read_header(path)["iteration"]


def sha256(tree: PyTree) -> str:
    """SHA-256 over the bytes of all arrays of a pytree, in its order."""
    digest = hashlib.sha256()
    for _, leaf in _named(tree):
        leaf = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        if is_array(leaf):
            digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _named(tree: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path), leaf


def _type_name(name: str, array: np.ndarray) -> str:
    try:
        return name_of(array.dtype)
    except KeyError as error:
        raise RunError(
            f"`{name}` is {_form(array)}, which a checkpoint cannot hold.",
            fix=f"Use one of {', '.join(sorted(NAMES))}.",
        ) from error


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """The same memory, with an axis of bytes at the end."""
    return array.reshape(*array.shape, 1).view(np.uint8)


def _viewed(path: Path, name: str, array: np.ndarray, kind: str) -> np.ndarray:
    """What `_as_bytes` was given. The file's word for the type is looked up in a closed table, never evaluated."""
    if kind not in NAMES:
        raise _unfit(path, f"`{name}` is of a type `{kind}`, which no checkpoint has")
    dtype = dtype_named(kind)
    if array.dtype != np.uint8 or array.shape[-1:] != (dtype.itemsize,):
        raise _unfit(path, f"`{name}` is of a type `{kind}`, which does not fit its bytes")
    return array.view(dtype)[..., 0]


def _as_keys(path: Path, name: str, value: jax.Array, impl: str) -> jax.Array:
    if impl not in KEY_IMPLS:
        raise _unfit(path, f"`{name}` are random keys of a generator `{impl}`, which no checkpoint has")
    try:
        return jax.random.wrap_key_data(value, impl=impl)
    except (TypeError, ValueError) as error:
        raise _unfit(path, f"`{name}` are random keys of a generator `{impl}`, which does not fit its bytes") from error


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _form(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _unfit(path: Path, why: str) -> RunError:
    return RunError(
        f"{path} does not fit the algorithm: {why}.",
        fix="Use the algorithm, hyper-parameters and number of environments it was trained with (see run.toml).",
    )
