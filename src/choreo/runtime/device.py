"""Compiled functions and device arrays, for a `Machine`: the part of a runtime that needs JAX."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from choreo.errors import LayoutError
from choreo.partition.program import Axis, Constant, KeyType, Move, Program, Ref, Segment, Transfer
from choreo.runtime.machine import Watch
from choreo.types import GroupName


class Device:
    """A `Backend` on JAX's devices."""

    def __init__(self, platforms: Mapping[GroupName, str | None], watch: Watch | None = None):
        self.watch: Watch = watch or (lambda kind, name, fn: fn)
        self.devices = {group: _find_device(group, platform) for group, platform in platforms.items()}
        self.cpu = all(device.platform == "cpu" for device in self.devices.values())
        self.compile_seconds = 0.0
        self.scalars: dict[int, jax.Array] = {}
        self.loaded: dict[Segment, Callable[..., Any]] = {}

    def load(self, segment: Segment) -> Callable[..., Sequence[Any]]:
        if segment not in self.loaded:
            donated = [2 + position for position in segment.donated]
            self.loaded[segment] = self.compiled(segment.fn, donated, segment.group)
        return self.loaded[segment]

    def compiled(self, fn: Callable[..., Any], donated: list[int], group: GroupName) -> Callable[..., Any]:
        """A function that compiles itself when it is first called; the time is kept apart."""
        program = None

        def call(*args: Any) -> Any:
            nonlocal program
            if program is None:
                program = self.watch("compile", group, compile_now)(args)
            return program(*args)

        def compile_now(args: tuple[Any, ...]) -> Any:
            began = time.perf_counter()
            with jax.default_device(self.devices[group]):
                made = jax.jit(fn, donate_argnums=donated).lower(*args).compile()
            self.compile_seconds += time.perf_counter() - began
            return made

        return call

    def scalar(self, number: int) -> jax.Array:
        if number not in self.scalars:
            self.scalars[number] = jnp.asarray(number, jnp.int32)
        return self.scalars[number]

    def to_host(self, value: Any) -> np.ndarray:
        if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        return np.asarray(value)

    def on_host(self, value: Any) -> bool:
        return self.cpu or isinstance(value, np.ndarray)

    def from_host(self, array: np.ndarray, like: Any, group: GroupName) -> jax.Array:
        value = jax.device_put(array, self.devices[group])
        return jax.random.wrap_key_data(value, impl=like.dtype.impl) if isinstance(like.dtype, KeyType) else value

    def host_type(self, like: Any) -> tuple[tuple[int, ...], np.dtype]:
        return host_type(like)

    def stack(self, slices: list[Any], like: Any) -> jax.Array:
        return jnp.stack(slices) if slices else jnp.empty(like.shape, like.dtype)

    def reshard(self, parts: list[Any], move: Move, receiver: int, receivers: int, transfer: Transfer) -> Any:
        value = reshard(parts, move, receiver, receivers)
        if self.devices[transfer.src] != self.devices[transfer.dst]:
            return jax.device_put(value, self.devices[transfer.dst])
        return jnp.copy(value) if move.copied else value

    def key(self, data: np.ndarray, group: GroupName) -> jax.Array:
        return jax.device_put(jax.random.wrap_key_data(jnp.asarray(data)), self.devices[group])

    def number(self, value: int, group: GroupName) -> jax.Array:
        return jax.device_put(np.int32(value), self.devices[group])

    def copy(self, value: Any) -> jax.Array:
        return jnp.copy(value)

    def own(self, values: list[Any], refs: Sequence[Ref | None]) -> list[Any]:
        """No two leaves may share an array, nor be the user's constant: each may be taken over."""
        seen: set[int] = set()
        row: list[Any] = []
        for value, ref in zip(values, refs, strict=True):
            if value is not None:
                shared = isinstance(ref, Constant) or id(value) in seen
                seen.add(id(value))
                value = jnp.copy(value) if shared else jnp.asarray(value)
            row.append(value)
        return row

    def chunks(self, program: Program, segment: Segment, num_carry: int) -> "Chunks":
        return Chunks(self, program, segment, num_carry)


