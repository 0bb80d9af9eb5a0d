"""The channel between nodes: ZeroMQ over TCP.

    connector                         listener
      ── name, end, nonce ─────────────▶      hello: each proves that it knows the token, by an HMAC over both
      ◀────────── nonce, proof ───────        nonces, the channel's name and its own side; nothing else is read
      ── proof ────────────────────────▶      before that, and no message is longer than a kilobyte
      ◀────────── port, proof ─────────
      ══ a socket of the channel's own ══     number + bytes + small arrays in one frame, a frame per large array;
                                              back: how many messages were read

At most `slots` messages are unread: the receiver says how many it has read, and the sender waits for that. A peer whose
process ended is noticed at once, because its kernel closes the connection; a peer that falls silent (a cut cable, a host
without power) after `silence_s`, because its heartbeats stop. It must be longer than any pause a healthy process makes.

Sites that open several channels must open them in the same order everywhere: both ends wait for each other.
"""

import abc
import atexit
import functools
import hashlib
import hmac
import secrets
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from socket import gethostbyname
from types import TracebackType
from typing import Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

import numpy as np
import zmq

from choreo.runtime.channel import (
    ChannelError,
    ChannelStatistics,
    ChannelTimeout,
    HelloRefused,
    closed,
    end_of_channel,
    in_good_order,
    mismatch,
    pack,
    peer_lost,
    receiver_closed,
    timed_out,
)

End: TypeAlias = Literal["sender", "receiver"]
"""Which end of a channel one wants to be."""

HELLO_TIMEOUT_S, SILENCE_S, LINGER_S = 30.0, 5.0, 3.0
LARGE_BYTES = 64 * 1024
"""An array of this size travels in a frame of its own: one copy less at each end."""


class TcpOptions(TypedDict, total=False):
    """What may be said when a channel is opened, at either end."""

    slots: int
    """How many messages may be unread; the sender's word counts. 2 unless told."""
    timeout_s: float | None
    """How long to wait for a peer that lives. For ever unless told."""
    hello_timeout_s: float
    """How long to wait for the peer to come at all. 30 s unless told."""
    silence_s: float
    """After how long without a heartbeat a peer counts as lost. 5 s unless told."""


_PROTOCOL = b"choreo-channel-1"
_HEADER, _COUNT = struct.Struct("<QQ"), struct.Struct("<Q")
_FINISHED, _CLOSED, _REFUSED, _WELCOME = b"finished", b"closed", b"refused", b"welcome"
_MAX_CALLERS = 1024


