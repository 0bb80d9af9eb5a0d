"""Makes the programs and keys that a process needs to run a plan. Splits the carry over the sites, and joins it again."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from choreo.host import HostMethod, key_of
from choreo.partition.program import Axis, Program, Segment
from choreo.plans.export import array_type
from choreo.plans.plan import Plan
from choreo.runtime.engine.backend import Site, host_type
from choreo.runtime.engine.blocks import block
from choreo.runtime.engine.execution import Programs
from choreo.runtime.engine.extents import Extent, extents
from choreo.runtime.engine.host_states import host_calls, number_objects
from choreo.runtime.engine.jax_backend import join
from choreo.types import GroupName, Key, PyTree

EXTENT_BYTES = 2**22
"""The largest size of an extent of the carry, and of all extents that workers send at a time."""


def programs_of(plan: Plan, init: Program, iterate: Program) -> Programs:
    """Everything that a process needs to run a plan. `init` and `iterate` are the plan's programs, or exported copies of them."""
    single = iterate.steps[0] if plan.single else None
    assert single is None or isinstance(single, Segment)
    return Programs(
        init=init, iterate=iterate, num_carry=plan.num_carry, carry_axes=plan.carry_axes, shards=plan.shards,
        max_lag=plan.layout.max_lag, num_workers=plan.num_workers, learner=plan.sites.default, single=single,
        host_numbers=number_objects(plan.init.steps + plan.iterate.steps),
    )  # fmt: skip


def sizes_of_objects(plan: Plan) -> dict[int, int]:
    """The number of environments of each Python object, at all sites together."""
    calls = list(host_calls(plan.init.steps + plan.iterate.steps))
    in_iterate = set(map(id, host_calls(plan.iterate.steps)))
    sizes: dict[Any, int] = {}
    for call in calls:
        # With merge="any", `iterate` is the program of one worker.
        workers = plan.num_workers if id(call) in in_iterate else 1
        size = call.fn.num_envs * call.shards * workers if isinstance(call.fn, HostMethod) else 1
        sizes[key_of(call.fn)] = max(size, sizes.get(key_of(call.fn), 0))
    return dict(enumerate(sizes.values()))


def split_key(key: Key) -> tuple[np.ndarray, np.ndarray]:
    """Split a key into the key of `init` and the key of the iterations. Returns the key data of both."""
    init_key, run_key = jax.random.split(key)
    return np.asarray(jax.random.key_data(init_key)), np.asarray(jax.random.key_data(run_key))


def sites_of_leaf(plan: Plan, i: int) -> list[Site]:
    """The sites whose pieces together are the whole leaf number `i` of the carry. Other sites may hold copies of these pieces."""
    group, axis = _holder(plan, i)
    return [(group, r) for r in range(1 if axis is None else plan.replicas(group))]


def join_leaf(plan: Plan, i: int, parts: list[Any]) -> jax.Array:
    """The whole leaf number `i`, on the device of the first part. `parts` are the pieces of the sites `sites_of_leaf(plan, i)`."""
    (device, *_) = parts[0].devices()
    return join([jax.device_put(part, device) for part in parts], _holder(plan, i)[1])


def extents_of_leaf(plan: Plan, i: int) -> Iterator[Extent]:
    """The extents of leaf number `i`: consecutive elements of at most EXTENT_BYTES, in C order."""
    shape, dtype = type_of_leaf(plan, i)
    sites = tuple(sites_of_leaf(plan, i))
    return extents(i, shape, dtype.itemsize, _holder(plan, i)[1], sites, EXTENT_BYTES)


def type_of_leaf(plan: Plan, i: int) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of the whole leaf number `i` in host memory."""
    (*shape,), dtype = host_type(array_type(plan.iterate.ins[i].aval))
    _, axis = _holder(plan, i)
    if axis is not None:
        shape[axis] *= plan.num_workers  # with merge="any", `iterate` is the program of one worker
    return tuple(shape), dtype


def _holder(plan: Plan, i: int) -> tuple[GroupName, Axis]:
    """A group that holds leaf number `i`, and the axis along which its replicas divide the leaf."""
    group, (_, axis) = next(iter(plan.iterate.ins[i].held.items()))
    return group, axis


def split_carry(plan: Plan, carry: PyTree) -> dict[Site, list[Any]]:
    """Split a carry: return for each site its piece of every leaf, or None for a leaf that the site does not hold."""
    whole, ports = plan.leaves(carry), plan.iterate.ins[: plan.num_carry]
    return {
        (group, r): [
            block(leaf, port.held[group][1], r, plan.replicas(group)) if group in port.held else None
            for leaf, port in zip(whole, ports, strict=True)
        ]
        for group, r in plan.all_sites
    }
