"""The two ends of a channel over TCP, after the handshake of `tcp.py`. Each channel has its own socket.

    sender                            receiver
      ── number + bytes + small arrays ─▶     one frame, and one more frame for each large array
      ◀──────── number of messages read ──    the credit: it tells the sender how many slots are free

Every frame, in both directions, is sealed with AES-GCM, with the keys from the handshake. Only the handshake uses CURVE,
ZeroMQ's own encryption. For large arrays, CURVE would take four times as long as AES-GCM.

When `slots` messages are unread, the sender waits for the next credit. If the peer's process ends, its kernel closes the
connection, and this end notices at once. If the peer becomes silent (a cut cable, a host without power), its heartbeats stop,
and this end notices after `silence_s` seconds. `silence_s` must be longer than any pause of a healthy process.
"""

import abc
import atexit
import functools
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

import numpy as np
import zmq
from cryptography.exceptions import InvalidTag

from choreo.runtime.channels.base import (
    ALIGNMENT,
    ChannelEnd,
    ChannelError,
    FrameForged,
    closed,
    end_of_channel,
    mismatch,
    pack,
    peer_lost,
    receiver_closed,
    timed_out,
)
from choreo.runtime.channels.cipher import TAG_BYTES, FrameCipher
from choreo.runtime.channels.sockets import DEFAULT_SILENCE_S, LINGER_S, Connections, context_of_process, fd_of

Side: TypeAlias = Literal["sender", "receiver"]
"""One of the two ends of a channel."""

LARGE_BYTES = 64 * 1024
"""Arrays of this size or larger are sent in separate frames, which saves one copy at each end."""


class TcpOptions(TypedDict, total=False):
    """Options for opening either end of a channel."""

    slot_bytes: int
    """The size of the largest message. If a larger message arrives, the connection is closed. Default: any size."""
    slots: int
    """How many messages may be unread. Only the sending end uses this option. Default: 2."""
    timeout_s: float | None
    """How long to wait for a message or for a free slot while the peer is alive. Default: forever."""
    hello_timeout_s: float
    """How long to wait for the peer to connect. Default: 30 s."""
    silence_s: float
    """The peer counts as lost after this time without a heartbeat. Default: 300 s."""


_HEADER, _COUNT = struct.Struct("<QQ"), struct.Struct("<Q")
_FINISHED, _CLOSED = b"finished", b"closed"