class TcpListener:
    """Where other nodes call; one per process is enough."""

    def __init__(self, host: str, port: int, token: bytes):
        _check_token(token)
        self._token, self._socket = token, _context().socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, int(1000 * LINGER_S))
        self._socket.set(zmq.MAXMSGSIZE, 1024)
        try:
            self._host = gethostbyname(host)  # ZeroMQ binds to numbers only
            self._socket.bind(f"tcp://{self._host}:{port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            self._socket.close(0)
            raise ChannelError(
                f"Cannot listen at {host}:{port}: {error.strerror}.",
                fix="Choose another port (0 takes a free one), or a host name that means this machine.",
            ) from error
        self.address = f"tcp://{host}:{_port_of(self._socket)}"
        """Where to connect to."""
        self._callers: dict[bytes, _Caller] = {}
        self._proved: dict[str, _Caller] = {}
        self._refused: list[str] = []

    @classmethod
    def open(cls, host: str, port: int = 0, *, token: bytes) -> "TcpListener":
        """Listen at a port of this host, or at any free one. All who connect must know the token."""
        return cls(host, port, token)

    @overload
    def accept_channel(
        self, name: str, *, peer: str, end: Literal["receiver"] = "receiver", **options: Unpack[TcpOptions]
    ) -> "TcpReceiver": ...
    @overload
    def accept_channel(
        self, name: str, *, peer: str, end: Literal["sender"], **options: Unpack[TcpOptions]
    ) -> "TcpSender": ...
    def accept_channel(
        self, name: str, *, peer: str, end: End = "receiver", **options: Unpack[TcpOptions]
    ) -> "TcpSender | TcpReceiver":
        """Wait for whoever connects to the channel of this name, and become its `end`.

        Who does not know the token is refused and does no harm; if nobody else comes in time, the error says who it was.
        """
        _close_finished()
        hello_timeout_s = options.get("hello_timeout_s", HELLO_TIMEOUT_S)
        deadline = time.monotonic() + hello_timeout_s
        while name not in self._proved:
            if not self._socket.poll(_milliseconds(deadline)):
                raise self._nobody_came(name, peer, hello_timeout_s)
            self._answer(self._socket.recv_multipart(copy=False))
        caller = self._proved.pop(name)
        if caller.end == end:
            self._socket.send_multipart([caller.identity, _REFUSED])
            raise HelloRefused(
                f"`{peer}` at {caller.address} wants to be the {end} of channel `{name}`, and so does this site.",
                peer=peer,
                fix="This is an error in Choreo; please report it with the printed plan.",
            )
        link = self._join(caller, peer, options.get("silence_s", SILENCE_S), deadline)
        return _END_OF[end](link, peer, options)

    def close(self) -> None:
        """Listen no more; open channels stay open."""
        self._socket.close()

    def __enter__(self) -> "TcpListener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, frames: list[zmq.Frame]) -> None:
        """One step of somebody's hello; whatever is not part of one is ignored."""
        identity, *parts = (frame.bytes for frame in frames)
        if len(parts) == 4 and parts[0] == _PROTOCOL:
            self._challenge(identity, parts[1:], str(frames[-1].get("Peer-Address")))
        elif len(parts) == 1 and (caller := self._callers.pop(identity, None)):
            if hmac.compare_digest(parts[0], caller.proof(self._token, b"connector")):
                self._proved[caller.name.decode(errors="replace")] = caller
            else:
                self._refused.append(caller.address)
                self._socket.send_multipart([identity, _REFUSED])

    def _challenge(self, identity: bytes, asked: list[bytes], address: str) -> None:
        name, end, nonce = asked
        caller = _Caller(
            identity=identity,
            address=address,
            name=name,
            end="sender" if end == b"sender" else "receiver",
            nonces=nonce + secrets.token_bytes(32),
        )
        if len(self._callers) >= _MAX_CALLERS:  # who began a hello first and never went on
            self._callers.pop(next(iter(self._callers)))
        self._callers[identity] = caller
        self._socket.send_multipart([identity, caller.nonces[-32:], caller.proof(self._token, b"listener")])

    def _join(self, caller: "_Caller", peer: str, silence_s: float, deadline: float) -> "_Link":
        """Open the channel's own socket, tell its port, and take the first who proves to be the caller."""
        link = _Link(silence_s)
        link.socket.bind(f"tcp://{self._host}:*")
        port = str(_port_of(link.socket)).encode()
        proof = caller.proof(self._token, b"port " + port)
        self._socket.send_multipart([caller.identity, port, proof])
        if not link.socket.poll(_milliseconds(deadline)):
            link.close(linger_s=0.0)
            raise peer_lost(peer, 0, f"it said hello from {caller.address}, and then nothing.")
        frame = link.socket.recv(copy=False)
        if not hmac.compare_digest(frame.bytes, caller.proof(self._token, b"channel")):
            link.close(linger_s=0.0)
            raise _wrong_token(str(frame.get("Peer-Address")), peer)
        # Strangers may knock at this port, and leave; only the end of this connection concerns us.
        link.peer_fd = int(frame.get(zmq.SRCFD))
        link.socket.send(_WELCOME)
        return link

    def _nobody_came(self, name: str, peer: str, waited_s: float) -> ChannelError:
        if self._refused:
            return _wrong_token(" and ".join(sorted(set(self._refused))), peer)
        return ChannelTimeout(
            f"`{peer}` did not connect to channel `{name}` at {self.address} within {waited_s:g} s.",
            peer=peer,
            fix="Is it running, and may it reach this address?",
        )


@overload
def connect(
    address: str,
    name: str,
    token: bytes,
    *,
    peer: str,
    end: Literal["sender"] = "sender",
    **options: Unpack[TcpOptions],
) -> "TcpSender": ...
@overload
def connect(
    address: str, name: str, token: bytes, *, peer: str, end: Literal["receiver"], **options: Unpack[TcpOptions]
) -> "TcpReceiver": ...
def connect(
    address: str, name: str, token: bytes, *, peer: str, end: End = "sender", **options: Unpack[TcpOptions]
) -> "TcpSender | TcpReceiver":
    """Become the `end` of the channel of this name at a listener's address; waits until it is accepted there."""
    _check_token(token)
    _close_finished()
    deadline = time.monotonic() + options.get("hello_timeout_s", HELLO_TIMEOUT_S)
    caller = _Caller(identity=b"", address=address, name=name.encode(), end=end, nonces=secrets.token_bytes(32))
    with _context().socket(zmq.DEALER) as hello:
        hello.set(zmq.LINGER, int(1000 * LINGER_S))
        hello.set(zmq.MAXMSGSIZE, 1024)
        hello.connect(address)
        caller, port = _say_hello(hello, caller, token, peer, deadline)
    link = _Link(options.get("silence_s", SILENCE_S))
    link.socket.connect(f"{address.rpartition(':')[0]}:{port}")
    link.socket.send(caller.proof(token, b"channel"))
    if not link.socket.poll(_milliseconds(deadline)) or link.socket.recv() != _WELCOME:
        link.close(linger_s=0.0)
        raise peer_lost(peer, 0, f"it answered at {address}, but cannot be reached at port {port}.")
    return _END_OF[end](link, peer, options)


def _say_hello(hello: zmq.Socket, caller: "_Caller", token: bytes, peer: str, deadline: float) -> tuple["_Caller", int]:
    """The caller with both nonces, and the port of the channel's own socket."""

    def answer() -> list[bytes]:
        if hello.poll(_milliseconds(deadline)):
            return hello.recv_multipart()
        hello.set(zmq.LINGER, 0)
        raise ChannelTimeout(
            f"`{peer}` at {caller.address} did not accept channel `{caller.name.decode()}` in time.",
            peer=peer,
            fix="Is it running, and may this machine reach that address?",
        )

    hello.send_multipart([_PROTOCOL, caller.name, caller.end.encode(), caller.nonces])
    nonce, proof, *_ = [*answer(), b"", b""]
    caller = _Caller(
        identity=b"", address=caller.address, name=caller.name, end=caller.end, nonces=caller.nonces + nonce
    )
    if not hmac.compare_digest(proof, caller.proof(token, b"listener")):
        hello.send(_REFUSED)
        raise _wrong_token(caller.address, peer)
    hello.send(caller.proof(token, b"connector"))
    port, proof, *_ = [*answer(), b"", b""]
    if not hmac.compare_digest(proof, caller.proof(token, b"port " + port)):
        raise HelloRefused(f"`{peer}` at {caller.address} refused channel `{caller.name.decode()}`.", peer=peer)
    return caller, int(port)


@dataclass(frozen=True, kw_only=True)
class _Caller:
    """A hello, as far as it has come."""

    identity: bytes
    """ZeroMQ's name for the connection, at the listener."""
    address: str
    """Where the other side is."""
    name: bytes
    """The channel."""
    end: End
    """What the connecting side wants to be."""
    nonces: bytes
    """32 random bytes of the connector's, then 32 of the listener's."""

    def proof(self, token: bytes, says: bytes) -> bytes:
        """What only one who knows the token can say; good for this hello, this channel and this sentence alone."""
        parts = (_PROTOCOL, says, self.name, self.end.encode(), self.nonces)
        return hmac.digest(token, b"".join(_COUNT.pack(len(part)) + part for part in parts), hashlib.sha256)


def _wrong_token(address: str, peer: str) -> HelloRefused:
    return HelloRefused(
        f"Whoever is at {address} does not know the token of this run, so nothing was read from there.",
        peer=peer,
        fix="Does another run use this address? All sites of one run must be started with the same token.",
    )


def _check_token(token: bytes) -> None:
    if len(token) < 16:
        raise ChannelError(
            f"A token of {len(token)} bytes can be guessed.", fix="Use secrets.token_bytes(32), once per run."
        )


class _Link:
    """A channel's own socket, and what ZeroMQ tells about its connection."""

    def __init__(self, silence_s: float):
        self.peer_fd: int | None = None
        self.lost = False
        self.socket = _context().socket(zmq.PAIR)
        for option, value in (
            (zmq.SNDHWM, 0),  # the credit is the bound; ZeroMQ's own would block where nobody looks
            (zmq.RCVHWM, 0),
            # A channel that was cut is over. Never, though, would be wrong: then ZeroMQ drops what is still unread.
            (zmq.RECONNECT_IVL, 24 * 3600 * 1000),
            (zmq.HEARTBEAT_IVL, int(1000 * min(1.0, silence_s / 3))),
            (zmq.HEARTBEAT_TIMEOUT, int(1000 * silence_s)),
            (zmq.LINGER, int(1000 * LINGER_S)),
        ):
            self.socket.set(option, value)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def wait(self, milliseconds: int) -> bool:
        """Until a message is there or the connection is gone; False if neither comes in time."""
        for socket, _ in self._poller.poll(None if milliseconds < 0 else milliseconds):
            if socket is self._monitor:
                self._hear()
            return True
        return False

    def _hear(self) -> None:
        event, fd = struct.unpack("=Hi", self._monitor.recv_multipart()[0])
        if event == zmq.EVENT_DISCONNECTED and self.peer_fd in (None, fd) and not self.lost:
            self._poller.unregister(self._monitor)
            self.lost = True

    def next(self) -> bytes | None:
        """The first frame of the next message, if it is there."""
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def say(self, frame: bytes) -> bool:
        """Send a short word; False if there is nobody to send it to."""
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, *, linger_s: float = LINGER_S) -> None:
        while not self.lost and self._monitor.poll(0):
            self._hear()
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0 if self.lost else int(1000 * linger_s))


