"""Save a pytree as one safetensors file, and load it: every array is stored under its path. Pickle is never used.

    Carry(train=Train(params, half), key)     ->   ".train.params.weight"  float32[64, 4]
                                                   ".key"                  uint32[2], and its generator in the header
                                                   ".train.half"           uint8[64, 4, 2], and "bfloat16" in the header

The file is replaced atomically, so after a crash the old file or the new one is there. Leaves that are not arrays (an
activation function) are not stored; `load` takes them from the structure that it is given.
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
STORED_DIRECTLY = frozenset("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split())
"""Types that `safetensors.numpy` can store. Other arrays are stored as bytes, and the header has the names of their types."""


def save(path: Path, tree: PyTree, *, iteration: int) -> None:
    """Write `tree`, the state after `iteration` iterations; replaces an older file atomically."""
    arrays, kinds, views = {}, {}, {}
    for name, leaf in _named(tree):
        if _is_key(leaf):
            kinds[name] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        if is_array(leaf):
            array = np.ascontiguousarray(leaf).reshape(np.shape(leaf))  # safetensors writes strided data wrongly
            kind = _type_name(name, array)
            if kind not in STORED_DIRECTLY:
                views[name], array = kind, _as_bytes(array)
            arrays[name] = array
    # One entry only: safetensors writes several entries in random order, but the same tree must give the same bytes.
    header = {FORMAT: json.dumps({"iteration": iteration, "keys": kinds, "views": views}, sort_keys=True)}
    write_atomic(path, safetensors.numpy.save(arrays, header))


def load(path: Path, like: PyTree) -> PyTree:
    """Read a checkpoint into the structure of `like`, whose leaves are arrays or `ShapeDtypeStruct`s.

    Raises RunError if a leaf is missing or unknown, or if its shape or type differs.
    """
    header = read_header(path)
    with damage_reported(path):
        arrays = safetensors.numpy.load(path.read_bytes())
    leaves, unused = [], set(arrays)
    for name, leaf in _named(like):
        if name not in arrays:
            if hasattr(leaf, "dtype"):
                raise _does_not_fit(path, f"it has no `{name}`")
            leaves.append(leaf)  # not an array, so not stored
            continue
        unused.discard(name)
        value = decode(path, header, name, arrays[name])
        if hasattr(leaf, "dtype") and (value.shape != leaf.shape or value.dtype != leaf.dtype):
            raise _does_not_fit(
                path, f"`{name}` is {_type_of(value)} in the file and {_type_of(leaf)} in the algorithm"
            )
        leaves.append(typed_as(value, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else value)
    if unused:
        raise _does_not_fit(path, f"the algorithm has no `{min(unused)}`")
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_header(path: Path) -> dict[str, Any]:
    """Read the header: `iteration`, the generator of each random key (`keys`), the type of each array stored as bytes (`views`)."""
    if not path.is_file():
        raise RunError(
            f"There is no checkpoint at {path}.",
            fix="The run ended before its first checkpoint; train again, with a smaller checkpoint_every.",
        )
    with damage_reported(path), safetensors.safe_open(path, framework="numpy") as file:
        header = file.metadata() or {}
    if FORMAT not in header:
        raise RunError(f"{path} is a safetensors file, but not a Choreo checkpoint.", fix="Name a run folder.")
    facts: Any = None
    with contextlib.suppress(ValueError, RecursionError):  # `_is_header` refuses None
        facts = json.loads(header[FORMAT])
    if not _is_header(facts):
        raise RunError(f"{path} is damaged: its header is not that of a checkpoint.", fix="Restore it from a copy.")
    return facts


@contextlib.contextmanager
def damage_reported(path: Path) -> Iterator[None]:
    """Raise RunError in place of the many errors of safetensors about a damaged or malicious file."""
    try:
        yield
    except (safetensors.SafetensorError, KeyError, AttributeError, TypeError, ValueError, OSError) as error:
        raise RunError(f"{path} is damaged: {error}.", fix="Restore it from a copy.") from error


def _is_header(facts: Any) -> bool:
    if not isinstance(facts, dict) or set(facts) != {"iteration", "keys", "views"}:
        return False
    count, kinds = facts["iteration"], (facts["keys"], facts["views"])
    texts = all(isinstance(kind, dict) and all(isinstance(name, str) for name in kind.values()) for kind in kinds)
    return isinstance(count, int) and not isinstance(count, bool) and count >= 0 and texts


def decode(path: Path, header: dict[str, Any], name: str, array: np.ndarray) -> jax.Array:
    """The leaf `name` of a checkpoint, from the array that is stored for it."""
    if name in header["views"]:
        array = _from_bytes(path, name, array, header["views"][name])
    value = jnp.asarray(array)
    return _as_keys(path, name, value, header["keys"][name]) if name in header["keys"] else value


def iteration(path: Path) -> int:
    """The number of iterations that had been run when the checkpoint was written."""
    return read_header(path)["iteration"]


def sha256(tree: PyTree) -> str:
    """SHA-256 over the bytes of all arrays of a pytree, in the order of its leaves."""
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
            f"`{name}` is {_type_of(array)}, which a checkpoint cannot hold.",
            fix=f"Use one of {', '.join(sorted(NAMES))}.",
        ) from error


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """The same memory as bytes; the new last axis has the bytes of one element."""
    return array.reshape(*array.shape, 1).view(np.uint8)


def _from_bytes(path: Path, name: str, array: np.ndarray, kind: str) -> np.ndarray:
    """The inverse of `_as_bytes`. The name of the type comes from the file: it is looked up in a table, never evaluated."""
    if kind not in NAMES:
        raise _does_not_fit(path, f"`{name}` has the type `{kind}`, which is not known")
    dtype = dtype_named(kind)
    if array.dtype != np.uint8 or array.shape[-1:] != (dtype.itemsize,):
        raise _does_not_fit(path, f"`{name}` has the type `{kind}`, which does not match its bytes")
    return array.view(dtype)[..., 0]


def _as_keys(path: Path, name: str, value: jax.Array, impl: str) -> jax.Array:
    if impl not in KEY_IMPLS:
        raise _does_not_fit(path, f"`{name}` has random keys of the generator `{impl}`, which is not known")
    try:
        return jax.random.wrap_key_data(value, impl=impl)
    except (TypeError, ValueError) as error:
        raise _does_not_fit(
            path, f"`{name}` has random keys of the generator `{impl}`, which do not match its bytes"
        ) from error


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _type_of(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _does_not_fit(path: Path, why: str) -> RunError:
    return RunError(
        f"{path} does not fit the algorithm: {why}.",
        fix="Use the algorithm, hyper-parameters and number of environments of the run; its run.toml has them.",
    )
