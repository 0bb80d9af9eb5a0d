"""Compiled functions and device arrays, for a `Machine`: the part of a runtime that needs JAX."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from choreo._compat import innermost
from choreo.dtypes import FOUR_BITS
from choreo.errors import LayoutError
from choreo.partition.program import Axis, Constant, Input, KeyType, Move, Program, Ref, Segment, Transfer
from choreo.partition.reduce import REPLICA_AXIS
from choreo.partition.together import on_one_device, over_devices, spec
from choreo.plans.exported_fn import ExportedFn
from choreo.runtime.engine.backend import Site, Watch, host_type
from choreo.types import GroupName

JaxDevice: TypeAlias = Any
"""One of `jax.devices()`; the class has no public name."""


class Compiling:
    """A `Loaded` function: the first call compiles it, and later ones are as short as they can be."""

    def __init__(self, compile_now: Callable[[tuple[Any, ...]], Any]):
        self.compile_now = compile_now
        self.call: Callable[..., Any] = self._first

    def _first(self, *args: Any) -> Any:
        made = self.compile_now(args)
        results = made(*args)
        self.call = innermost(made) if isinstance(made, jax.stages.Compiled) else made
        return results


class Device:
    """A `Backend` on JAX's devices."""

    def __init__(
        self,
        platforms: Mapping[GroupName, str | None],
        watch: Watch | None = None,
        *,
        spread: Mapping[GroupName, int] = MappingProxyType({}),
        partitioned: Mapping[GroupName, int] = MappingProxyType({}),
        carry_axes: Sequence[Axis] = (),
    ):
        """`spread`: groups whose replicas, so many, each have a device of their own if there are enough here.
        `partitioned`: groups that are one program on so many devices, divided along the `carry_axes`."""
        self.watch: Watch = watch or (lambda kind, name, fn: fn)
        self.spread, self.partitioned, self.carry_axes = spread, partitioned, carry_axes
        self.devices = {group: _find_devices(group, platform) for group, platform in platforms.items()}
        self.cpu = all(devices[0].platform == "cpu" for devices in self.devices.values())
        self.compile_seconds = 0.0
        self.scalars: dict[int, jax.Array] = {}
        self.loaded: dict[Any, Compiling] = {}

    def check_devices(self, group: GroupName, wanted: int) -> None:
        """Refuse a group that wants more devices than there are."""
        devices = self.devices[group]
        if wanted > len(devices):
            raise LayoutError(
                f"The layout wants {wanted} devices for `{group}`, and JAX sees {len(devices)} ({devices[0].platform}) here.",
                fix=f"Use devices={len(devices)}; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count={wanted} "
                "makes more of them.",
            )

    def device(self, site: Site) -> JaxDevice:
        """Where a site of this process computes."""
        group, r = site
        return self.devices[group][r if self._has_devices(group) else 0]

    def _has_devices(self, group: GroupName) -> bool:
        return 1 < self.spread.get(group, 1) <= len(self.devices[group])

    def load(self, segment: Segment, replica: int = 0) -> "Compiling":
        device = self.device((segment.group, replica))
        if (segment, device) not in self.loaded:
            donated = [2 + position for position in segment.donated]
            self.loaded[segment, device] = self.compiled(segment.fn, donated, segment.group, device)
        return self.loaded[segment, device]

    def compiled(
        self, fn: Callable[..., Any], donated: list[int], group: GroupName, device: JaxDevice, **options: Any
    ) -> "Compiling":
        """A function that compiles itself when it is first called; the time is kept apart."""

        def compile_now(args: tuple[Any, ...]) -> Any:
            began = time.perf_counter()
            with jax.default_device(device):
                jitted = jax.jit(fn, donate_argnums=donated, **options)
                # Of arrays of four bits JAX says that their layout is not the one it compiles for, though it is; only what
                # was compiled ahead of its first call compares them.
                made = _called_on(device, jitted) if any(map(_has_four_bits, args)) else jitted.lower(*args).compile()
            self.compile_seconds += time.perf_counter() - began
            return made

        return Compiling(self.watch("compile", group, compile_now))

    def load_together(self, segment: Segment, here: Sequence[int], replicas: int) -> Callable[..., list[Sequence[Any]]]:
        group = segment.group
        if len(here) < replicas:  # one process each: JAX knows the devices of all of them
            platform = self.devices[group][0].platform
            first = {d.process_index: d for d in reversed(jax.devices(platform))}
            return self._spmd(segment, [first[r] for r in range(replicas)], here)
        if self._has_devices(group):
            return self._spmd(segment, [self.device((group, r)) for r in here], here)
        if isinstance(segment.fn, ExportedFn):
            raise LayoutError(
                f"This plan of {replicas} replicas of `{group}` was made for as many devices, and JAX sees "
                f"{len(self.devices[group])} here.", fix="Make the plan in this process.")  # fmt: skip
        together = self.compiled(on_one_device(segment, replicas), [], group, self.devices[group][0])
        return lambda t, rows: together.call(t, rows)

    def _spmd(self, segment: Segment, devices: list[JaxDevice], here: Sequence[int]) -> Callable[..., Any]:
        """One program on several devices; those `here` are this process's."""
        mesh, own = Mesh(np.array(devices), (REPLICA_AXIS,)), [devices[r] for r in here]
        fn = segment.fn if isinstance(segment.fn, ExportedFn) else over_devices(segment, mesh)
        program = self.compiled(fn, [2 + position for position in segment.donated], segment.group, own[0])
        indices = _whole([jax.device_put(np.array([r], np.int32), devices[r]) for r in here], 0, mesh)
        steps: dict[int, jax.Array] = {}

        def call(t: Any, rows: list[list[Any]]) -> list[Sequence[Any]]:
            if (number := int(t)) not in steps:
                steps[number] = _whole([jax.device_put(np.int32(number), d) for d in own], None, mesh)
            columns = zip(*rows, strict=True)
            given = [
                _whole([jax.device_put(x, d) for x, d in zip(parts, own, strict=True)], each.axis, mesh)
                for parts, each in zip(columns, segment.ins, strict=True)
            ]
            results = program.call(indices, steps[number], *given)
            shards = [{shard.device: shard.data for shard in x.addressable_shards} for x in results]
            return [[parts[d] for parts in shards] for d in own]

        return call

    def scalar(self, number: int) -> jax.Array:
        if number not in self.scalars:
            self.scalars[number] = jnp.asarray(number, jnp.int32)
        return self.scalars[number]

    def to_host(self, value: Any) -> np.ndarray:
        return np.asarray(value if isinstance(value.dtype, np.dtype) else jax.random.key_data(value))

    def on_host(self, value: Any) -> bool:
        return self.cpu or isinstance(value, np.ndarray)

    def from_host(self, array: np.ndarray, like: Any, site: Site) -> jax.Array:
        value = jax.device_put(array, self.device(site))
        return jax.random.wrap_key_data(value, impl=like.dtype.impl) if isinstance(like.dtype, KeyType) else value

    def host_type(self, like: Any) -> tuple[tuple[int, ...], np.dtype]:
        return host_type(like)

    def stack(self, slices: list[Any], like: Any) -> jax.Array:
        return jnp.stack(slices) if slices else jnp.empty(like.shape, like.dtype)

    def reshard(self, parts: list[Any], move: Move, receiver: int, receivers: int, transfer: Transfer) -> Any:
        target = self.device((transfer.dst, receiver))
        if {self.device((transfer.src, s)) for s in range(len(parts))} != {target}:
            parts = [jax.device_put(part, target) for part in parts]
        value = reshard(parts, move, receiver, receivers)
        return jnp.copy(value) if move.copied else value

    def key(self, data: np.ndarray, site: Site) -> jax.Array:
        return jax.device_put(jax.random.wrap_key_data(jnp.asarray(data)), self.device(site))

    def fold_in(self, key: jax.Array, number: int) -> jax.Array:
        return jax.random.fold_in(key, number)

    def copy(self, value: Any) -> jax.Array:
        return jnp.copy(value)

    def own(self, values: list[Any], refs: Sequence[Ref | None]) -> list[Any]:
        """No two leaves may share a device array, nor be the user's constant: each may be taken over. Those of numpy are
        copied by whoever takes over arguments."""
        seen: set[int] = set()
        row: list[Any] = []
        for value, ref in zip(values, refs, strict=True):
            if value is not None and value.__class__ is not np.ndarray:
                if isinstance(ref, Constant) or id(value) in seen:
                    value = jnp.copy(value)
                seen.add(id(value))
            row.append(value)
        return row

    def chunks(self, program: Program, segment: Segment, num_carry: int, here: Sequence[int]) -> "Chunks | None":
        if segment.combines and isinstance(segment.fn, ExportedFn):
            return None  # it is for all devices already: a loop around it would have to be for one
        return Chunks(self, program, segment, num_carry, here)