_E = TypeVar("_E", bound="_TcpEnd")


class _TcpEnd(abc.ABC):
    """What the two ends have in common: the link, and how to wait."""

    _idle: str
    """What a peer does that keeps this end waiting."""

    def __init__(self, link: _Link, peer: str, options: TcpOptions):
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
    """The sending end; see `choreo.runtime.channel.Sender`."""

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
        try:
            self._link.socket.send(layout.buffer, zmq.NOBLOCK | (zmq.SNDMORE if layout.large else 0))
        except zmq.Again:  # nobody is connected any more; perhaps it said goodbye
            while True:
                self._hear(self._next())
        for i in layout.large:
            self._link.socket.send(_as_bytes(arrays[i]), zmq.SNDMORE if i != layout.large[-1] else 0)
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
        # socket stays open until the receiver has read everything: see `_close_finished`.
        if self._link.say(_FINISHED):
            with _finished_lock:
                _finished.append((self._link, self._number + 1))
        else:
            self._link.close(linger_s=0.0)
        _close_finished()


class TcpReceiver(_TcpEnd):
    """The receiving end; see `choreo.runtime.channel.Receiver`."""

    _idle = "sent nothing"
    _ended = False

    def ready(self) -> bool:
        """Is there a message, or nobody left to send one?"""
        return self._ended or self._link.lost or bool(self._link.socket.poll(0, zmq.POLLIN))

    def receive(self, into: Sequence[np.ndarray]) -> None:
        """Copy the next message into these arrays; blocks until there is one."""
        layout, number, socket = self._layout(into), self._number, self._link.socket
        if self._ended:
            raise end_of_channel(self.peer, number)
        frame = self._next()
        if frame is None:
            raise self._lost()
        if frame == _FINISHED:
            self._link.say(_COUNT.pack(number + 1))
            self._ended = True
            raise end_of_channel(self.peer, number)
        rest = socket.recv_multipart(copy=False) if socket.get(zmq.RCVMORE) else []
        found = _HEADER.unpack_from(frame)
        if found != (number, layout.payload_bytes) or len(rest) != len(layout.large):
            raise mismatch(self.peer, (number, layout.payload_bytes), found)
        for i, view in layout.small:
            into[i][...] = np.ndarray(view.shape, view.dtype, frame, layout.offsets[i])
        for i, part in zip(layout.large, rest, strict=True):
            into[i][...] = np.ndarray(into[i].shape, into[i].dtype, part.buffer)
        self._number, self._bytes = number + 1, self._bytes + layout.payload_bytes
        self._link.say(_COUNT.pack(self._number))  # a sender that is gone may have left more messages to read

    def _say_goodbye(self) -> None:
        self._link.say(_CLOSED)
        self._link.close()


