"""The channel between nodes: ZeroMQ over TCP. How two sites find each other, and know that it is the other.

    connector                         listener
      ══ CURVE ═════════════════════════      each proves that it has the secret key to the public key the other was told
      ── channel, end ─────────────────▶
      ◀────────── port, ticket, keys ──       two new keys, one for each direction
      ── ticket ───────────────────────▶      a socket of the channel's own, see tcp_ends.py; the ticket is good for
      ══ frames, sealed with the keys ══      one connection: whoever else comes there stays outside

Sites that open several channels must open them in the same order everywhere: both ends wait for each other.
"""

import secrets
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, NamedTuple, Unpack, overload

import zmq

from choreo.runtime.channels.base import ChannelError, ChannelTimeout, HelloRefused, peer_lost
from choreo.runtime.channels.keys import KeyPair, doorkeeper, name_of, show_key, show_ticket
from choreo.runtime.channels.sockets import LINGER_S, Connections, bind, context_of_process, milliseconds_to
from choreo.runtime.channels.sockets import connect as connect_socket
from choreo.runtime.channels.tcp_ends import (
    END_OF,
    ChannelEnd,
    TcpConnection,
    TcpOptions,
    TcpReceiver,
    TcpSender,
    close_finished,
)

HELLO_TIMEOUT_S = 30.0
KEY_BYTES, TICKET_BYTES = 32, 16

_HELLO, _WELCOME, _REFUSED = b"hello", b"welcome", b"refused"


class TcpListener:
    """Where other sites call; one per process is enough."""

    def __init__(self, host: str, port: int, keys: KeyPair):
        self.keys, self._names = keys, dict[bytes, str]()
        self._socket = context_of_process().socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, int(1000 * LINGER_S))
        self._socket.set(zmq.MAXMSGSIZE, 1024)
        doorkeeper().admit_keys(self._socket, keys, self._names)
        try:
            self._host, port = host, bind(self._socket, host, port)
        except OSError as error:
            self.close()
            raise ChannelError(
                f"Cannot listen at {host}:{port}: {error.strerror}.",
                fix="Choose another port (0 takes a free one), or a host name that means this machine.",
            ) from error
        self.address = f"{host}:{port}"
        """Where to connect to."""
        self._callers: dict[tuple[str, str], _Caller] = {}

    @classmethod
    def open(cls, host: str, port: int = 0, *, keys: KeyPair) -> "TcpListener":
        """Listen at a port of this host, or at any free one. Nobody gets in before `admit`."""
        return cls(host, port, keys)

    def admit(self, names: Mapping[bytes, str]) -> None:
        """Let the sites in that have these public keys, under these names."""
        self._names.update(names)

    @overload
    def accept_channel(
        self, name: str, *, peer: str, end: Literal["receiver"] = "receiver", **options: Unpack[TcpOptions]
    ) -> TcpReceiver: ...
    @overload
    def accept_channel(
        self, name: str, *, peer: str, end: Literal["sender"], **options: Unpack[TcpOptions]
    ) -> TcpSender: ...
    def accept_channel(
        self, name: str, *, peer: str, end: ChannelEnd = "receiver", **options: Unpack[TcpOptions]
    ) -> TcpSender | TcpReceiver:
        """Wait for the site `peer` to connect to the channel of this name, and become its `end`.

        Strangers are refused and do no harm; if nobody else comes in time, the error says who it was.
        """
        close_finished()
        hello_timeout_s = options.get("hello_timeout_s", HELLO_TIMEOUT_S)
        deadline = time.monotonic() + hello_timeout_s
        while (peer, name) not in self._callers:
            if not self._socket.poll(milliseconds_to(deadline)):
                raise self._nobody_came(name, peer, hello_timeout_s)
            self._note(self._socket.recv_multipart(copy=False))
        caller = self._callers.pop((peer, name))
        if caller.end == end.encode():
            self._socket.send_multipart([caller.identity, _REFUSED])
            raise HelloRefused(
                f"`{peer}` at {caller.address} wants to be the {end} of channel `{name}`, and so does this site.",
                peer=peer,
                fix="This is an error in Choreo; please report it with the printed plan.",
            )
        link = self._join(caller, peer, options, deadline)
        return END_OF[end](link, peer, options)

    def close(self) -> None:
        """Listen no more; open channels stay open."""
        if not self._socket.closed:
            doorkeeper().forget(self._socket)
            self._socket.close()

    def __enter__(self) -> "TcpListener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, frames: list[zmq.Frame]) -> None:
        """Somebody's hello. Its name is the one that belongs to its key, so a site can only call as itself."""
        if len(frames) == 3:
            identity, channel, end = (frame.bytes for frame in frames)
            caller = _Caller(identity, end, str(frames[-1].get("Peer-Address")))
            self._callers[name_of(frames[-1]), channel.decode(errors="replace")] = caller

    def _join(self, caller: "_Caller", peer: str, options: TcpOptions, deadline: float) -> TcpConnection:
        """Open the channel's own socket, tell its port, ticket and keys, and wait for the caller to come there."""
        ticket, seal, unseal = secrets.token_hex(TICKET_BYTES).encode(), *_new_keys()
        link = TcpConnection(peer, options, seal=seal, unseal=unseal)
        doorkeeper().admit_ticket(link.socket, ticket)
        port = bind(link.socket, self._host)
        self._socket.send_multipart([caller.identity, str(port).encode(), ticket, unseal, seal])
        try:
            if not link.socket.poll(milliseconds_to(deadline)) or link.next() != _HELLO:
                raise peer_lost(peer, 0, f"it said hello from {caller.address}, and then nothing.")
        except ChannelError:
            link.close(linger_s=0.0)
            raise
        finally:
            doorkeeper().forget(link.socket)
        link.say(_WELCOME)
        return link

    def _nobody_came(self, name: str, peer: str, waited_s: float) -> ChannelError:
        if strangers := doorkeeper().refused(self._socket):
            return HelloRefused(
                f"`{peer}` did not connect to channel `{name}` at {self.address}; {' and '.join(strangers)} "
                "did, without a key of this run, so nothing was read from there.",
                peer=peer,
                fix="Does another run use this address?",
            )
        return ChannelTimeout(
            f"`{peer}` did not connect to channel `{name}` at {self.address} within {waited_s:g} s.",
            peer=peer,
            fix="Is it running, and may it reach this address?",
        )


