"""The interface of a channel, which sends messages in order from one process to one other process.

    sender.send([obs, reward]) ──▶ slot 0 │ slot 1 ──▶ receiver.receive([batch_obs[:, 2:4], batch_reward[:, 2:4]])

A message is a sequence of arrays. The receiver copies them into arrays of its caller, here parts of a batch. Both ends know the
shapes and dtypes from the plan, so a message carries no schema. A message consists of the arrays, its number and its size. The
receiver checks the number and the size. A channel has room for a fixed number of unread messages, its slots. When all slots are
full, `send` waits (back-pressure). Only one thread at a time may use an end.

A channel can end in four ways. Each way has its own error, which `send` or `receive` raises:

    ChannelClosed     this end was closed before
    EndOfChannel      the sender was closed in good order, and all its messages were read
    ReceiverClosed    the receiver was closed in good order
    PeerLost          the peer failed, its process died, or the connection to it was cut

`close` closes an end *in good order*: the peer then knows that this end has finished, and was not lost. A `with` statement also
closes its end in good order, unless the statement fails; see `in_good_order`. If the statement fails, the peer gets `PeerLost`.
A `send` or `receive` that is already waiting raises these errors, too, so no end waits for a lost peer.

This module and the carriers (`shm`, `tcp`) import numpy but not JAX, so that a process that runs only Python environments
stays small.
"""

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from choreo.errors import ChoreoError

ALIGNMENT = 64
"""Each array of a message begins at a multiple of this many bytes, the size of a cache line."""


class ChannelError(ChoreoError):
    """An error of a channel. `peer` is the name of the process at the other end of the channel."""

    @property
    def peer(self) -> str:
        return self.places.get("peer", "?")


class ChannelClosed(ChannelError):
    """This end was used after it was closed."""


class EndOfChannel(ChannelError):
    """The sender was closed in good order, and all its messages were read."""


class ReceiverClosed(ChannelError):
    """The receiver was closed in good order, and will read no more messages."""


class PeerLost(ChannelError):
    """The peer died or failed, or the connection to it was cut."""


class ChannelTimeout(ChannelError):
    """The peer is alive, but this end has waited `timeout_s` seconds for it."""


class HelloRefused(ChannelError):
    """A TCP channel could not be opened: the process at the other end is not the peer, or it expects a different channel."""


class FrameForged(ChannelError):
    """A received frame was not sealed (encrypted and authenticated) by the peer: somebody else has sent or changed the frame."""


class MessageMismatch(ChannelError):
    """The two ends expect different messages. This is an error in the plan or in Choreo, not in the user's code."""


@dataclass(frozen=True, kw_only=True)
class ChannelStatistics:
    """The traffic through one end of a channel so far, and how long this end has waited."""

    messages: int
    """Messages sent or received."""
    bytes: int
    """The total payload of all messages."""
    waits: int
    """How often this end had to wait for the other end."""
    wait_s: float
    """The total time that this end has waited."""


@runtime_checkable
class Sender(Protocol):
    """The sending end of a channel. A `with` statement closes the end, in good order unless the statement fails."""

    peer: str
    """The name of the receiving process."""

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Send a message. Blocks while all slots hold unread messages. After the return, the caller may change the arrays."""
        ...

    def close(self) -> None:
        """Send no more. The receiver can still read all messages that were sent, and then gets EndOfChannel."""
        ...

    def statistics(self) -> ChannelStatistics: ...

    def __enter__(self) -> "Sender": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Receiver(Protocol):
    """The receiving end of a channel. A `with` statement closes the end, in good order unless the statement fails."""

    peer: str
    """The name of the sending process."""

    def receive(self, into: Sequence[np.ndarray]) -> None:
        """Copy the next message into these arrays, which may be strided views of a batch. Blocks until a message arrives."""
        ...

    def ready(self) -> bool:
        """Return True if a message has arrived or the sender has finished, so that `receive` does not wait.

        In shared memory, this method returns True for a lost sender only after a call of `end_wait`.
        """
        ...

    @property
    def pollable(self) -> list[Any]:
        """Sockets or descriptors to poll between `begin_wait` and `end_wait`.

        One of them becomes readable when `ready` may return True.
        """
        ...

    def begin_wait(self) -> bool:
        """Ask the sender to wake this process. Returns True if `ready` is True already; then there is no need to wait."""
        ...

    def end_wait(self) -> None:
        """End the wait that `begin_wait` has begun; see `waiting.wait_for_any`."""
        ...

    def close(self) -> None:
        """Receive no more. The sender gets ReceiverClosed."""
        ...

    def statistics(self) -> ChannelStatistics: ...

    def __enter__(self) -> "Receiver": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


_E = TypeVar("_E", bound="ChannelEnd")


class ChannelEnd(abc.ABC):
    """The base class of the ends of all carriers. It holds the statistics, and closes an end only once."""

    def __init__(self, peer: str, timeout_s: float | None):
        self.peer, self._timeout_s = peer, timeout_s
        self._number = self._bytes = self._waits = 0
        self._wait_s, self._closed = 0.0, False

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(messages=self._number, bytes=self._bytes, waits=self._waits, wait_s=self._wait_s)

    def __enter__(self: _E) -> _E:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_once(in_good_order=in_good_order(error))

    def close(self) -> None:
        """Close this end in good order. Returns at once. A receiver can still read the messages that were sent before."""
        self._close_once(in_good_order=True)

    def _close_once(self, *, in_good_order: bool) -> None:
        if not self._closed:
            self._closed = True
            self._close(in_good_order=in_good_order)

    @abc.abstractmethod
    def _close(self, *, in_good_order: bool) -> None:
        """Close this end. If not in good order, the peer must get `PeerLost`."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The position of each array in a message. The arrays are written one after the other."""

    offsets: tuple[int, ...]
    """Where each array begins."""
    packed_bytes: int
    """The size of the message with the gaps between arrays."""
    payload_bytes: int
    """The size of the message without gaps; the receiver checks it."""