_END_OF: dict[End, type[TcpSender] | type[TcpReceiver]] = {"sender": TcpSender, "receiver": TcpReceiver}


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
        payload_bytes=pack(arrays).payload_bytes,
    )


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _or_never(timeout_s: float | None) -> int:
    return -1 if timeout_s is None else int(1000 * timeout_s)


def _milliseconds(deadline: float) -> int:
    return max(0, int(1000 * (deadline - time.monotonic())))


def _port_of(socket: zmq.Socket) -> int:
    endpoint = socket.get_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])


_finished: list[tuple[_Link, int]] = []
"""Links of senders that have finished, and the count that says that everything was read."""
_finished_lock = threading.Lock()


def _close_finished(wait_s: float = 0.0) -> None:
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


def _is_read(link: _Link, last: int) -> bool:
    link.wait(0)
    while (frame := link.next()) is not None:
        if frame == _CLOSED or _COUNT.unpack(frame)[0] == last:
            return True
    return link.lost


@functools.cache
def _context() -> zmq.Context:
    """The one context of this process. At exit it lets the last messages go, but not for ever."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 16384)
    atexit.register(_finish, context)
    return context


def _finish(context: zmq.Context) -> None:
    _close_finished(LINGER_S)
    context.destroy(int(1000 * LINGER_S))