def _has_four_bits(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) and value.dtype.name in FOUR_BITS


def _called_on(device: JaxDevice, fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with jax.default_device(device):
            return fn(*args)

    return call


def _find_devices(group: GroupName, platform: str | None) -> list[JaxDevice]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError as missing:
        have = sorted({device.platform for device in jax.devices()})
        raise LayoutError(f"The layout wants `{group}` on {platform!r}, but JAX sees only {', '.join(have)} here.",
                          fix="Change the group's `device`, or install JAX for that platform.") from missing  # fmt: skip


def _whole(parts: list[jax.Array], axis: Axis, mesh: Mesh) -> jax.Array:
    """One array of the blocks on several devices, without moving them."""
    shape = list(parts[0].shape)
    if axis is not None:
        shape[axis] *= mesh.size
    return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(mesh, spec(axis)), parts)


class Chunks:
    """Several iterations in one compiled loop: possible where everything is one segment."""

    def __init__(self, device: Device, program: Program, segment: Segment, num_carry: int, here: Sequence[int]):
        self.device, self.program, self.segment, self.num_carry = device, program, segment, num_carry
        self.group, self.here = segment.group, here
        self.capacity, self.call = 0, None

    def run(
        self, carries: list[list[Any]], keys: list[Any], first: int, stop: int
    ) -> list[tuple[list[Any], list[Any]]]:
        """For each replica, the carry after these iterations, and each metric, one entry per iteration."""
        if self.call is None or stop - first > self.capacity:
            self.capacity = stop - first
            self.call = self._load(self._chunk(self.capacity))
        # The number of rounds is an argument: chunks of different lengths share one compiled loop.
        rows = [[key, np.int32(first), np.int32(stop), *carry] for key, carry in zip(keys, carries, strict=True)]
        k = self.num_carry
        return [
            (list(result[:k]), [np.asarray(row)[: stop - first] for row in result[k:]]) for result in self.call(rows)
        ]

    def _load(self, chunk: Segment) -> Callable[..., list[Sequence[Any]]]:
        zero, device = self.device.scalar(0), self.device
        if chunk.combines:
            together = device.load_together(chunk, self.here, len(self.here))
            return lambda rows: together(zero, rows)
        if device.partitioned.get(self.group, 1) > 1:
            return self._partitioned(chunk)
        each = [(device.scalar(r), device.load(chunk, r)) for r in self.here]
        return lambda rows: [loaded.call(index, zero, *row) for (index, loaded), row in zip(each, rows, strict=True)]

    def _partitioned(self, chunk: Segment) -> Callable[..., list[Sequence[Any]]]:
        """On several devices as one program, environments divided among them: XLA sees to the rest."""
        device, count = self.device, self.device.partitioned[self.group]
        mesh = Mesh(np.array(device.devices[self.group][:count]), (REPLICA_AXIS,))
        everywhere = NamedSharding(mesh, spec(None))
        divided = [NamedSharding(mesh, spec(axis)) for axis in device.carry_axes]
        outs = [*divided, *[everywhere] * (len(chunk.outs) - len(divided))]
        program = device.compiled(
            chunk.fn, [2 + p for p in chunk.donated], self.group, mesh.devices.flat[0], out_shardings=outs
        )

        def call(rows: list[list[Any]]) -> list[Sequence[Any]]:
            ((key, first, stop, *carry),) = rows
            given = [jax.device_put(leaf, sharding) for leaf, sharding in zip(carry, divided, strict=True)]
            zero = np.int32(0)
            return [program.call(zero, zero, *jax.device_put((key, first, stop), everywhere), *given)]

        return call

    def _chunk(self, capacity: int) -> Segment:
        segment, program, num_carry, group = self.segment, self.program, self.num_carry, self.group
        in_slots = [port.held.get(group, (None, None))[0] for port in program.ins]
        out_refs = [port.held[group][0] for port in program.outs]

        def iteration(index, carry, i, key):
            store = {slot: x for slot, x in zip(in_slots, [*carry, key, i], strict=True) if slot is not None}
            given = [store[each.slot] for each in segment.ins]
            store.update(zip(segment.outs, segment.fn(index, np.int32(0), *given), strict=True))
            results = [jnp.asarray(r.value if isinstance(r, Constant) else store[r]) for r in out_refs]
            return results[:num_carry], results[num_carry:]

        def chunk(index, _, key, first, stop, *carry):
            shapes = jax.eval_shape(lambda: iteration(index, carry, first, key)[1])
            rows = [jnp.zeros((capacity, *shape.shape), shape.dtype) for shape in shapes]

            def body(i, state):
                carry, rows = state
                carry, metrics = iteration(index, carry, i, key)
                return carry, [row.at[i - first].set(metric) for row, metric in zip(rows, metrics, strict=True)]

            carry, rows = lax.fori_loop(first, stop, body, (list(carry), rows))
            return [*carry, *rows]

        axes = [port.held.get(group, (None, None))[1] for port in program.ins[:num_carry]]
        row_axes = [port.held[group][1] for port in program.outs[num_carry:]]
        ins = [Input(i, False, None, axis, "") for i, axis in enumerate([None, None, None, *axes])]
        out_axes = (*axes, *(axis if axis is None else axis + 1 for axis in row_axes))
        return replace(
            segment, ins=tuple(ins), outs=tuple(range(len(out_axes))), out_avals=(), fn=chunk, out_axes=out_axes,
            donated=tuple(range(3, 3 + num_carry)),
        )  # fmt: skip


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