class TcpConnection:
    """The socket of one channel: sends and receives sealed frames, and notices when the connection ends."""

    def __init__(self, peer: str, options: TcpOptions, *, send_key: bytes, receive_key: bytes):
        """`send_key` seals the frames to the peer; `receive_key` opens the frames from the peer."""
        silence_s, slot_bytes = options.get("silence_s", DEFAULT_SILENCE_S), options.get("slot_bytes")
        self.peer, self._outgoing, self._incoming = peer, FrameCipher(send_key), FrameCipher(receive_key)
        self.lost = False
        _finish_at_exit()
        self.socket = context_of_process().socket(zmq.PAIR)
        for option, value in (
            (zmq.SNDHWM, 0),  # 0: unlimited. `slots` is the limit, and a send must not block inside ZeroMQ
            (zmq.RCVHWM, 0),
            # Wait a day before reconnecting, that is, never reconnect: a channel that was cut is lost. ZeroMQ's own value for
            # "never" is -1, but with -1 ZeroMQ drops unread messages.
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

    @property
    def pollable(self) -> list[zmq.Socket]:
        """Sockets to poll for a message, or for a connection that begins or ends."""
        return [self.socket] if self.lost else [self.socket, self._connections.monitor]

    def wait(self, milliseconds: int) -> bool:
        """Wait for a message, or for a connection that begins or ends. Returns False if neither comes in time.

        Sets `lost` if the peer's connection has ended. If `milliseconds` is negative, there is no time limit.
        """
        for socket, _ in self._poller.poll(None if milliseconds < 0 else milliseconds):
            if socket is not self.socket:
                self._check_connection()
            return True
        return False

    def _check_connection(self) -> None:
        """Set `lost` if the peer's connection has ended. Connections of other clients to this port are ignored."""
        self._connections.read_events()
        if self._connections.peer_gone:
            self._poller.unregister(self._connections.monitor)
            self.lost = True

    def receive_first(self) -> bytes | None:
        """Return the first frame of the next message, opened, or None if no message has arrived."""
        try:
            sealed = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self._connections.follow(fd_of(sealed))
        try:
            return self._incoming.open(sealed.bytes)
        except InvalidTag as error:
            raise _forged(self.peer) from error

    def receive_rest(self) -> list[zmq.Frame]:
        """Return the other frames of the message that `receive_first` began, still sealed."""
        return self.socket.recv_multipart(copy=False) if self.socket.get(zmq.RCVMORE) else []

    def open_into(self, array: np.ndarray, sealed: zmq.Frame) -> None:
        """Open a sealed large frame, and write its content into `array`, which must have the size of the content."""
        whole = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
        try:
            self._incoming.open_into(whole.reshape(-1).view(np.uint8), sealed.buffer)
        except (InvalidTag, ValueError) as error:  # ValueError: the frame and the array differ in size
            raise _forged(self.peer) from error
        if whole is not array:
            array[...] = whole

    def send_small(self, frame: "bytes | bytearray", *, more: bool = False) -> bool:
        """Seal and send a frame. Returns False if the connection is gone."""
        # A frame that cannot be sent also uses up its nonce, because two frames must never share a nonce.
        try:
            self.socket.send(self._outgoing.seal(frame), zmq.NOBLOCK | (zmq.SNDMORE if more else 0))
        except zmq.Again:
            return False
        return True

    def send_large(self, array: np.ndarray, buffer: np.ndarray, *, more: bool) -> None:
        """Seal an array into `buffer`, and send it as one more frame of the message that `send_small` began."""
        self._outgoing.seal_into(buffer, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        self.socket.send(buffer, zmq.SNDMORE if more else 0)

    def close(self, *, linger_s: float = LINGER_S) -> None:
        if not self.lost:
            self._check_connection()
        self._connections.close()
        self.socket.close(0 if self.lost else int(1000 * linger_s))


def _forged(peer: str) -> FrameForged:
    return FrameForged(
        f"A frame on the connection to `{peer}` was not sealed by `{peer}`: somebody else changed it on the way, or sent it.",
        peer=peer,
        fix="The content of the frame was not used. Find out who interferes in the network between the two hosts.",
    )


class _TcpEnd(ChannelEnd):
    """The base class of sender and receiver. It holds the connection, and waits for frames of the peer."""

    _idle: str
    """What an idle peer has done, for the error after a timeout: "read nothing" or "sent nothing"."""

    def __init__(self, connection: TcpConnection, peer: str, options: TcpOptions):
        slots = options.get("slots", 2)
        if slots < 1:
            raise ChannelError(f"A channel of {slots} slots can hold no message.", fix="Set `slots` to 1 or more.")
        super().__init__(peer, options.get("timeout_s"))
        self._connection, self._slots = connection, slots
        self._framings: dict[tuple, _Framing] = {}

    def _close(self, *, in_good_order: bool) -> None:
        self._say_goodbye() if in_good_order else self._connection.close()

    @abc.abstractmethod
    def _say_goodbye(self) -> None:
        """Tell the peer that this end was closed in good order. Close the connection as soon as no data can be lost."""

    def _framing(self, arrays: Sequence[np.ndarray]) -> "_Framing":
        if self._closed:
            raise closed(self.peer)
        key = tuple([(a.shape, a.dtype) for a in arrays])
        found = self._framings.get(key)
        return found if found is not None else self._framings.setdefault(key, _framing_of(arrays))

    def _await_frame(self) -> bytes | None:
        """Wait for the first frame of the peer's next message. Returns None if the peer is gone and all its messages were read."""
        connection, start, milliseconds = self._connection, time.perf_counter(), _or_never(self._timeout_s)
        if (frame := connection.receive_first()) is not None:
            return frame
        self._waits += 1
        try:
            while not connection.lost:
                if not connection.wait(milliseconds):
                    assert self._timeout_s is not None, "a wait without a time limit timed out"
                    raise timed_out(self.peer, self._number, self._timeout_s, self._idle)
                if (frame := connection.receive_first()) is not None:
                    return frame
            # ZeroMQ may report the end of the connection a moment before it delivers the last messages.
            connection.wait(50)
            return connection.receive_first()
        finally:
            self._wait_s += time.perf_counter() - start

    def _lost(self) -> ChannelError:
        return peer_lost(self.peer, self._number, "the connection to it ended.")


class TcpSender(_TcpEnd):
    """The sending end; see `choreo.runtime.channels.base.Sender`."""

    _idle = "read nothing"
    _read, _receiver_closed = 0, False

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Seal a message and give it to ZeroMQ. Blocks while `slots` messages are unread."""
        framing, number = self._framing(arrays), self._number
        if self._receiver_closed:
            raise receiver_closed(self.peer, number)
        while number - self._read >= self._slots:
            self._read_credit(self._await_frame())
        _HEADER.pack_into(framing.buffer, 0, number, framing.payload_bytes)
        for i, view in framing.small:
            view[...] = arrays[i]
        if not self._connection.send_small(framing.buffer, more=bool(framing.large)):
            # The receiver is gone. Read the frames that it sent before, until `_read_credit` raises.
            while True:
                self._read_credit(self._await_frame())
        for i in framing.large:
            self._connection.send_large(arrays[i], framing.sealed[i], more=i != framing.large[-1])
        self._number, self._bytes = number + 1, self._bytes + framing.payload_bytes

    def _read_credit(self, frame: bytes | None) -> None:
        """Store the number of messages that the receiver has read, from a frame of the receiver.

        Raises ReceiverClosed if `frame` is the receiver's goodbye, and PeerLost if `frame` is None.
        """
        self._receiver_closed |= frame == _CLOSED
        if self._receiver_closed:
            raise receiver_closed(self.peer, self._number)
        if frame is None:
            raise self._lost()
        (self._read,) = _COUNT.unpack(frame)

    def _say_goodbye(self) -> None:
        # If the connection were closed while acknowledgements of the receiver are on their way, data that is not transmitted
        # yet would be dropped. So the socket stays open until the receiver has read everything: see `close_finished`.
        if self._connection.send_small(_FINISHED):
            with _finished_lock:
                _finished.append((self._connection, self._number + 1))
        else:
            self._connection.close(linger_s=0.0)
        close_finished()


class TcpReceiver(_TcpEnd):
    """The receiving end; see `choreo.runtime.channels.base.Receiver`."""

    _idle = "sent nothing"
    _ended = False

    def ready(self) -> bool:
        """Return True if a message has arrived, or if the sender has finished or is gone."""
        return self._ended or self._connection.lost or bool(self._connection.socket.poll(0, zmq.POLLIN))

    @property
    def pollable(self) -> list[zmq.Socket]:
        return self._connection.pollable

    def begin_wait(self) -> bool:
        return self.ready()

    def end_wait(self) -> None:
        self._connection.wait(0)  # reads whether the connection has ended

    def receive(self, into: Sequence[np.ndarray]) -> None:
        """Copy the next message into these arrays. Blocks until a message arrives."""
        framing, number = self._framing(into), self._number
        if self._ended:
            raise end_of_channel(self.peer, number)
        frame = self._await_frame()
        if frame is None:
            raise self._lost()
        if frame == _FINISHED:
            self._connection.send_small(_COUNT.pack(number + 1))
            self._ended = True
            raise end_of_channel(self.peer, number)
        rest = self._connection.receive_rest()
        found = _HEADER.unpack_from(frame)
        if found != (number, framing.payload_bytes) or len(rest) != len(framing.large):
            raise mismatch(self.peer, (number, framing.payload_bytes), found)
        for i, view in framing.small:
            into[i][...] = np.ndarray(view.shape, view.dtype, frame, framing.offsets[i])
        for i, part in zip(framing.large, rest, strict=True):
            self._connection.open_into(into[i], part)
        self._number, self._bytes = number + 1, self._bytes + framing.payload_bytes
        # Ignore the result. If the sender is gone, the messages that it sent before can still be read.
        self._connection.send_small(_COUNT.pack(self._number))

    def _say_goodbye(self) -> None:
        self._connection.send_small(_CLOSED)
        self._connection.close()


END_OF: dict[Side, type[TcpSender] | type[TcpReceiver]] = {"sender": TcpSender, "receiver": TcpReceiver}


@dataclass(frozen=True, kw_only=True)
class _Framing:
    """How the arrays of a message are divided into frames."""

    buffer: bytearray
    """The first frame: header and small arrays."""
    small: tuple[tuple[int, np.ndarray], ...]
    """The index of each small array in the message, and its view in `buffer`."""
    offsets: dict[int, int]
    """Where each small array begins in `buffer`, by its index in the message."""
    large: tuple[int, ...]
    """The indices of the large arrays; each large array has its own frame."""
    sealed: dict[int, np.ndarray]
    """The buffer for each sealed large frame, by the index of its array in the message."""
    payload_bytes: int
    """The size of all arrays together."""


def _framing_of(arrays: Sequence[np.ndarray]) -> _Framing:
    large = tuple(i for i, array in enumerate(arrays) if array.nbytes >= LARGE_BYTES)
    small = [i for i in range(len(arrays)) if i not in large]
    packing = pack([arrays[i] for i in small], alignment=16)
    offsets = {i: _HEADER.size + offset for i, offset in zip(small, packing.offsets, strict=True)}
    buffer = bytearray(_HEADER.size + packing.packed_bytes)
    return _Framing(
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
"""For each closed sender: its connection, and the count that the receiver sends when the receiver has read everything."""
_finished_lock = threading.Lock()


def close_finished(wait_s: float = 0.0) -> None:
    """Close the connections of closed senders whose receivers have read everything or are gone.

    Waits up to `wait_s` for the other receivers.
    """
    deadline = time.monotonic() + wait_s
    with _finished_lock:
        while _finished:
            for connection, last in list(_finished):
                if _is_read(connection, last):
                    connection.close(linger_s=0.0)
                    _finished.remove((connection, last))
            if time.monotonic() >= deadline:
                return
            if _finished:
                _finished[0][0].wait(50)


@functools.cache
def _finish_at_exit() -> None:
    # Exit handlers run in reverse order: the context must register its handler first, so that the context is destroyed last.
    context_of_process()
    atexit.register(close_finished, LINGER_S)


def _is_read(connection: TcpConnection, last: int) -> bool:
    """Return True if the receiver has read everything or is gone."""
    connection.wait(0)
    try:
        while (frame := connection.receive_first()) is not None:
            if frame == _CLOSED or _COUNT.unpack(frame)[0] == last:
                return True
    except FrameForged:
        return True  # nothing more from this connection can be trusted
    return connection.lost
