"""The serial twin: executes a plan in this process, one step after the other, without threads.

This is the specification of what a plan means; every other runtime must give the same bits. Breakpoints and
`jax.debug.print` in the user's code work, since segments are traced and run here.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from choreo.errors import LayoutError
from choreo.partition.program import (
    Constant,
    HostCall,
    Loop,
    LoopPart,
    Move,
    Program,
    Ref,
    Segment,
    Slot,
    Step,
    Transfer,
)
from choreo.plans import Plan
from choreo.runtime.base import as_numpy
from choreo.types import GroupName, Key, PyTree

Store = dict[Ref, Any]
"""What one site holds, by slot."""


class InProcess:
    """Executes a plan serially."""

    def __init__(self, plan: Plan):
        self.plan, self.compile_seconds = plan, 0.0
        self.devices = {group: _device(plan, group) for group in plan.sites.replicas}
        self.compiled: dict[Any, Callable[..., Any]] = {}
        self.leaves: dict[GroupName, list[list[Any]]] = {}
        """The carry at every replica: one list of pieces, None where it is held elsewhere."""
        self.key: Any = None
        self.capacity = 1
        """Iterations that the compiled loop of `_run_chunk` has room for."""

    def start(self, key: Key) -> None:
        init_key, self.key = jax.random.split(key)
        stores = self._stores(self.plan.init, [init_key])
        self._run_steps(self.plan.init.steps, stores, t=0)
        self.leaves = self._collect(self.plan.init, stores, range(self.plan.num_carry))

    def run(self, first: int, stop: int) -> dict[str, np.ndarray]:
        if self.plan.single and stop > first:
            return self._run_chunk(self.plan.single, first, stop)
        rows = [self._iterate(i) for i in range(first, stop)]
        return {name: as_numpy([row[name] for row in rows]) for name in self.plan.metric_names} if rows else {}

    def carry(self) -> PyTree:
        whole = []
        for i, port in enumerate(self.plan.iterate.ins[: self.plan.num_carry]):
            group, (_, axis) = next(iter(port.held.items()))
            whole.append(_join([leaves[i] for leaves in self.leaves[group]], axis))
        # Copies: what runs next may take over the memory of the carry.
        return self.plan.combine([jnp.copy(leaf) for leaf in whole])

    def restore(self, carry: PyTree, key: Key) -> None:
        _, self.key = jax.random.split(key)
        whole = self.plan.leaves(carry)
        self.leaves = {}
        for group in self.plan.sites.replicas:
            n = self.plan.replicas(group)
            self.leaves[group] = [[None] * len(whole) for _ in range(n)]
            for i, port in enumerate(self.plan.iterate.ins[: self.plan.num_carry]):
                if group in port.held:
                    for r in range(n):
                        piece = _block(whole[i], port.held[group][1], r, n)
                        self.leaves[group][r][i] = jax.device_put(jnp.copy(piece), self.devices[group])

    def close(self) -> None:
        self.compiled.clear()
        self.leaves.clear()

    def _iterate(self, i: int) -> dict[str, Any]:
        program, num_carry = self.plan.iterate, self.plan.num_carry
        stores = self._stores(program, [*([None] * num_carry), self.key, np.int32(i)])
        for group, replicas in self.leaves.items():
            for r, leaves in enumerate(replicas):
                for port, leaf in zip(program.ins, leaves, strict=False):
                    if group in port.held:
                        stores[group][r][port.held[group][0]] = leaf
        self.leaves = {}  # segments may take over their memory
        self._run_steps(program.steps, stores, t=0)
        self.leaves = self._collect(program, stores, range(num_carry))
        carried = {id(leaf) for replicas in self.leaves.values() for leaves in replicas for leaf in leaves}
        metrics = {}
        for port in program.outs[num_carry:]:
            group, (ref, axis) = next(iter(port.held.items()))
            value = _join([_read(store, ref) for store in stores[group]], axis)
            # The next iteration may take over the memory of what is carried.
            metrics[port.name] = jnp.copy(value) if id(value) in carried else value
        return metrics

    def _stores(self, program: Program, values: Sequence[Any]) -> dict[GroupName, list[Store]]:
        """Empty stores, with those inputs that every site gets from outside."""
        stores: dict[GroupName, list[Store]] = {
            g: [{} for _ in range(self.plan.replicas(g))] for g in self.plan.sites.replicas
        }
        for port, value in zip(program.ins, values, strict=True):
            for group, (slot, _) in port.held.items():
                if value is not None:
                    for store in stores[group]:
                        store[slot] = jax.device_put(value, self.devices[group])
        return stores

    def _collect(self, program: Program, stores, positions) -> dict[GroupName, list[list[Any]]]:
        """The carry at a boundary. No two leaves may share an array, nor be the user's constant: each may be taken over."""
        leaves: dict[GroupName, list[list[Any]]] = {}
        for group, replicas in stores.items():
            leaves[group] = []
            for store in replicas:
                seen: set[int] = set()
                row: list[Any] = []
                for i in positions:
                    if group not in program.outs[i].held:
                        row.append(None)
                        continue
                    ref = program.outs[i].held[group][0]
                    value = jnp.asarray(_read(store, ref))
                    row.append(jnp.copy(value) if isinstance(ref, Constant) or id(value) in seen else value)
                    seen.add(id(value))
                leaves[group].append(row)
        return leaves

    def _run_steps(self, steps: Sequence[Step], stores: dict[GroupName, list[Store]], t: int) -> None:
        for step in steps:
            if isinstance(step, Segment):
                for r, store in enumerate(stores[step.group]):
                    args = [np.int32(r), np.int32(t), *(store[given.slot] for given in step.ins)]
                    results = self._compile(step, step.fn, args, [2 + p for p in step.donated], step.group)(*args)
                    store.update(zip(step.outs, results, strict=True))
            elif isinstance(step, Transfer):
                self._transfer(step, stores)
            elif isinstance(step, HostCall):
                for store in stores[step.group]:
                    results = step.fn(*(np.asarray(_read(store, ref)) for ref in step.ins))
                    store.update((slot, x) for slot, x in zip(step.outs, results, strict=True) if slot is not None)
            else:
                self._loop(step, stores)

    def _transfer(self, step: Transfer, stores: dict[GroupName, list[Store]]) -> None:
        senders, receivers = stores[step.src], stores[step.dst]
        for move in step.moves:
            parts = [store[move.src] for store in senders]
            for r, store in enumerate(receivers):
                value = _reshard(parts, move, r, len(receivers))
                if self.devices[step.src] != self.devices[step.dst]:
                    value = jax.device_put(value, self.devices[step.dst])
                elif move.copied:
                    value = jnp.copy(value)
                store[move.dst] = value

    def _loop(self, loop: Loop, stores: dict[GroupName, list[Store]]) -> None:
        inside: dict[GroupName, list[Store]] = {}
        stacks: dict[tuple[GroupName, int, Slot], list[Any]] = {}
        for group, part in loop.parts.items():
            inside[group] = []
            for store in stores[group]:
                pairs = [pair[:2] for pair in (*part.consts, *part.carry, *part.xs)]
                inside[group].append({slot: _read(store, ref) for slot, ref in pairs})
        steps = range(loop.length - 1, -1, -1) if loop.reverse else range(loop.length)
        for t in steps:
            for group, part in loop.parts.items():
                for outer, store in zip(stores[group], inside[group], strict=True):
                    store.update((slot, _read(outer, ref)[t]) for slot, ref in part.slices)
            self._run_steps(loop.body, inside, t)
            for group, part in loop.parts.items():
                for r, store in enumerate(inside[group]):
                    for ref, slot, _ in part.ys:
                        stacks.setdefault((group, r, slot), []).append(_read(store, ref))
                    store.update(_next_carry(store, part))
        for group, part in loop.parts.items():
            for r, (outer, store) in enumerate(zip(stores[group], inside[group], strict=True)):
                outer.update((last, store[slot]) for slot, _, _, last in part.carry if last is not None)
                for _, slot, aval in part.ys:
                    slices = stacks.get((group, r, slot), [])
                    stacked = (
                        jnp.stack(slices[::-1] if loop.reverse else slices)
                        if slices
                        else jnp.empty(aval.shape, aval.dtype)
                    )
                    outer[slot] = stacked

    def _run_chunk(self, segment: Segment, first: int, stop: int) -> dict[str, np.ndarray]:
        """Several iterations in one compiled loop: possible where everything is one segment."""
        (group,) = self.plan.sites.replicas
        program, num_carry = self.plan.iterate, self.plan.num_carry
        in_slots = [port.held.get(group, (None, None))[0] for port in program.ins]
        out_refs = [port.held[group][0] for port in program.outs]

        def iteration(carry, i, key):
            store: Store = {slot: x for slot, x in zip(in_slots, [*carry, key, i], strict=True) if slot is not None}
            given = [store[each.slot] for each in segment.ins]
            store.update(zip(segment.outs, segment.fn(np.int32(0), np.int32(0), *given), strict=True))
            results = [jnp.asarray(_read(store, ref)) for ref in out_refs]
            return results[:num_carry], results[num_carry:]

        def chunk(key, first, stop, *carry):
            shapes = jax.eval_shape(lambda: iteration(carry, first, key)[1])
            rows = [jnp.zeros((capacity, *shape.shape), shape.dtype) for shape in shapes]

            def body(i, state):
                carry, rows = state
                carry, metrics = iteration(carry, i, key)
                return carry, [row.at[i - first].set(metric) for row, metric in zip(rows, metrics, strict=True)]

            return lax.fori_loop(first, stop, body, (list(carry), rows))

        # The number of rounds is an argument: chunks of different lengths share one compiled loop.
        capacity = self.capacity = max(self.capacity, stop - first)
        args = [self.key, np.int32(first), np.int32(stop), *self.leaves[group][0]]
        self.leaves = {}
        carry, metrics = self._compile((segment, capacity), chunk, args, list(range(3, len(args))), group)(*args)
        self.leaves = {group: [list(carry)]}
        names = self.plan.metric_names
        return {name: np.asarray(rows)[: stop - first] for name, rows in zip(names, metrics, strict=True)}

    def _compile(self, what: Any, fn: Callable[..., Any], args: list[Any], donated: list[int], group: GroupName):
        if what not in self.compiled:
            start = time.perf_counter()
            with jax.default_device(self.devices[group]):
                self.compiled[what] = jax.jit(fn, donate_argnums=donated).lower(*args).compile()
            self.compile_seconds += time.perf_counter() - start
        return self.compiled[what]


