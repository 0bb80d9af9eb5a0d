"""Who lives where, and what each process sends to each other one for a transfer: the same list at both ends."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from choreo.partition.program import Move, Transfer
from choreo.runtime.engine.backend import Backend, Site
from choreo.types import GroupName


@runtime_checkable
class TwoWayChannel(Protocol):
    """The two channels between this worker and another."""

    def send(self, arrays: Sequence[np.ndarray]) -> None: ...
    def receive(self, into: Sequence[np.ndarray]) -> None: ...
    def ready(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """Who lives where."""

    me: str
    """The name of this process."""
    homes: Mapping[Site, str]
    """The process in which each site lives."""
    links: Mapping[str, TwoWayChannel] = field(default_factory=dict)
    """How to reach the other processes."""

    def replicas(self, group: GroupName) -> int:
        return sum(site[0] == group for site in self.homes)

    def here(self, group: GroupName) -> list[int]:
        return [r for (g, r), home in self.homes.items() if g == group and home == self.me]

    @property
    def sites(self) -> list[Site]:
        return [site for site, home in self.homes.items() if home == self.me]


def messages(step: Transfer, hood: Neighbourhood) -> "dict[tuple[str, str], list[Piece]]":
    """What each process sends to each other one for a transfer: the same list at both ends."""
    senders, receivers = hood.replicas(step.src), hood.replicas(step.dst)
    found: dict[tuple[str, str], list[Piece]] = {}
    for move in step.moves:
        for s, d in itertools.product(range(senders), range(receivers)):
            if overlap := _overlap(move, s, senders, d, receivers):
                ends = hood.homes[step.src, s], hood.homes[step.dst, d]
                found.setdefault(ends, []).append(Piece(move, s, d, *overlap))
    return found


@dataclass(frozen=True)
class Piece:
    """What one sender has for one receiver of a value."""

    move: Move
    sender: int
    receiver: int
    take: tuple[slice, ...]
    """Which part of what the sender holds."""
    put: tuple[slice, ...]
    """Where in what the receiver will hold."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of a value of this shape, what is sent."""
        cut = [a if b == slice(None) else b for a, b in zip(self.put, self.take, strict=True)]
        sizes = [n if c == slice(None) else c.stop - c.start for n, c in zip(whole, cut, strict=False)]
        return (*sizes, *whole[len(cut) :])


def _overlap(move: Move, s: int, senders: int, d: int, receivers: int) -> "tuple[tuple[slice, ...], ...] | None":
    """(what sender s takes, where receiver d puts it); None if it has nothing for it."""
    rank = len(move.aval.shape)
    take, put = [slice(None)] * rank, [slice(None)] * rank
    have, want = move.src_axis if senders > 1 else None, move.dst_axis if receivers > 1 else None
    if have is None and s != d * senders // receivers:
        return None  # every sender holds all of it: each sends to receivers of its own
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


def taken_type(backend: Backend, piece: "Piece", senders: int) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of what is sent of a value."""
    shape, dtype = backend.host_type(piece.move.aval)
    if piece.move.src_axis is not None:
        shape = tuple(n // senders if axis == piece.move.src_axis else n for axis, n in enumerate(shape))
    return np.empty(shape, np.bool_)[piece.take].shape, dtype


def piece_type(backend: Backend, move: Move, receivers: int) -> tuple[tuple[int, ...], np.dtype]:
    shape, dtype = backend.host_type(move.aval)
    if move.dst_axis is not None:
        shape = tuple(n // receivers if axis == move.dst_axis else n for axis, n in enumerate(shape))
    return shape, dtype
