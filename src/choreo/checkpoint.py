"""A pytree as one safetensors file: every array under its path, typed keys as their data. Never pickle.

    Carry(train=Train(params=...), key=...)   ->   ".train.params.weight"  float32[64, 4]
                                                   ".key"                  uint32[2], and its kind in the header

The file at its final name is always whole: it is written beside, flushed to the disk, and renamed. Leaves that are no
arrays (an activation function) are not stored; they come from the structure that `load` is given.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from choreo.errors import RunError
from choreo.partition.carry import typed_as
from choreo.roles import is_array
from choreo.types import PyTree

FORMAT = "choreo-1"


def save(path: Path, tree: PyTree, *, iteration: int) -> None:
    """Write `tree` as it is after `iteration` iterations; replaces an older file in one step."""
    arrays, kinds, views = {}, {}, {}
    for name, leaf in _named(tree):
        if _is_key(leaf):
            kinds[name] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        if is_array(leaf):
            array = np.ascontiguousarray(leaf).reshape(np.shape(leaf))  # safetensors writes strided data wrongly
            if array.dtype.kind == "V":  # bfloat16 and its kind: safetensors' NumPy side writes, but does not read them
                views[name], array = array.dtype.name, array.view(f"u{array.itemsize}")
            arrays[name] = array
    # One entry, since safetensors writes several in no particular order: the same tree gives the same bytes.
    header = {FORMAT: json.dumps({"iteration": iteration, "keys": kinds, "views": views}, sort_keys=True)}
    write_atomic(path, safetensors.numpy.save(arrays, header))


def load(path: Path, like: PyTree) -> PyTree:
    """Read back what `save` wrote, in the structure of `like` (arrays or `ShapeDtypeStruct`s)."""
    header = read_header(path)
    kinds, views = header["keys"], header["views"]
    arrays = safetensors.numpy.load(path.read_bytes())
    leaves, unused = [], set(arrays)
    for name, leaf in _named(like):
        if name not in arrays:
            if hasattr(leaf, "dtype"):
                raise _unfit(path, f"it has no `{name}`")
            leaves.append(leaf)  # no array, so not in the file
            continue
        unused.discard(name)
        value = jnp.asarray(arrays[name].view(views[name]) if name in views else arrays[name])
        if name in kinds:
            value = jax.random.wrap_key_data(value, impl=kinds[name])
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
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise RunError(f"{path} is not a whole checkpoint ({error}).", fix="Restore it from a copy.") from error
    if FORMAT not in header:
        raise RunError(f"{path} is a safetensors file, but no checkpoint of Choreo.", fix="Name a run folder.")
    return json.loads(header[FORMAT])


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


def write_atomic(path: Path, data: bytes) -> None:
    """Whoever opens `path` finds all of the old content or all of the new."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _named(tree: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path), leaf


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _form(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _unfit(path: Path, why: str) -> RunError:
    return RunError(
        f"{path} does not fit the algorithm: {why}.",
        fix="Use the algorithm, hyper-parameters and number of environments it was trained with (see run.toml).",
    )
