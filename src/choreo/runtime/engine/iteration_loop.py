"""Runs several iterations in one compiled loop, for plans whose iteration is a single segment.

One call runs many iterations without returning to Python. The number of iterations is an argument of the compiled function,
so a later call with fewer iterations uses the same compiled function. A call with more iterations than any call before compiles
a new function.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from choreo.partition.collectives import spec
from choreo.partition.program import Constant, Input, Program, Segment
from choreo.partition.reduce import REPLICA_AXIS


class IterationLoop:
    """Runs iterations of a program that consists of a single segment."""

    def __init__(self, backend: Any, program: Program, segment: Segment, num_carry: int, here: Sequence[int]):
        """`backend` is the `JaxBackend` that makes this object. `here` are the replicas of the segment's group in this process.

        The type of `backend` is `Any`, because `jax_backend.py` imports this module: importing `JaxBackend` would be circular.
        """
        self.backend, self.program, self.segment, self.num_carry = backend, program, segment, num_carry
        self.group, self.here = segment.group, here
        self.capacity = 0
        """The largest number of iterations that `call` can run. The arrays of metrics that `call` returns have `capacity` rows."""
        self.call: Callable[..., list[Sequence[Any]]] | None = None
        """The compiled loop."""

    def run(
        self, carries: list[list[Any]], keys: list[Any], first: int, stop: int
    ) -> list[tuple[list[Any], list[Any]]]:
        """Run iterations first .. stop - 1. Returns for each replica the new carry, and the metrics of all iterations."""
        if self.call is None or stop - first > self.capacity:
            self.capacity = stop - first
            self.call = self._load(self._loop(self.capacity))
        rows = [[key, np.int32(first), np.int32(stop), *carry] for key, carry in zip(keys, carries, strict=True)]
        k = self.num_carry
        return [
            (list(result[:k]), [np.asarray(row)[: stop - first] for row in result[k:]]) for result in self.call(rows)
        ]

    def _load(self, loop: Segment) -> Callable[..., list[Sequence[Any]]]:
        zero, backend = self.backend.scalar(0), self.backend
        if loop.combines:
            together = backend.load_together(loop, self.here, len(self.here))
            return lambda rows: together(zero, rows)
        if backend.partitioned.get(self.group, 1) > 1:
            return self._partitioned(loop)
        each = [(backend.scalar(r), backend.load(loop, r)) for r in self.here]
        return lambda rows: [loaded.call(index, zero, *row) for (index, loaded), row in zip(each, rows, strict=True)]

    def _partitioned(self, loop: Segment) -> Callable[..., list[Sequence[Any]]]:
        """Return a function that runs the loop as one program on several devices.

        The env axes of the carry are divided over the devices. XLA decides how to divide the computation.
        """
        backend, count = self.backend, self.backend.partitioned[self.group]
        mesh = Mesh(np.array(backend.devices[self.group][:count]), (REPLICA_AXIS,))
        everywhere = NamedSharding(mesh, spec(None))
        divided = [NamedSharding(mesh, spec(axis)) for axis in backend.carry_axes]
        outs = [*divided, *[everywhere] * (len(loop.outs) - len(divided))]
        program = backend.compiled(
            loop.fn, [2 + p for p in loop.donated], self.group, mesh.devices.flat[0], out_shardings=outs
        )

        def call(rows: list[list[Any]]) -> list[Sequence[Any]]:
            ((key, first, stop, *carry),) = rows
            given = [jax.device_put(leaf, sharding) for leaf, sharding in zip(carry, divided, strict=True)]
            zero = np.int32(0)
            return [program.call(zero, zero, *jax.device_put((key, first, stop), everywhere), *given)]

        return call

    def _loop(self, capacity: int) -> Segment:
        """The segment `(replica, _, key, first, stop, *carry) -> carry, metrics`, which can run up to `capacity` iterations.

        `_` is the round of a loop around the segment. There is no such loop here, so the segment ignores `_`.
        """
        segment, program, num_carry, group = self.segment, self.program, self.num_carry, self.group
        in_slots = [port.held.get(group, (None, None))[0] for port in program.ins]
        out_refs = [port.held[group][0] for port in program.outs]

        def iteration(index, carry, i, key):
            store = {slot: x for slot, x in zip(in_slots, [*carry, key, i], strict=True) if slot is not None}
            given = [store[each.slot] for each in segment.ins]
            store.update(zip(segment.outs, segment.fn(index, np.int32(0), *given), strict=True))
            results = [jnp.asarray(r.value if isinstance(r, Constant) else store[r]) for r in out_refs]
            return results[:num_carry], results[num_carry:]

        def loop(index, _, key, first, stop, *carry):
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
            segment, ins=tuple(ins), outs=tuple(range(len(out_axes))), out_avals=(), fn=loop, out_axes=out_axes,
            donated=tuple(range(3, 3 + num_carry)),
        )  # fmt: skip
