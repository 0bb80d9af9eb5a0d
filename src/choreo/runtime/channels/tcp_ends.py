"""The two ends of a channel over TCP, once both know each other: a socket of the channel's own.

    sender                            receiver
      ── number + bytes + small arrays ─▶     one frame, and one more for each large array
      ◀────────── how many were read ──

Every frame, in both directions, is sealed with AES-GCM under keys that the hello agreed on. ZeroMQ's own CURVE, which the
hello uses, would take four times as long for large arrays.

At most `slots` messages are unread: the receiver says how many it has read, and the sender waits for that. A peer whose
process ended is noticed at once, because its kernel closes the connection; a peer that falls silent (a cut cable, a host
without power) after `silence_s`, because its heartbeats stop. It must be longer than any pause a healthy process makes.
"""

import abc
import atexit
import functools
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeAlias, TypedDict, TypeVar

import numpy as np
import zmq
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from choreo.runtime.channels.base import (
    ALIGNMENT,
    ChannelError,
    ChannelStatistics,
    FrameForged,
    closed,
    end_of_channel,
    in_good_order,
    mismatch,
    pack,
    peer_lost,
    receiver_closed,
    timed_out,
)
from choreo.runtime.channels.sockets import LINGER_S, Connections, context_of_process, fd_of

ChannelEnd: TypeAlias = Literal["sender", "receiver"]
"""Which end of a channel one wants to be."""

SILENCE_S = 5.0
LARGE_BYTES = 64 * 1024
"""An array of this size travels in a frame of its own: one copy less at each end."""


class TcpOptions(TypedDict, total=False):
    """What may be said when a channel is opened, at either end."""

    slot_bytes: int
    """The size of the largest message; a connection over which more is announced is closed. Any size unless told."""
    slots: int
    """How many messages may be unread; the sender's word counts. 2 unless told."""
    timeout_s: float | None
    """How long to wait for a peer that lives. For ever unless told."""
    hello_timeout_s: float
    """How long to wait for the peer to come at all. 30 s unless told."""
    silence_s: float
    """After how long without a heartbeat a peer counts as lost. 5 s unless told."""


_HEADER, _COUNT = struct.Struct("<QQ"), struct.Struct("<Q")
_FINISHED, _CLOSED = b"finished", b"closed"
TAG_BYTES = 16
"""By how much a sealed frame is longer."""


class Seal:
    """Encrypts and authenticates the frames of one direction. The n-th sealed frame opens as the n-th, and never again."""

    def __init__(self, key: bytes):
        self._cipher, self._count = AESGCM(key), 0

    def _nonce(self) -> bytes:
        """Another one for each frame, as AES-GCM needs it. Both ends count, so it is never sent."""
        self._count += 1
        return self._count.to_bytes(12, "little")

    def close(self, frame: "bytes | bytearray") -> bytes:
        return self._cipher.encrypt(self._nonce(), frame, None)

    def close_into(self, sealed: np.ndarray, frame: np.ndarray) -> None:
        self._cipher.encrypt_into(self._nonce(), frame.data, None, sealed.data)

    def open(self, sealed: bytes) -> bytes:
        """Raises InvalidTag if this is not what the other end has sealed."""
        return self._cipher.decrypt(self._nonce(), sealed, None)

    def open_into(self, frame: np.ndarray, sealed: memoryview) -> None:
        self._cipher.decrypt_into(self._nonce(), sealed, None, frame.data)