class _Caller(NamedTuple):
    """A hello that waits for this site to accept the channel."""

    identity: bytes
    """ZeroMQ's name for the connection."""
    end: bytes
    """What the connecting side wants to be."""
    address: str
    """Where it is."""


def _new_keys() -> tuple[bytes, bytes]:
    return secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)


@overload
def connect(
    address: str,
    name: str,
    *,
    keys: KeyPair,
    peer: str,
    peer_key: bytes,
    end: Literal["sender"] = "sender",
    **options: Unpack[TcpOptions],
) -> TcpSender: ...
@overload
def connect(
    address: str,
    name: str,
    *,
    keys: KeyPair,
    peer: str,
    peer_key: bytes,
    end: Literal["receiver"],
    **options: Unpack[TcpOptions],
) -> TcpReceiver: ...
def connect(
    address: str,
    name: str,
    *,
    keys: KeyPair,
    peer: str,
    peer_key: bytes,
    end: ChannelEnd = "sender",
    **options: Unpack[TcpOptions],
) -> TcpSender | TcpReceiver:
    """Become the `end` of the channel of this name at the listener of `peer`; waits until it is accepted there."""
    close_finished()
    deadline = time.monotonic() + options.get("hello_timeout_s", HELLO_TIMEOUT_S)
    host = address.rpartition(":")[0]
    port, ticket, seal, unseal = _say_hello(address, name, keys, peer, peer_key, end, deadline)
    link = TcpConnection(peer, options, seal=seal, unseal=unseal)
    show_ticket(link.socket, ticket)
    connect_socket(link.socket, host, port)
    link.say(_HELLO)
    if not link.socket.poll(milliseconds_to(deadline)) or link.next() != _WELCOME:
        link.close(linger_s=0.0)
        raise peer_lost(peer, 0, f"it answered at {address}, but cannot be reached at port {port}.")
    return END_OF[end](link, peer, options)


def _say_hello(
    address: str, name: str, keys: KeyPair, peer: str, peer_key: bytes, end: ChannelEnd, deadline: float
) -> tuple[int, bytes, bytes, bytes]:
    """Port and ticket of the channel's own socket, and the keys for frames to the peer and from it."""
    host, _, port = address.rpartition(":")
    with context_of_process().socket(zmq.DEALER) as hello:
        hello.set(zmq.LINGER, 0)
        hello.set(zmq.MAXMSGSIZE, 1024)
        show_key(hello, keys, peer_key)
        connections = Connections(hello)
        try:
            connect_socket(hello, host, port)
            if not connections.await_welcome(deadline) and connections.refused:
                raise HelloRefused(
                    f"Whoever is at {address} is not `{peer}`, or does not know this site; nothing was read from there.",
                    peer=peer,
                    fix="Does another run use this address?",
                )
        finally:
            connections.close()
        hello.send_multipart([name.encode(), end.encode()])
        if not hello.poll(milliseconds_to(deadline)):
            raise ChannelTimeout(
                f"`{peer}` at {address} did not accept channel `{name}` in time.",
                peer=peer,
                fix="Is it running, and may this machine reach that address?",
            )
        answer = hello.recv_multipart()
    if len(answer) != 4:
        raise HelloRefused(f"`{peer}` at {address} refused channel `{name}`.", peer=peer)
    return int(answer[0]), *answer[1:]  # pyright: ignore[reportReturnType]
