"""Save a pytree as one safetensors file, and load it: every array is stored under its path. Pickle is never used.

    Carry(train=Train(params, half), key)     ->   ".train.params.weight"  float32[64, 4]
                                                   ".key"                  uint32[2], and its generator in the header
                                                   ".train.half"           uint8[64, 4, 2], and "bfloat16" in the header

Arrays are written as they arrive, and read one after the other: a replay can be larger than half of the memory, and then a
second copy would not fit. The file is replaced atomically, so after a crash there is either the old file or the new file.

Leaves that are not arrays (an activation function) are not stored; `load` takes them from the structure that it is given.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from choreo._compat import is_key, key_impl
from choreo.dtypes import KEY_IMPLS, NAMES, dtype_named, name_of
from choreo.errors import RunError
from choreo.host.states import HostStates
from choreo.host.states import decode as decode_states
from choreo.host.states import encode as encode_states
from choreo.partition.carry import is_type, typed_as
from choreo.plans.carry_part import part_of
from choreo.plans.export import array_type
from choreo.runs import tensor_file
from choreo.runs.safe_files import replacing
from choreo.runs.tensor_file import CODES, StoredArray, in_file_order
from choreo.runtime.engine.backend import host_type
from choreo.static_key import is_array
from choreo.types import PyTree

FORMAT = "choreo-1"
HOST = "$host"
"""The names of the arrays that hold states of Python objects begin with this text. No path in a carry begins with it."""


def save(path: Path, tree: PyTree, *, iteration: int) -> None:
    """Write `tree`, the state after `iteration` iterations. An older file is replaced atomically."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    save_stream(path, tree, lambda which: (_to_host(arrays[i]) for i in which), iteration=iteration)


def save_stream(
    path: Path,
    form: PyTree,
    stream: Callable[[Sequence[int]], Iterator[np.ndarray]],
    *,
    iteration: int,
    host: HostStates | None = None,
) -> None:
    """Write a carry of this form. Its arrays need not fit into memory. An older file is replaced atomically.

    `stream` (`Runtime.stream`) takes the positions of arrays among all arrays of the carry, and gives the elements of these
    arrays, one after the other. `host`: the states of Python objects, which `load_host_states` reads again. Raises
    RunError if the file cannot be written; the older file then stays as it was.
    """
    kinds, views = {}, {}
    places: dict[StoredArray, int] = {}
    for name, leaf in _named(form):
        if not (is_array(leaf) or is_type(leaf)):
            continue
        if is_key(leaf.dtype):
            kinds[name] = key_impl(leaf.dtype)
        stored = _stored(name, leaf)
        if stored.kind not in CODES:
            views[name] = stored.kind
        places[stored] = len(places)
    arrays = in_file_order(places)
    held = {} if host is None else _as_arrays(host)
    for name, array in held.items():
        stored = _stored(name, array)
        if stored.kind not in CODES:
            views[name] = stored.kind
    # One entry with all facts, because the library safetensors writes several entries in random order. With one entry, the same
    # tree gives the same bytes, and `tensor_file` writes the same bytes as the library.
    header = {FORMAT: json.dumps({"iteration": iteration, "keys": kinds, "views": views}, sort_keys=True)}
    with _failure_reported(path), replacing(path) as file:
        elements = itertools.chain(stream([places[array] for array in arrays]), held.values())
        tensor_file.write(file, [*arrays, *itertools.starmap(_stored, held.items())], header, elements)


def load(path: Path, like: PyTree, *, part: str | None = None) -> PyTree:
    """Read a checkpoint into the structure of `like`, whose leaves are arrays or `ShapeDtypeStruct`s.

    With `part`, such as "train", the result is only this part of the carry. Of the arrays outside of this part, only the types
    are read. Arrays are read one after the other. Raises RunError if a leaf is missing or unknown, or if its shape or type differs.
    """
    header = read_header(path)
    subtree, places = (like, range(len(jax.tree.leaves(like)))) if part is None else part_of(like, part)
    leaves = []
    with _opened(path) as file:
        names = {name for name in file.keys() if not name.startswith(HOST)}
        for i, (name, leaf) in enumerate(_named(like)):
            value = leaf  # not an array, so not stored
            if name in names:
                names.remove(name)
                value = _read(path, file, header, name, leaf, skip=i not in places)
            elif hasattr(leaf, "dtype"):
                raise _does_not_fit(path, f"it has no `{name}`")
            if i in places:
                leaves.append(value)
        for name in sorted(names):
            _get(path, file, name)  # if this array cannot be read, the error must say that the file is damaged
            raise _does_not_fit(path, f"the algorithm has no `{name}`")
    return jax.tree.unflatten(jax.tree.structure(subtree), leaves)


