"""`JaxBackend`: the `Backend` that compiles segments and keeps values on JAX's devices."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from choreo._compat import innermost
from choreo.dtypes import FOUR_BITS
from choreo.errors import LayoutError
from choreo.partition.collectives import on_one_device, over_devices, spec
from choreo.partition.program import Axis, Constant, KeyType, Move, Program, Ref, Segment, Transfer
from choreo.partition.reduce import REPLICA_AXIS
from choreo.plans.exported_fn import ExportedFn
from choreo.runtime.engine.backend import Site, Timed, host_type, untimed
from choreo.runtime.engine.blocks import block
from choreo.runtime.engine.iteration_loop import IterationLoop
from choreo.types import GroupName

JaxDevice: TypeAlias = Any
"""One of `jax.devices()`. JAX has no public name for the class of devices."""


class LazyCompiled:
    """A `Loaded` function. The first call compiles it; later calls go directly to the compiled function."""

    def __init__(self, compile_now: Callable[[tuple[Any, ...]], Any]):
        self.compile_now = compile_now
        self.call: Callable[..., Any] = self._first

    def _first(self, *args: Any) -> Any:
        made = self.compile_now(args)
        results = made(*args)
        self.call = innermost(made) if isinstance(made, jax.stages.Compiled) else made
        return results


class JaxBackend:
    """A `Backend` on JAX's devices."""

    def __init__(
        self,
        platforms: Mapping[GroupName, str | None],
        timed: Timed | None = None,
        *,
        num_devices: Mapping[GroupName, int] = MappingProxyType({}),
        partitioned: Mapping[GroupName, int] = MappingProxyType({}),
        carry_axes: Sequence[Axis] = (),
    ):
        """A backend for the groups in `platforms`, which maps each group to its platform, or to None for JAX's default.

        `num_devices` maps a group to the number of devices that it wants, one for each replica. If JAX sees fewer devices, all
        replicas of the group share one device. `partitioned` holds the groups that run as one program on several devices, with
        their numbers of devices. The carry of such a group is divided along `carry_axes`.
        """
        self.timed: Timed = timed or untimed
        self.num_devices, self.partitioned, self.carry_axes = num_devices, partitioned, carry_axes
        self.devices = {group: _find_devices(group, platform) for group, platform in platforms.items()}
        self.on_cpu = all(devices[0].platform == "cpu" for devices in self.devices.values())
        self.compile_seconds = 0.0
        self.scalars: dict[int, jax.Array] = {}
        self.loaded: dict[Any, LazyCompiled] = {}

    def check_devices(self, group: GroupName, wanted: int) -> None:
        """Raise LayoutError if the group wants more devices than JAX sees in this process."""
        devices = self.devices[group]
        if wanted > len(devices):
            raise LayoutError(
                f"The layout wants {wanted} devices for `{group}`, but JAX sees {len(devices)} ({devices[0].platform}) here.",
                fix=f"Use devices={len(devices)}; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count={wanted} "
                "makes more devices.",
            )

    def device(self, site: Site) -> JaxDevice:
        """The device of a site of this process."""
        group, r = site
        return self.devices[group][r if self._has_own_devices(group) else 0]

    def _has_own_devices(self, group: GroupName) -> bool:
        """Return True if a group wants several devices and JAX sees enough of them. Then each replica has its own device."""
        return 1 < self.num_devices.get(group, 1) <= len(self.devices[group])

    def load(self, segment: Segment, replica: int = 0) -> "LazyCompiled":
        device = self.device((segment.group, replica))
        if (segment, device) not in self.loaded:
            donated = [2 + position for position in segment.donated]
            self.loaded[segment, device] = self.compiled(segment.fn, donated, segment.group, device)
        return self.loaded[segment, device]

    def compiled(
        self, fn: Callable[..., Any], donated: list[int], group: GroupName, device: JaxDevice, **options: Any
    ) -> "LazyCompiled":
        """Wrap `fn` in a `LazyCompiled`. The time of the compilation is added to `compile_seconds`."""

        def compile_now(args: tuple[Any, ...]) -> Any:
            began = time.perf_counter()
            with jax.default_device(device):
                jitted = jax.jit(fn, donate_argnums=donated, **options)
                # For 4-bit arrays, JAX wrongly reports that the memory layout of an argument is not that of the compiled program.
                # JAX compares layouts only if a function was compiled ahead of time. So functions with 4-bit arguments are
                # called through `jit`.
                made = _called_on(device, jitted) if any(map(_has_four_bits, args)) else jitted.lower(*args).compile()
            self.compile_seconds += time.perf_counter() - began
            return made

        return LazyCompiled(self.timed("compile", group, compile_now))

    def load_together(self, segment: Segment, here: Sequence[int], replicas: int) -> Callable[..., list[Sequence[Any]]]:
        group = segment.group
        if len(here) < replicas:  # each replica has its own process, and JAX sees the devices of all processes
            platform = self.devices[group][0].platform
            first = {d.process_index: d for d in reversed(jax.devices(platform))}
            return self._spmd(segment, [first[r] for r in range(replicas)], here)
        if self._has_own_devices(group):
            return self._spmd(segment, [self.device((group, r)) for r in here], here)
        if isinstance(segment.fn, ExportedFn):
            raise LayoutError(
                f"This plan has {replicas} replicas of `{group}` and was made for {replicas} devices, but JAX sees "
                f"{len(self.devices[group])} here.", fix="Make the plan in this process.")  # fmt: skip
        together = self.compiled(on_one_device(segment, replicas), [], group, self.devices[group][0])
        return lambda t, rows: together.call(t, rows)

    def _spmd(self, segment: Segment, devices: list[JaxDevice], here: Sequence[int]) -> Callable[..., Any]:
        """Return a function that runs the segment as one SPMD program on these devices, one device for each replica.

        The replicas `here` are in this process.
        """
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

    def wait_for(self, values: Any) -> None:
        jax.block_until_ready(values)

    def on_host(self, value: Any) -> bool:
        return self.on_cpu or isinstance(value, np.ndarray)

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
        """Copy the device arrays that occur twice, or that are constants of the user's program.

        The copies are necessary because a segment may donate each leaf. Numpy arrays need no copy here: JAX copies them to the
        device before a call that donates memory.
        """
        seen: set[int] = set()
        row: list[Any] = []
        for value, ref in zip(values, refs, strict=True):
            if value is not None and value.__class__ is not np.ndarray:
                if isinstance(ref, Constant) or id(value) in seen:
                    value = jnp.copy(value)
                seen.add(id(value))
            row.append(value)
        return row

    def iteration_loop(
        self, program: Program, segment: Segment, num_carry: int, here: Sequence[int]
    ) -> "IterationLoop | None":
        if segment.combines and isinstance(segment.fn, ExportedFn):
            return None  # an exported function that spans several devices cannot be called inside a compiled loop
        return IterationLoop(self, program, segment, num_carry, here)


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
    """Make one global array from blocks on several devices, without moving data."""
    shape = list(parts[0].shape)
    if axis is not None:
        shape[axis] *= mesh.size
    return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(mesh, spec(axis)), parts)


def join(parts: list[Any], axis: Axis) -> Any:
    """Join the blocks of all replicas along `axis`. Without an axis, every replica holds the whole value already."""
    return parts[0] if axis is None or len(parts) == 1 else jnp.concatenate(parts, axis)


def reshard(parts: list[Any], move: Move, r: int, n: int) -> Any:
    """The piece of a value for receiver number `r` of `n` receivers. `parts` are the pieces of all senders.

    The pieces of senders that do not overlap with the piece of the receiver are not read.
    """
    if move.src_axis is None or move.src_axis != move.dst_axis or len(parts) == 1:
        return block(join(parts, move.src_axis), move.dst_axis, r, n)
    axis, total = move.src_axis, move.aval.shape[move.src_axis]
    have, want = total // len(parts), total // n
    overlaps = []
    for s in range(r * want // have, -(-(r + 1) * want // have)):
        low, high = max(r * want, s * have) - s * have, min((r + 1) * want, (s + 1) * have) - s * have
        whole = (low, high) == (0, have)
        overlaps.append(parts[s] if whole else parts[s][(slice(None),) * axis + (slice(low, high),)])
    return join(overlaps, axis)