def _find_device(group: GroupName, platform: str | None) -> Any:
    try:
        return jax.devices(platform)[0] if platform else jax.devices()[0]
    except RuntimeError as missing:
        have = sorted({device.platform for device in jax.devices()})
        raise LayoutError(f"The layout wants `{group}` on {platform!r}, but JAX sees only {', '.join(have)} here.",
                          fix="Change the group's `device`, or install JAX for that platform.") from missing  # fmt: skip


def host_type(like: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of a value as it is sent: random keys go as their numbers."""
    if isinstance(like.dtype, KeyType):
        return (*like.shape, like.dtype.words), np.dtype(np.uint32)
    return tuple(like.shape), np.dtype(like.dtype)


class Chunks:
    """Several iterations in one compiled loop: possible where everything is one segment."""

    def __init__(self, device: Device, program: Program, segment: Segment, num_carry: int):
        self.device, self.program, self.segment, self.num_carry = device, program, segment, num_carry
        self.group = segment.group
        self.capacity, self.call = 0, None

    def run(self, carry: list[Any], key: Any, first: int, stop: int) -> tuple[list[Any], list[np.ndarray]]:
        """The carry after these iterations, and each metric, one entry per iteration."""
        if self.call is None or stop - first > self.capacity:
            self.capacity = stop - first
            donated = list(range(3, 3 + self.num_carry))
            self.call = self.device.compiled(self._chunk(self.capacity), donated, self.group)
        # The number of rounds is an argument: chunks of different lengths share one compiled loop.
        carry, rows = self.call(key, np.int32(first), np.int32(stop), *carry)
        return list(carry), [np.asarray(row)[: stop - first] for row in rows]

    def _chunk(self, capacity: int) -> Callable[..., Any]:
        segment, program, num_carry = self.segment, self.program, self.num_carry
        in_slots = [port.held.get(self.group, (None, None))[0] for port in program.ins]
        out_refs = [port.held[self.group][0] for port in program.outs]

        def iteration(carry, i, key):
            store = {slot: x for slot, x in zip(in_slots, [*carry, key, i], strict=True) if slot is not None}
            given = [store[each.slot] for each in segment.ins]
            store.update(zip(segment.outs, segment.fn(np.int32(0), np.int32(0), *given), strict=True))
            results = [jnp.asarray(r.value if isinstance(r, Constant) else store[r]) for r in out_refs]
            return results[:num_carry], results[num_carry:]

        def chunk(key, first, stop, *carry):
            shapes = jax.eval_shape(lambda: iteration(carry, first, key)[1])
            rows = [jnp.zeros((capacity, *shape.shape), shape.dtype) for shape in shapes]

            def body(i, state):
                carry, rows = state
                carry, metrics = iteration(carry, i, key)
                return carry, [row.at[i - first].set(metric) for row, metric in zip(rows, metrics, strict=True)]

            return lax.fori_loop(first, stop, body, (list(carry), rows))

        return chunk


def block(value: Any, axis: Axis, r: int, n: int) -> Any:
    """Rows [r E/n, (r+1) E/n) of an axis."""
    if axis is None or n == 1:
        return value
    size = value.shape[axis] // n
    return value[(slice(None),) * axis + (slice(r * size, (r + 1) * size),)]


def join(parts: list[Any], axis: Axis) -> Any:
    """The whole value from the blocks of all replicas; from the first, if each holds all of it."""
    return parts[0] if axis is None or len(parts) == 1 else jnp.concatenate(parts, axis)


def reshard(parts: list[Any], move: Move, r: int, n: int) -> Any:
    """What receiver r of n gets: only the blocks that intersect its own are touched."""
    if move.src_axis is None or move.src_axis != move.dst_axis or len(parts) == 1:
        return block(join(parts, move.src_axis), move.dst_axis, r, n)
    axis, total = move.src_axis, move.aval.shape[move.src_axis]
    have, want = total // len(parts), total // n
    pieces = []
    for s in range(r * want // have, -(-(r + 1) * want // have)):
        low, high = max(r * want, s * have) - s * have, min((r + 1) * want, (s + 1) * have) - s * have
        whole = (low, high) == (0, have)
        pieces.append(parts[s] if whole else parts[s][(slice(None),) * axis + (slice(low, high),)])
    return join(pieces, axis)