def load_host_states(path: Path) -> HostStates | None:
    """The states of Python objects in a checkpoint; None if the checkpoint has none."""
    header = read_header(path)
    with _opened(path) as file:
        held = {name: _get(path, file, name) for name in file.keys() if name.startswith(HOST)}
    for name in header["views"].keys() & held.keys():
        held[name] = _from_bytes(path, name, held[name], header["views"][name])
    if HOST not in held:
        return None
    with damage_reported(path):
        text = json.loads(held.pop(HOST).tobytes())
        arrays = [held[f"{HOST}[{i}]"] for i in range(len(held))]
        objects = {int(number): _list(decode_states(states, arrays)) for number, states in text["objects"].items()}
        return HostStates(objects=objects, lost=tuple(map(str, _list(text["lost"]))))


def _as_arrays(host: HostStates) -> dict[str, np.ndarray]:
    """States as named arrays. The array HOST has the states as JSON, in which a number stands for each of the other arrays."""
    tree, arrays = encode_states({str(number): list(states) for number, states in host.objects.items()}, "an object")
    text = json.dumps({"objects": tree, "lost": list(host.lost)})
    return {HOST: np.frombuffer(text.encode(), np.uint8)} | {f"{HOST}[{i}]": array for i, array in enumerate(arrays)}


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError(f"a {type(data).__name__} is in place of a list")
    return data


def _read(path: Path, file: Any, header: dict[str, Any], name: str, like: Any, *, skip: bool) -> Any:
    """The leaf `name` of a checkpoint, which must have the type of `like`.

    With `skip`, the leaf is not read if the header of the file already shows this type; the result is then None.
    """
    if skip and hasattr(like, "dtype") and _has_type(path, file, header, name, like):
        return None
    value = decode(path, header, name, _get(path, file, name))
    if hasattr(like, "dtype") and (value.shape != like.shape or value.dtype != like.dtype):
        raise _does_not_fit(path, f"`{name}` is {_type_of(value)} in the file and {_type_of(like)} in the algorithm")
    return typed_as(value, like) if is_type(like) else value


def _has_type(path: Path, file: Any, header: dict[str, Any], name: str, like: Any) -> bool:
    """Whether, according to the file, the array `name` is a leaf with the type and shape of `like`."""
    stored = _stored(name, like)
    with damage_reported(path):
        found = file.get_slice(name)
        type_and_shape = found.get_dtype(), tuple(found.get_shape())
    impl = key_impl(like.dtype) if is_key(like.dtype) else None
    kinds = header["views"].get(name, stored.dtype), header["keys"].get(name)
    return type_and_shape == (CODES[stored.dtype], stored.file_shape) and kinds == (stored.kind, impl)


def _get(path: Path, file: Any, name: str) -> np.ndarray:
    with damage_reported(path):
        array = file.get_tensor(name)
        if array.dtype.name not in CODES:
            raise TypeError(f"`{name}` is {_type_of(array)}, which no checkpoint has")
        return array


def _opened(path: Path) -> Any:
    with damage_reported(path):
        return safetensors.safe_open(path, framework="numpy")


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
        if is_array(leaf):
            digest.update(np.ascontiguousarray(_to_host(leaf)).tobytes())
    return digest.hexdigest()


def _named(tree: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path), leaf


def _stored(name: str, leaf: Any) -> StoredArray:
    """How an array is stored. A random key is stored as its key data."""
    shape, dtype = host_type(array_type(leaf))
    try:
        return StoredArray(name=name, kind=name_of(dtype), shape=shape)
    except KeyError as error:
        raise RunError(
            f"`{name}` is {_type_of(leaf)}, which a checkpoint cannot hold.",
            fix=f"Use one of {', '.join(sorted(NAMES))}.",
        ) from error


def _to_host(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf)


@contextlib.contextmanager
def _failure_reported(path: Path) -> Iterator[None]:
    """Raise RunError in place of the system's error about a write."""
    try:
        yield
    except OSError as error:
        fix = "Make room on the disk, and train again."
        if path.exists():
            fix = f"The older checkpoint is unchanged. Make room on the disk, and continue: choreo resume {path.parent}"
        raise RunError(f"The checkpoint {path} cannot be written: {error.strerror}.", fix=fix) from error


def _from_bytes(path: Path, name: str, array: np.ndarray, kind: str) -> np.ndarray:
    """The array that is stored as these bytes. The name of its type comes from the file: it is looked up, never evaluated."""
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


def _type_of(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _does_not_fit(path: Path, why: str) -> RunError:
    return RunError(
        f"{path} does not fit the algorithm: {why}.",
        fix="Use the algorithm, hyper-parameters and number of environments of the run; its run.toml has them.",
    )