class TcpConnection:
    """A channel's own socket, its two seals, and what ZeroMQ tells about its connection."""

    def __init__(self, peer: str, options: TcpOptions, *, seal: bytes, unseal: bytes):
        """`seal` and `unseal` are the keys for frames to the peer and from it."""
        silence_s, slot_bytes = options.get("silence_s", SILENCE_S), options.get("slot_bytes")
        self.peer, self._seal, self._unseal = peer, Seal(seal), Seal(unseal)
        self.lost = False
        _finish_at_exit()
        self.socket = context_of_process().socket(zmq.PAIR)
        for option, value in (
            (zmq.SNDHWM, 0),  # the credit is the bound; ZeroMQ's own would block where nobody looks
            (zmq.RCVHWM, 0),
            # A channel that was cut is over. Never, though, would be wrong: then ZeroMQ drops what is still unread.
            (zmq.RECONNECT_IVL, 24 * 3600 * 1000),
            (zmq.HEARTBEAT_IVL, int(1000 * min(1.0, silence_s / 3))),
            (zmq.HEARTBEAT_TIMEOUT, int(1000 * silence_s)),
            (zmq.LINGER, int(1000 * LINGER_S)),
            (zmq.MAXMSGSIZE, -1 if slot_bytes is None else slot_bytes + _HEADER.size + ALIGNMENT + TAG_BYTES),
        ):
            self.socket.set(option, value)
        self._connections = Connections(self.socket)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._connections.monitor, zmq.POLLIN)

    def wait(self, milliseconds: int) -> bool:
        """Until a message is there or the connection is gone; False if neither comes in time."""
        for socket, _ in self._poller.poll(None if milliseconds < 0 else milliseconds):
            if socket is not self.socket:
                self._hear()
            return True
        return False

    def _hear(self) -> None:
        """Is the peer's connection gone? Strangers may knock at this port, and leave; that does not concern us."""
        self._connections.hear()
        if self._connections.peer_gone:
            self._poller.unregister(self._connections.monitor)
            self.lost = True

    def next(self) -> bytes | None:
        """The first frame of the next message, if it is there."""
        try:
            sealed = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self._connections.follow(fd_of(sealed))
        try:
            return self._unseal.open(sealed.bytes)
        except InvalidTag as error:
            raise _forged(self.peer) from error

    def rest(self) -> list[zmq.Frame]:
        """The other frames of that message, sealed."""
        return self.socket.recv_multipart(copy=False) if self.socket.get(zmq.RCVMORE) else []

    def open_into(self, array: np.ndarray, sealed: zmq.Frame) -> None:
        """Unseal a large frame into an array of its size."""
        whole = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
        try:
            self._unseal.open_into(whole.reshape(-1).view(np.uint8), sealed.buffer)
        except (InvalidTag, ValueError) as error:  # ValueError: it is of another size
            raise _forged(self.peer) from error
        if whole is not array:
            array[...] = whole

    def say(self, frame: "bytes | bytearray", *, more: bool = False) -> bool:
        """Send a short frame; False if there is nobody to send it to."""
        # Sealed once, even if it is not sent: a nonce must never be used for two frames.
        try:
            self.socket.send(self._seal.close(frame), zmq.NOBLOCK | (zmq.SNDMORE if more else 0))
        except zmq.Again:
            return False
        return True

    def send_large(self, array: np.ndarray, buffer: np.ndarray, *, more: bool) -> None:
        """Send a large frame after a short one; `buffer` holds it while it is sealed."""
        self._seal.close_into(buffer, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        self.socket.send(buffer, zmq.SNDMORE if more else 0)

    def close(self, *, linger_s: float = LINGER_S) -> None:
        if not self.lost:
            self._hear()
        self._connections.close()
        self.socket.close(0 if self.lost else int(1000 * linger_s))


def _forged(peer: str) -> FrameForged:
    return FrameForged(
        f"A frame that came as from `{peer}` was not sealed by it: it was changed on its way, or somebody else sent it.",
        peer=peer,
        fix="Nothing of it was used. Somebody in the network between the two hosts interferes; find out who.",
    )


_E = TypeVar("_E", bound="_TcpEnd")


class _TcpEnd(abc.ABC):
    """What the two ends have in common: the link, and how to wait."""

    _idle: str
    """What a peer does that keeps this end waiting."""

    def __init__(self, link: TcpConnection, peer: str, options: TcpOptions):
        slots = options.get("slots", 2)
        if slots < 1:
            raise ChannelError(f"A channel of {slots} slots can hold no message.", fix="Give it one slot or more.")
        self.peer, self._link, self._slots, self._timeout_s = peer, link, slots, options.get("timeout_s")
        self._layouts: dict[tuple, _Layout] = {}
        self._number = self._bytes = self._waits = 0
        self._wait_s, self._closed = 0.0, False

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(messages=self._number, bytes=self._bytes, waits=self._waits, wait_s=self._wait_s)

    def __enter__(self: _E) -> _E:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(in_good_order=in_good_order(error))

    def close(self) -> None:
        """Tell the peer that this was all; returns at once, and what was sent can still be read."""
        self._close(in_good_order=True)

    def _close(self, *, in_good_order: bool) -> None:
        if not self._closed:
            self._closed = True
            self._say_goodbye() if in_good_order else self._link.close()

    @abc.abstractmethod
    def _say_goodbye(self) -> None: ...

    def _layout(self, arrays: Sequence[np.ndarray]) -> "_Layout":
        if self._closed:
            raise closed(self.peer)
        key = tuple([(a.shape, a.dtype) for a in arrays])
        found = self._layouts.get(key)
        return found if found is not None else self._layouts.setdefault(key, _layout_of(arrays))

    def _next(self) -> bytes | None:
        """The first frame of the peer's next message, waited for; None if the peer is gone and none will come."""
        link, start, milliseconds = self._link, time.perf_counter(), _or_never(self._timeout_s)
        if (frame := link.next()) is not None:
            return frame
        self._waits += 1
        try:
            while not link.lost:
                if not link.wait(milliseconds):
                    assert self._timeout_s is not None, "a wait without a time limit does not give up"
                    raise timed_out(self.peer, self._number, self._timeout_s, self._idle)
                if (frame := link.next()) is not None:
                    return frame
            # The news of the end may overtake the last messages by a moment.
            link.wait(50)
            return link.next()
        finally:
            self._wait_s += time.perf_counter() - start

    def _lost(self) -> ChannelError:
        return peer_lost(self.peer, self._number, "the connection to it ended.")


class TcpSender(_TcpEnd):
    """The sending end; see `choreo.runtime.channels.base.Sender`."""

    _idle = "read nothing"
    _read, _receiver_closed = 0, False

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Hand a copy to ZeroMQ; blocks while `slots` messages are unread."""
        layout, number = self._layout(arrays), self._number
        if self._receiver_closed:
            raise receiver_closed(self.peer, number)
        while number - self._read >= self._slots:
            self._hear(self._next())
        _HEADER.pack_into(layout.buffer, 0, number, layout.payload_bytes)
        for i, view in layout.small:
            view[...] = arrays[i]
        if not self._link.say(layout.buffer, more=bool(layout.large)):
            while True:  # nobody is connected any more; perhaps it said goodbye
                self._hear(self._next())
        for i in layout.large:
            self._link.send_large(arrays[i], layout.sealed[i], more=i != layout.large[-1])
        self._number, self._bytes = number + 1, self._bytes + layout.payload_bytes

    def _hear(self, frame: bytes | None) -> None:
        self._receiver_closed |= frame == _CLOSED
        if self._receiver_closed:
            raise receiver_closed(self.peer, self._number)
        if frame is None:
            raise self._lost()
        (self._read,) = _COUNT.unpack(frame)

    def _say_goodbye(self) -> None:
        # Closing a connection while acknowledgements are under way would drop what is still to be transmitted, so the
        # socket stays open until the receiver has read everything: see `close_finished`.
        if self._link.say(_FINISHED):
            with _finished_lock:
                _finished.append((self._link, self._number + 1))
        else:
            self._link.close(linger_s=0.0)
        close_finished()


class TcpReceiver(_TcpEnd):
    """The receiving end; see `choreo.runtime.channels.base.Receiver`."""

    _idle = "sent nothing"
    _ended = False

    def ready(self) -> bool:
        """Is there a message, or nobody left to send one?"""
        return self._ended or self._link.lost or bool(self._link.socket.poll(0, zmq.POLLIN))

    def receive(self, into: Sequence[np.ndarray]) -> None:
        """Copy the next message into these arrays; blocks until there is one."""
        layout, number = self._layout(into), self._number
        if self._ended:
            raise end_of_channel(self.peer, number)
        frame = self._next()
        if frame is None:
            raise self._lost()
        if frame == _FINISHED:
            self._link.say(_COUNT.pack(number + 1))
            self._ended = True
            raise end_of_channel(self.peer, number)
        rest = self._link.rest()
        found = _HEADER.unpack_from(frame)
        if found != (number, layout.payload_bytes) or len(rest) != len(layout.large):
            raise mismatch(self.peer, (number, layout.payload_bytes), found)
        for i, view in layout.small:
            into[i][...] = np.ndarray(view.shape, view.dtype, frame, layout.offsets[i])
        for i, part in zip(layout.large, rest, strict=True):
            self._link.open_into(into[i], part)
        self._number, self._bytes = number + 1, self._bytes + layout.payload_bytes
        self._link.say(_COUNT.pack(self._number))  # a sender that is gone may have left more messages to read

    def _say_goodbye(self) -> None:
        self._link.say(_CLOSED)
        self._link.close()


END_OF: dict[ChannelEnd, type[TcpSender] | type[TcpReceiver]] = {"sender": TcpSender, "receiver": TcpReceiver}


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How a message is divided into frames."""

    buffer: bytearray
    """The first frame: header and small arrays."""
    small: tuple[tuple[int, np.ndarray], ...]
    """Index and place in the first frame of each small array."""
    offsets: dict[int, int]
    """The same places, in bytes."""
    large: tuple[int, ...]
    """Indices of the arrays with a frame of their own."""
    sealed: dict[int, np.ndarray]
    """Where each of these is sealed before it is sent."""
    payload_bytes: int
    """All arrays together."""


def _layout_of(arrays: Sequence[np.ndarray]) -> _Layout:
    large = tuple(i for i, array in enumerate(arrays) if array.nbytes >= LARGE_BYTES)
    small = [i for i in range(len(arrays)) if i not in large]
    packing = pack([arrays[i] for i in small], alignment=16)
    offsets = {i: _HEADER.size + offset for i, offset in zip(small, packing.offsets, strict=True)}
    buffer = bytearray(_HEADER.size + packing.packed_bytes)
    return _Layout(
        buffer=buffer,
        small=tuple((i, np.ndarray(arrays[i].shape, arrays[i].dtype, buffer, offsets[i])) for i in small),
        offsets=offsets,
        large=large,
        sealed={i: np.empty(arrays[i].nbytes + TAG_BYTES, np.uint8) for i in large},
        payload_bytes=pack(arrays).payload_bytes,
    )


def _or_never(timeout_s: float | None) -> int:
    return -1 if timeout_s is None else int(1000 * timeout_s)


_finished: list[tuple[TcpConnection, int]] = []
"""Links of senders that have finished, and the count that says that everything was read."""
_finished_lock = threading.Lock()


def close_finished(wait_s: float = 0.0) -> None:
    """Close the links of finished senders whose receivers have read everything or are gone."""
    deadline = time.monotonic() + wait_s
    with _finished_lock:
        while _finished:
            for link, last in list(_finished):
                if _is_read(link, last):
                    link.close(linger_s=0.0)
                    _finished.remove((link, last))
            if time.monotonic() >= deadline:
                return
            if _finished:
                _finished[0][0].wait(50)


@functools.cache
def _finish_at_exit() -> None:
    context_of_process()  # it ends at exit, too; what is registered last runs first
    atexit.register(close_finished, LINGER_S)


def _is_read(link: TcpConnection, last: int) -> bool:
    link.wait(0)
    try:
        while (frame := link.next()) is not None:
            if frame == _CLOSED or _COUNT.unpack(frame)[0] == last:
                return True
    except FrameForged:
        return True  # of this connection nothing more can be believed; this end has said all it had to say
    return link.lost
