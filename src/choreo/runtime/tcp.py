"""The channel between nodes: ZeroMQ over TCP. How two sites find each other, and know that it is the other.

    connector                         listener
      ── name, end, nonce ─────────────▶      hello: each proves that it knows the token, by an HMAC over both
      ◀────────── nonce, proof ───────        nonces, the channel's name and its own side; nothing else is read
      ── proof ────────────────────────▶      before that, and no message is longer than a kilobyte
      ◀────────── port, proof ─────────
      ══ a socket of the channel's own ══     see tcp_ends.py

Sites that open several channels must open them in the same order everywhere: both ends wait for each other.
"""

import hashlib
import hmac
import secrets
import struct
import time
from dataclasses import dataclass
from socket import gethostbyname
from types import TracebackType
from typing import Literal, Unpack, overload

import zmq

from choreo.runtime.channel import ChannelError, ChannelTimeout, HelloRefused, peer_lost
from choreo.runtime.tcp_ends import (
    END_OF,
    LINGER_S,
    End,
    Link,
    TcpOptions,
    TcpReceiver,
    TcpSender,
    close_finished,
    context_of_process,
)

HELLO_TIMEOUT_S, SILENCE_S = 30.0, 5.0

_PROTOCOL, _REFUSED, _WELCOME = b"choreo-channel-1", b"refused", b"welcome"
_LENGTH = struct.Struct("<Q")
_MAX_CALLERS = 1024


class TcpListener:
    """Where other nodes call; one per process is enough."""

    def __init__(self, host: str, port: int, token: bytes):
        _check_token(token)
        self._token, self._socket = token, context_of_process().socket(zmq.ROUTER)
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
    ) -> TcpReceiver: ...
    @overload
    def accept_channel(
        self, name: str, *, peer: str, end: Literal["sender"], **options: Unpack[TcpOptions]
    ) -> TcpSender: ...
    def accept_channel(
        self, name: str, *, peer: str, end: End = "receiver", **options: Unpack[TcpOptions]
    ) -> TcpSender | TcpReceiver:
        """Wait for whoever connects to the channel of this name, and become its `end`.

        Who does not know the token is refused and does no harm; if nobody else comes in time, the error says who it was.
        """
        close_finished()
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
        return END_OF[end](link, peer, options)

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

    def _join(self, caller: "_Caller", peer: str, silence_s: float, deadline: float) -> Link:
        """Open the channel's own socket, tell its port, and take the first who proves to be the caller."""
        link = Link(silence_s)
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
) -> TcpSender: ...
@overload
def connect(
    address: str, name: str, token: bytes, *, peer: str, end: Literal["receiver"], **options: Unpack[TcpOptions]
) -> TcpReceiver: ...
def connect(
    address: str, name: str, token: bytes, *, peer: str, end: End = "sender", **options: Unpack[TcpOptions]
) -> TcpSender | TcpReceiver:
    """Become the `end` of the channel of this name at a listener's address; waits until it is accepted there."""
    _check_token(token)
    close_finished()
    deadline = time.monotonic() + options.get("hello_timeout_s", HELLO_TIMEOUT_S)
    caller = _Caller(identity=b"", address=address, name=name.encode(), end=end, nonces=secrets.token_bytes(32))
    with context_of_process().socket(zmq.DEALER) as hello:
        hello.set(zmq.LINGER, int(1000 * LINGER_S))
        hello.set(zmq.MAXMSGSIZE, 1024)
        hello.connect(address)
        caller, port = _say_hello(hello, caller, token, peer, deadline)
    link = Link(options.get("silence_s", SILENCE_S))
    link.socket.connect(f"{address.rpartition(':')[0]}:{port}")
    link.socket.send(caller.proof(token, b"channel"))
    if not link.socket.poll(_milliseconds(deadline)) or link.socket.recv() != _WELCOME:
        link.close(linger_s=0.0)
        raise peer_lost(peer, 0, f"it answered at {address}, but cannot be reached at port {port}.")
    return END_OF[end](link, peer, options)


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
        return hmac.digest(token, b"".join(_LENGTH.pack(len(part)) + part for part in parts), hashlib.sha256)


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


def _milliseconds(deadline: float) -> int:
    return max(0, int(1000 * (deadline - time.monotonic())))


def _port_of(socket: zmq.Socket) -> int:
    endpoint = socket.get_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])
