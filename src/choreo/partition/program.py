"""What sites do: a program in one global order, of which each site runs the steps that name its group.

    Segment   one compiled function at every replica of a group
    Transfer  values from the replicas of one group to those of another
    Loop      a scan that is split: its body again and again, at all groups that take part
    HostCall  Python on numpy arrays at every replica of a group

Since every site runs a subsequence of the same order, and a transfer stands at the same place in both, nobody can wait in a
circle. A *slot* names one piece of one value; each site has slots of its own. Nothing here imports JAX.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from choreo.host import HostFn
from choreo.types import GroupName

Slot = int
Axis = int | None
"""Which axis is cut into blocks; None for a value given whole."""


@dataclass(frozen=True)
class KeyType:
    """The type of random keys, where there is no JAX to tell."""

    impl: str
    words: int
    """How many numbers (uint32) make a key."""


@dataclass(frozen=True)
class ArrayType:
    """Shape and type of a value, in a program that has left its process; until then JAX's own `aval` tells."""

    shape: tuple[int, ...]
    dtype: np.dtype | KeyType


@dataclass(frozen=True, eq=False)
class Constant:
    """A known array, in place of a slot."""

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
    """What a segment reads."""

    slot: Slot
    stacked: bool
    """The slot holds one slice per step of the loop around: read the current one."""
    aval: Any
    """Type of what the slot holds."""
    axis: Axis
    """Along which axis it is a block of the whole; None: every replica holds the same."""
    label: str


@dataclass(frozen=True, eq=False)
class Segment:
    """One compiled function: `fn(replica index, step of the loop, *inputs) -> outputs`."""

    group: GroupName
    name: str
    """The fragments in it, joined by "+"."""
    ins: tuple[Input, ...]
    outs: tuple[Slot, ...]
    out_avals: tuple[Any, ...]
    fn: Callable[..., list[Any]]
    """The code (`code.py`): data that says what is computed, and can be called. At a worker: the same as StableHLO."""
    donated: tuple[int, ...] = ()
    """Positions of inputs whose memory the results may take over."""
    roles: tuple[str, ...] = ()
    """The roles of its fragments, in order."""
    out_axes: tuple[Axis, ...] = ()
    """Along which axis each result is a block of the whole."""
    combines: bool = False
    """Do the replicas combine values while it runs? Then they all run it at the same time."""


@dataclass(frozen=True)
class Move:
    """One value on its way between groups."""

    label: str
    aval: Any
    """Type of the whole value."""
    src: Slot
    src_axis: Axis
    """Along which axis the sender's replicas hold blocks; None: each holds all of it."""
    dst: Slot
    dst_axis: Axis
    copied: bool = True
    """Must receiver and sender have memory of their own? (Either may overwrite it.)"""


@dataclass(frozen=True)
class Transfer:
    """Values that cross from one group to another at the same time: one message."""

    src: GroupName
    dst: GroupName
    moves: tuple[Move, ...]
    lag: int | None = None
    """By how many versions what is read may be out of date; None: never, both wait for each other."""


@dataclass(frozen=True)
class LoopPart:
    """What one group holds of a split scan; pairs are (slot inside, slot outside)."""

    consts: tuple[tuple[Slot, Ref], ...] = ()
    carry: tuple[tuple[Slot, Ref, Ref, Slot | None], ...] = ()
    """(slot inside, first value outside, next value inside, slot outside for the last value)"""
    xs: tuple[tuple[Slot, Ref], ...] = ()
    """Held as they are, one slice per step: segments read the current one."""
    slices: tuple[tuple[Slot, Ref], ...] = ()
    """Of which the current slice is taken out at every step, for readers other than segments."""
    ys: tuple[tuple[Ref, Slot, Any], ...] = ()
    """What is stacked, one slice per step: (inside, outside, type of the stack)."""


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan whose roles live at different sites."""

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
    cuts: tuple[bool, ...]
    """Which operands are held whole, and are cut to the replica's environments for the call."""
    outs: tuple[Slot | None, ...]
    fn: HostFn
    shards: int = 1
    """Into how many shards the environments are divided: then the arrays are [shard, env, ...]."""


Step = Segment | Transfer | Loop | HostCall


@dataclass(frozen=True)
class Port:
    """An input or output of the whole program: which slot holds it at which group, and in which piece."""

    name: str
    aval: Any
    held: Mapping[GroupName, tuple[Ref, Axis]]


@dataclass(frozen=True, eq=False)
class Program:
    """`init` or `iterate`, for all sites."""

    name: str
    steps: tuple[Step, ...]
    ins: tuple[Port, ...]
    outs: tuple[Port, ...]


def walk(steps: tuple[Step, ...], times: int = 1) -> Iterator[tuple[Step, int]]:
    """Every step, with how often it runs."""
    for step in steps:
        yield step, times
        if isinstance(step, Loop):
            yield from walk(step.body, times * step.length)


def groups_of(step: Step) -> set[GroupName]:
    """The groups that take part in a step."""
    if isinstance(step, Transfer):
        return {step.src, step.dst}
    return set(step.parts) if isinstance(step, Loop) else {step.group}