def _device(plan: Plan, group: GroupName) -> Any:
    platform = next(g.device for g in plan.layout.groups if g.name == group)
    try:
        return jax.devices(platform)[0] if platform else jax.devices()[0]
    except RuntimeError as missing:
        have = sorted({device.platform for device in jax.devices()})
        raise LayoutError(f"The layout wants `{group}` on {platform!r}, but JAX sees only {', '.join(have)} here.",
                          fix="Change the group's `device`, or install JAX for that platform.") from missing  # fmt: skip


def _read(store: Store, ref: Ref) -> Any:
    return ref.value if isinstance(ref, Constant) else store[ref]


def _next_carry(store: Store, part: LoopPart) -> Store:
    return {slot: _read(store, after) for slot, _, after, _ in part.carry}


def _block(value: Any, axis: int | None, r: int, n: int) -> Any:
    """Rows [r E/n, (r+1) E/n) of an axis."""
    if axis is None or n == 1:
        return value
    size = value.shape[axis] // n
    return value[(slice(None),) * axis + (slice(r * size, (r + 1) * size),)]


def _join(parts: list[Any], axis: int | None) -> Any:
    """The whole value from the blocks of all replicas; from the first, if each holds all of it."""
    return parts[0] if axis is None or len(parts) == 1 else jnp.concatenate(parts, axis)


def _reshard(parts: list[Any], move: Move, r: int, n: int) -> Any:
    """What receiver r of n gets: only the blocks that intersect its own are touched."""
    if move.src_axis is None or move.src_axis != move.dst_axis or len(parts) == 1:
        return _block(_join(parts, move.src_axis), move.dst_axis, r, n)
    axis, total = move.src_axis, move.aval.shape[move.src_axis]
    have, want = total // len(parts), total // n
    pieces = []
    for s in range(r * want // have, -(-(r + 1) * want // have)):
        low, high = max(r * want, s * have) - s * have, min((r + 1) * want, (s + 1) * have) - s * have
        whole = (low, high) == (0, have)
        pieces.append(parts[s] if whole else parts[s][(slice(None),) * axis + (slice(low, high),)])
    return _join(pieces, axis)
