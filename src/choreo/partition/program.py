"""Programs: steps in one global order. Each site runs the steps that name its group.

    Segment   one compiled function, at every replica of a group
    Transfer  values from the replicas of one group to the replicas of another
    Loop      a scan that is split over groups: each group repeats its own part of the body
    HostCall  Python on numpy arrays, at every replica of a group

There is no deadlock: all sites run subsequences of the same order, and a transfer has the same position for sender and receiver.
A *slot* names one piece of one value; under this slot, each site stores its own array. Importing this file does not import JAX.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from choreo.host import HostFn
from choreo.types import GroupName

Slot = int
Axis = int | None
"""The axis along which a value is divided into blocks; None for the whole value."""


@dataclass(frozen=True)
class KeyType:
    """The type of random keys, for processes that do not import JAX."""

    impl: str
    """JAX's name of the generator."""
    words: int
    """How many uint32 numbers make a key."""


@dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of a value in an exported program. Before the export, steps hold JAX's own `aval` instead."""

    shape: tuple[int, ...]
    dtype: np.dtype | KeyType


@dataclass(frozen=True, eq=False)
class Constant:
    """A known array. A step can read a constant in place of a slot."""

    value: Any

    def __reduce__(self):
        if isinstance(self.value.dtype, np.dtype):
            return Constant, (np.asarray(self.value),)
        import jax

        return _constant_key, (np.asarray(jax.random.key_data(self.value)), str(jax.random.key_impl(self.value)))


def _constant_key(data: np.ndarray, impl: str) -> Constant:
    import jax

    return Constant(jax.random.wrap_key_data(jax.numpy.asarray(data), impl=impl))


Ref = Slot | Constant


@dataclass(frozen=True)
class Input:
    """One input of a segment."""

    slot: Slot
    stacked: bool
    """Does the slot hold one slice per step of the loop around the segment? Then the segment reads the current slice."""
    aval: Any
    """The type of the array in the slot."""
    axis: Axis
    """The axis along which the array is a block of the whole; None: every replica holds the same array."""
    label: str
    """The name of the value, for messages and prints."""


@dataclass(frozen=True, eq=False)
class Segment:
    """One compiled function: `fn(replica index, step of the loop, *inputs) -> outputs`."""

    group: GroupName
    name: str
    """The names of its fragments, joined by "+"; "glue" if it has none, "draws" if it only draws random numbers."""
    ins: tuple[Input, ...]
    outs: tuple[Slot, ...]
    out_avals: tuple[Any, ...]
    fn: Callable[..., list[Any]]
    """The code of the segment: callable data (`code.py`). In an exported program: the same function, as StableHLO."""
    donated: tuple[int, ...] = ()
    """Positions of the inputs whose memory the results may take over."""
    roles: tuple[str, ...] = ()
    """The roles of its fragments, in order."""
    out_axes: tuple[Axis, ...] = ()
    """The axis along which each result is a block of the whole."""
    combines: bool = False
    """Do the replicas combine values while the segment runs? Then all replicas run it at the same time."""


@dataclass(frozen=True)
class Move:
    """One value of a transfer."""

    label: str
    aval: Any
    """The type of the whole value."""
    src: Slot
    src_axis: Axis
    """The axis along which the sender's replicas hold blocks; None: each holds the whole value."""
    dst: Slot
    dst_axis: Axis
    """The axis along which the receiver's replicas hold blocks; None: each gets the whole value."""
    copied: bool = True
    """Must the receiver have its own copy? True if the sender or the receiver may overwrite the memory."""


@dataclass(frozen=True)
class Transfer:
    """Values that are sent together from one group to another: one message for each pair of processes."""

    src: GroupName
    dst: GroupName
    moves: tuple[Move, ...]
    lag: int | None = None
    """How many updates old the values may be, at most, when the receiver reads them. None (lockstep): the receiver waits for
    the current values."""


@dataclass(frozen=True)
class LoopPart:
    """The part of one group in a split scan. Pairs are (slot inside the loop, slot or constant outside)."""

    consts: tuple[tuple[Slot, Ref], ...] = ()
    carry: tuple[tuple[Slot, Ref, Ref, Slot | None], ...] = ()
    """For each carried value: (its slot inside, the first value outside, the value for the next step inside, the slot outside for
    the last value). The last slot is None if this group does not need the last value."""
    xs: tuple[tuple[Slot, Ref], ...] = ()
    """Stacks (one slice per step of the loop) that only segments read: the slot inside holds the whole stack."""
    slices: tuple[tuple[Slot, Ref], ...] = ()
    """Stacks that something other than a segment also reads, such as a host call: in every step of the loop, the slot inside
    gets the current slice."""
    ys: tuple[tuple[Ref, Slot, Any], ...] = ()
    """Results that are stacked, one slice per step: (slot or constant inside, slot outside, type of the stack)."""


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan that is split over several groups."""

    length: int
    reverse: bool
    parts: Mapping[GroupName, LoopPart]
    body: "tuple[Step, ...]"


@dataclass(frozen=True, eq=False)
class HostCall:
    """A host fragment, called on numpy arrays."""

    group: GroupName
    name: str
    ins: tuple[Ref, ...]
    sliced: tuple[bool, ...]
    """Which operands must be sliced: the site holds them whole, and the call gets the rows of the replica's environments."""
    outs: tuple[Slot | None, ...]
    fn: HostFn
    shards: int = 1
    """How many shards divide the environments; if there are several, arrays are [shard, env, ...]."""


Step = Segment | Transfer | Loop | HostCall


@dataclass(frozen=True)
class Port:
    """An input or output of the whole program: the slot and the piece in which each group holds it."""

    name: str
    aval: Any
    held: Mapping[GroupName, tuple[Ref, Axis]]


@dataclass(frozen=True, eq=False)
class Program:
    """The program of `init` or `iterate`, for all sites."""

    name: str
    steps: tuple[Step, ...]
    ins: tuple[Port, ...]
    outs: tuple[Port, ...]


def walk(steps: tuple[Step, ...], times: int = 1) -> Iterator[tuple[Step, int]]:
    """Every step, also inside of loops, with the number of times that it runs."""
    for step in steps:
        yield step, times
        if isinstance(step, Loop):
            yield from walk(step.body, times * step.length)


def groups_of(step: Step) -> set[GroupName]:
    """The groups that take part in a step."""
    if isinstance(step, Transfer):
        return {step.src, step.dst}
    return set(step.parts) if isinstance(step, Loop) else {step.group}