def pack(arrays: Iterable[Any], *, alignment: int = ALIGNMENT) -> Packing:
    """The packing of a message of these arrays. Reads only the `shape` and `dtype` of each array."""
    offsets, end, payload = [], 0, 0
    for array in arrays:
        dtype = np.dtype(array.dtype)
        if dtype.hasobject:
            raise ChannelError(
                f"An array of type {dtype} holds references to Python objects, which are not valid in another process.",
                fix="Give the value a numeric type before it leaves its site.",
            )
        size = dtype.itemsize * int(np.prod(array.shape, dtype=np.int64))
        offsets.append(end)
        end, payload = -(-(end + size) // alignment) * alignment, payload + size
    return Packing(offsets=tuple(offsets), packed_bytes=end, payload_bytes=payload)


def message_bytes(arrays: Iterable[Any]) -> int:
    """The smallest `slot_bytes` of a channel that can send these arrays as one message."""
    return pack(arrays).packed_bytes


def in_good_order(error: BaseException | None) -> bool:
    """Return True if a `with` statement has not failed. `error` is the exception that ended the statement, or None.

    EndOfChannel and ReceiverClosed are not failures, because they say that the peer has closed its end in good order. Any other
    exception is a failure: the peer then gets PeerLost, so that it can tell a failed process from a finished one.
    """
    return error is None or isinstance(error, EndOfChannel | ReceiverClosed)


def closed(peer: str) -> ChannelClosed:
    return ChannelClosed("This end of the channel was used after it was closed.", peer=peer)


def end_of_channel(peer: str, messages: int) -> EndOfChannel:
    return EndOfChannel(f"`{peer}` finished; its {messages} messages have all been read.", peer=peer)


def receiver_closed(peer: str, messages: int) -> ReceiverClosed:
    return ReceiverClosed(
        f"`{peer}` closed the channel and reads no more messages; {messages} messages were sent.", peer=peer
    )


def peer_lost(peer: str, messages: int, how: str) -> PeerLost:
    return PeerLost(
        f"`{peer}` was lost after {messages} messages: {how}",
        peer=peer,
        fix=f"Look for the error in the output of `{peer}`; if there is none, it was killed (out of memory?).",
    )


def timed_out(peer: str, messages: int, timeout_s: float, doing: str) -> ChannelTimeout:
    return ChannelTimeout(
        f"`{peer}` {doing} for {timeout_s:g} s, but its process is alive; {messages} messages have passed so far.",
        peer=peer,
        fix=f"`{peer}` is stuck, or it is slower than `timeout_s` allows.",
    )


def mismatch(peer: str, expected: tuple[int, int], found: tuple[int, int]) -> MessageMismatch:
    """`expected` and `found` are (message number, bytes)."""
    return MessageMismatch(
        f"`{peer}` sent message {found[0]} with {found[1]} bytes, but message {expected[0]} with {expected[1]} bytes was"
        " expected: the two sites do not follow the same plan.",
        peer=peer,
        fix="This is an error in Choreo; please report it with the printed plan.",
    )
