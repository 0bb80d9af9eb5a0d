"""The process of each site, and the messages that a transfer sends between processes.

A message is a list of overlaps. An overlap is the part of a value that one sender holds and one receiver needs. Sender and
receiver compute the same list from the plan, so a message carries no description of its contents.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from choreo.partition.program import Move, Transfer
from choreo.runtime.engine.backend import Backend, Site
from choreo.types import GroupName


@runtime_checkable
class TwoWayChannel(Protocol):
    """The channels from this process to another process and back; see `channels.base`."""

    def send(self, arrays: Sequence[np.ndarray]) -> None: ...
    def receive(self, into: Sequence[np.ndarray]) -> None: ...
    def ready(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The process of every site, and the channels from this process to the others."""

    me: str
    """The name of this process."""
    process_of_site: Mapping[Site, str]
    """The name of the process that runs each site."""
    links: Mapping[str, TwoWayChannel] = field(default_factory=dict)
    """For every other process, by its name: the channels to it and from it. Bundles have separate channels under a longer name:
    see `bundles.BUNDLE`."""
    wait_for_any: Callable[[Sequence[str]], None] | None = None
    """Waits until the channel from one of these processes may be ready. None if this process has no channels."""

    def replicas(self, group: GroupName) -> int:
        """How many replicas a group has, counted over all processes."""
        return sum(site[0] == group for site in self.process_of_site)

    def here(self, group: GroupName) -> list[int]:
        """The replicas of a group in this process."""
        return [r for (g, r), process in self.process_of_site.items() if g == group and process == self.me]

    @property
    def sites(self) -> list[Site]:
        """All sites of this process."""
        return [site for site, process in self.process_of_site.items() if process == self.me]


def messages(step: Transfer, topology: Topology) -> "dict[tuple[str, str], list[Overlap]]":
    """For each pair (sending process, receiving process), the message that a transfer sends between the two."""
    senders, receivers = topology.replicas(step.src), topology.replicas(step.dst)
    found: dict[tuple[str, str], list[Overlap]] = {}
    for move in step.moves:
        for s, d in itertools.product(range(senders), range(receivers)):
            if indices := _overlap(move, s, senders, d, receivers):
                ends = topology.process_of_site[step.src, s], topology.process_of_site[step.dst, d]
                found.setdefault(ends, []).append(Overlap(move, s, d, *indices))
    return found


@dataclass(frozen=True)
class Overlap:
    """The part of a value that one sending replica holds and one receiving replica needs."""

    move: Move
    """The value."""
    sender: int
    """The sending replica."""
    receiver: int
    """The receiving replica."""
    take: tuple[slice, ...]
    """The index that selects this part in the piece of the sender."""
    put: tuple[slice, ...]
    """The index that selects this part in the piece of the receiver."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part. `whole` is the shape of the whole value."""
        index = [a if b == slice(None) else b for a, b in zip(self.put, self.take, strict=True)]
        sizes = [n if c == slice(None) else c.stop - c.start for n, c in zip(whole, index, strict=False)]
        return (*sizes, *whole[len(index) :])


def _overlap(move: Move, s: int, senders: int, d: int, receivers: int) -> "tuple[tuple[slice, ...], ...] | None":
    """Return `Overlap.take` and `Overlap.put` for sender `s` and receiver `d`, or None if `s` sends nothing to `d`."""
    rank = len(move.aval.shape)
    take, put = [slice(None)] * rank, [slice(None)] * rank
    have, want = move.src_axis if senders > 1 else None, move.dst_axis if receivers > 1 else None
    if have is None and s != d * senders // receivers:
        return None  # every sender holds the whole value, and each receiver gets the value from only one sender
    if have is not None and have == want:
        total = move.aval.shape[have]
        low = max(s * total // senders, d * total // receivers)
        high = min((s + 1) * total // senders, (d + 1) * total // receivers)
        if low >= high:
            return None
        take[have] = slice(low - s * total // senders, high - s * total // senders)
        put[have] = slice(low - d * total // receivers, high - d * total // receivers)
    else:
        if have is not None:
            size = move.aval.shape[have] // senders
            put[have] = slice(s * size, (s + 1) * size)
        if want is not None:
            size = move.aval.shape[want] // receivers
            take[want] = slice(d * size, (d + 1) * size)
    return tuple(take), tuple(put)


def sent_type(backend: Backend, overlap: "Overlap", senders: int) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of the array that is sent for an overlap. `senders` is the number of sending replicas."""
    shape, dtype = backend.host_type(overlap.move.aval)
    if overlap.move.src_axis is not None:
        shape = tuple(n // senders if axis == overlap.move.src_axis else n for axis, n in enumerate(shape))
    return np.empty(shape, np.bool_)[overlap.take].shape, dtype


def received_type(backend: Backend, move: Move, receivers: int) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of the piece that each receiving replica gets. `receivers` is the number of receiving replicas."""
    shape, dtype = backend.host_type(move.aval)
    if move.dst_axis is not None:
        shape = tuple(n // receivers if axis == move.dst_axis else n for axis, n in enumerate(shape))
    return shape, dtype
