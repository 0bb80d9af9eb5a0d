"""What a channel is: messages in order, from one site to one other site.

    sender.send([obs, reward]) ──▶ slot 0 │ slot 1 ──▶ receiver.receive([batch_obs[:, 2:4], batch_reward[2:4]])

A message is a sequence of arrays whose shapes and types both ends know from the plan: no schema travels, only a number
and a byte count, which the receiver checks. At most `slots` messages are unread: then `send` waits. Each end belongs to
one thread at a time.

A channel ends in one of three ways, and each has its own error: I closed it (`ChannelClosed`); the sender finished and
everything was read (`EndOfChannel`); the peer was lost (`PeerLost`, which names it). A sender whose receiver went away in
good order gets `ReceiverClosed`. Every wait ends when the peer is lost.

This module and the carriers (`shm`, `tcp`) import numpy, not JAX: a site with host environments alone stays small.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from choreo.errors import ChoreoError

ALIGNMENT = 64
"""Each array of a message begins at a multiple of this: a cache line."""


class ChannelError(ChoreoError):
    """Something about a channel; `peer` is the site at its other end."""

    @property
    def peer(self) -> str:
        return self.places.get("peer", "?")


class ChannelClosed(ChannelError):
    """It was closed at this end, and then used."""


class EndOfChannel(ChannelError):
    """The sender finished, and everything it sent was read."""


class ReceiverClosed(ChannelError):
    """The receiver closed its end in good order: nobody will read what is sent now."""


class PeerLost(ChannelError):
    """The peer died, or the connection to it was cut."""


class ChannelTimeout(ChannelError):
    """The peer lives, but nothing came (or nothing was read) for as long as `timeout_s` allows."""


class HelloRefused(ChannelError):
    """Whoever is at the other end is not the peer, or has another channel in mind."""


class FrameForged(ChannelError):
    """A frame arrived that the peer did not seal: changed on its way, or not the peer's at all."""


class MessageMismatch(ChannelError):
    """The two ends do not agree on what is sent: an error in the plan or in Choreo, not in the user's code."""


@dataclass(frozen=True, kw_only=True)
class ChannelStatistics:
    """What passed through one end so far."""

    messages: int
    """Messages sent or received."""
    bytes: int
    """Their payload."""
    waits: int
    """How often this end had to wait for the other."""
    wait_s: float
    """For how long, in all."""


@runtime_checkable
class Sender(Protocol):
    """The end that is written to. Leaving its `with` block closes it; by an error, the peer learns that it was lost."""

    peer: str
    """The receiving site."""

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy a message out. Blocks while `slots` messages are unread; the arrays may be reused when it returns."""
        ...

    def close(self) -> None:
        """Say that this was all. The receiver reads what is left, then gets EndOfChannel."""
        ...

    def statistics(self) -> ChannelStatistics: ...

    def __enter__(self) -> "Sender": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Receiver(Protocol):
    """The end that is read from. Leaving its `with` block closes it; by an error, the peer learns that it was lost."""

    peer: str
    """The sending site."""

    def receive(self, into: Sequence[np.ndarray]) -> None:
        """Copy the next message into these arrays, which may be strided views of a batch. Blocks until there is one."""
        ...

    def ready(self) -> bool:
        """Whether `receive` would return (or raise) at once."""
        ...

    def close(self) -> None:
        """Read no more. The sender gets ReceiverClosed."""
        ...

    def statistics(self) -> ChannelStatistics: ...

    def __enter__(self) -> "Receiver": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where each array of a message lies when they are written one after the other."""

    offsets: tuple[int, ...]
    """Where each array begins."""
    packed_bytes: int
    """Room for all of them, gaps included."""
    payload_bytes: int
    """Without gaps: what the receiver compares."""


def pack(arrays: Iterable[Any], *, alignment: int = ALIGNMENT) -> Packing:
    """The packing of a message of such arrays; anything with a shape and a dtype will do."""
    offsets, end, payload = [], 0, 0
    for array in arrays:
        dtype = np.dtype(array.dtype)
        if dtype.hasobject:
            raise ChannelError(
                f"An array of type {dtype} holds references to Python objects; these mean nothing in another process.",
                fix="Give the value a numeric type before it leaves its site.",
            )
        size = dtype.itemsize * int(np.prod(array.shape, dtype=np.int64))
        offsets.append(end)
        end, payload = -(-(end + size) // alignment) * alignment, payload + size
    return Packing(offsets=tuple(offsets), packed_bytes=end, payload_bytes=payload)


def message_bytes(arrays: Iterable[Any]) -> int:
    """What `slot_bytes` must be for a message of such arrays to fit."""
    return pack(arrays).packed_bytes


def in_good_order(error: BaseException | None) -> bool:
    """Whether a `with` block that ended so has finished; a site that failed must not look like one that finished."""
    return error is None or isinstance(error, EndOfChannel | ReceiverClosed)


def closed(peer: str) -> ChannelClosed:
    return ChannelClosed("This end of the channel was closed, and then used.", peer=peer)


def end_of_channel(peer: str, messages: int) -> EndOfChannel:
    return EndOfChannel(f"`{peer}` finished; its {messages} messages have all been read.", peer=peer)


def receiver_closed(peer: str, messages: int) -> ReceiverClosed:
    return ReceiverClosed(f"`{peer}` closed the channel and reads no more; {messages} messages were sent.", peer=peer)


def peer_lost(peer: str, messages: int, how: str) -> PeerLost:
    return PeerLost(
        f"`{peer}` was lost after {messages} messages: {how}",
        peer=peer,
        fix=f"Look for the error in the output of `{peer}`; if there is none, it was killed (out of memory?).",
    )


def timed_out(peer: str, messages: int, timeout_s: float, doing: str) -> ChannelTimeout:
    return ChannelTimeout(
        f"`{peer}` {doing} for {timeout_s:g} s, though it lives; {messages} messages have passed.",
        peer=peer,
        fix="It is stuck, or slower than `timeout_s` allows.",
    )


def mismatch(peer: str, expected: tuple[int, int], found: tuple[int, int]) -> MessageMismatch:
    """`expected` and `found` are (message number, bytes)."""
    return MessageMismatch(
        f"`{peer}` sent message {found[0]} of {found[1]} bytes where message {expected[0]} of {expected[1]} bytes was"
        " due: the two sites do not follow the same plan.",
        peer=peer,
        fix="This is an error in Choreo; please report it with the printed plan.",
    )
