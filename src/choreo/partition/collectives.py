"""One program for all replicas of a group, for segments whose replicas combine values while they run (collectives).

    replica 0          replica 1          arrays: blocks along an axis, or the same at both
    fn(0, t, x[:2])    fn(1, t, x[2:])
       └──── psum over REPLICA_AXIS ────┘

`fn(replica index, step of the loop, arrays)` is the function of the segment. With one device for each replica, in one process or
in several, the program uses `shard_map`; on a single device, `vmap`.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from choreo.partition.program import Axis, Segment
from choreo.partition.reduce import REPLICA_AXIS


def over_devices(segment: Segment, mesh: Mesh | AbstractMesh) -> Callable[..., list[Any]]:
    """Return `(indices of the replicas, step, *whole arrays) -> whole results`. Each array is divided among the devices along the
    axis of its `Input`."""

    def at_one(index, t, *values):
        return segment.fn(index[0], t, *values)

    in_specs = (spec(0), spec(None), *(spec(given.axis) for given in segment.ins))
    # The check of shard_map is off: `inference.py` has proved, by finer rules, which results are the same on all devices.
    return jax.shard_map(
        at_one, mesh=mesh, in_specs=in_specs, out_specs=[spec(a) for a in segment.out_axes], check_vma=False
    )


def on_one_device(segment: Segment, replicas: int) -> Callable[..., list[list[Any]]]:
    """Return `(step, inputs of every replica) -> results of every replica`."""
    axes = [0 if given.axis is not None else None for given in segment.ins]

    def all_replicas(t, rows):
        stacked = [
            jax.numpy.stack(parts) if axis == 0 else parts[0]
            for axis, parts in zip(axes, zip(*rows, strict=True), strict=True)
        ]
        mapped = jax.vmap(segment.fn, (0, None, *axes), 0, axis_name=REPLICA_AXIS, axis_size=replicas)
        results = mapped(np.arange(replicas, dtype=np.int32), t, *stacked)
        return [[x[r] for x in results] for r in range(replicas)]

    return all_replicas


def spec(axis: Axis) -> PartitionSpec:
    """How JAX describes an array that is divided among the replicas along `axis`. None: all replicas have the same array."""
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, REPLICA_AXIS)


def whole_type(aval: Any, axis: Axis, replicas: int) -> jax.ShapeDtypeStruct:
    """The type of the whole array, given the type of one replica's block."""
    shape = [n * replicas if d == axis else n for d, n in enumerate(aval.shape)]
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype)
