"""The channel between machines: ZeroMQ over TCP. This file does the handshake; `tcp_ends.py` is the channel itself.

    connector                         listener
      ══ CURVE ═════════════════════════      each side demands a proof that the other has the expected key pair
      ── channel, end ─────────────────▶      hello
      ◀────────── port, ticket, keys ──       two new keys, one for each direction
      ── ticket ───────────────────────▶      goes to the new port; its socket admits only the client with the ticket
      ══ frames, sealed with the keys ══      on the new port, which serves only this channel

The two ends of a channel wait for each other. So processes that open several channels must all open them in the same order.
"""

import secrets
import time
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Unpack

import zmq

from choreo.runtime.channels.base import ChannelError, ChannelTimeout, HelloRefused, peer_lost
from choreo.runtime.channels.keys import KeyPair, authenticator, name_of, show_key, show_ticket
from choreo.runtime.channels.sockets import LINGER_S, Connections, bind, context_of_process, milliseconds_to
from choreo.runtime.channels.sockets import connect as connect_socket
from choreo.runtime.channels.tcp_ends import (
    END_OF,
    Side,
    TcpConnection,
    TcpOptions,
    TcpReceiver,
    TcpSender,
    close_finished,
)

HELLO_TIMEOUT_S = 30.0
"""How long to wait for the peer, unless `hello_timeout_s` says otherwise."""
KEY_BYTES, TICKET_BYTES = 32, 16

_HELLO, _WELCOME, _REFUSED = b"hello", b"welcome", b"refused"


class TcpListener:
    """Accepts channels from other processes. One listener can accept all channels of a process."""

    def __init__(self, host: str, port: int, keys: KeyPair):
        self.keys, self._names = keys, dict[bytes, str]()
        self._socket = context_of_process().socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, int(1000 * LINGER_S))
        self._socket.set(zmq.MAXMSGSIZE, 1024)
        authenticator().admit_keys(self._socket, keys, self._names)
        try:
            self._host, port = host, bind(self._socket, host, port)
        except OSError as error:
            self.close()
            raise ChannelError(
                f"Cannot listen at {host}:{port}: {error.strerror}.",
                fix="Choose another port (with 0, the system chooses a free port), or a host name of this machine.",
            ) from error
        self.address = f"{host}:{port}"
        """The address to connect to."""
        self._callers: dict[tuple[str, str], _Caller] = {}

    @classmethod
    def open(cls, host: str, port: int = 0, *, keys: KeyPair) -> "TcpListener":
        """Listen at a port of this host, or at a free port if `port` is 0. Nobody can connect before `admit` is called."""
        return cls(host, port, keys)

    def admit(self, names: Mapping[bytes, str]) -> None:
        """Let the processes with these public keys connect. `names` maps each public key to the name of its process."""
        self._names.update(names)

    def accept_channel(
        self, name: str, *, peer: str, end: Side = "receiver", **options: Unpack[TcpOptions]
    ) -> TcpSender | TcpReceiver:
        """Wait until `peer` connects to the channel `name`. Returns this process's end of the channel, the sender or the receiver.

        Clients without an admitted key are refused. If the peer does not connect in time, the error names these clients.
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
                f"`{peer}` at {caller.address} wants to be the {end} of channel `{name}`, but this site is the {end}.",
                peer=peer,
                fix="This is an error in Choreo; please report it with the printed plan.",
            )
        connection = self._join(caller, peer, options, deadline)
        return END_OF[end](connection, peer, options)

    def close(self) -> None:
        """Stop listening; open channels stay open."""
        if not self._socket.closed:
            authenticator().forget(self._socket)
            self._socket.close()

    def __enter__(self) -> "TcpListener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, frames: list[zmq.Frame]) -> None:
        """Keep a hello until this process accepts its channel. The name comes from the caller's key, so it cannot be faked."""
        if len(frames) == 3:
            identity, channel, end = (frame.bytes for frame in frames)
            caller = _Caller(identity, end, str(frames[-1].get("Peer-Address")))
            self._callers[name_of(frames[-1]), channel.decode(errors="replace")] = caller

    def _join(self, caller: "_Caller", peer: str, options: TcpOptions, deadline: float) -> TcpConnection:
        """Open a new socket for the channel, send its port, ticket and keys to the caller, and wait until the caller connects."""
        ticket, send_key, receive_key = secrets.token_hex(TICKET_BYTES).encode(), *_new_keys()
        connection = TcpConnection(peer, options, send_key=send_key, receive_key=receive_key)
        authenticator().admit_ticket(connection.socket, ticket)
        port = bind(connection.socket, self._host)
        self._socket.send_multipart([caller.identity, str(port).encode(), ticket, receive_key, send_key])
        try:
            if not connection.socket.poll(milliseconds_to(deadline)) or connection.receive_first() != _HELLO:
                raise peer_lost(peer, 0, f"it said hello from {caller.address}, but did not connect to the channel.")
        except ChannelError:
            authenticator().forget(connection.socket)
            connection.close(linger_s=0.0)
            raise
        authenticator().forget(connection.socket)
        connection.send_small(_WELCOME)
        return connection

    def _nobody_came(self, name: str, peer: str, waited_s: float) -> ChannelError:
        if strangers := authenticator().refused(self._socket):
            return HelloRefused(
                f"`{peer}` did not connect to channel `{name}` at {self.address}. {' and '.join(strangers)} "
                "did, but without a key of this run, so these clients were refused.",
                peer=peer,
                fix="Check whether another run uses this address.",
            )
        return ChannelTimeout(
            f"`{peer}` did not connect to channel `{name}` at {self.address} within {waited_s:g} s.",
            peer=peer,
            fix=f"Check whether `{peer}` is running, and whether its machine can reach this address.",
        )


class _Caller(NamedTuple):
    """A hello whose channel this process has not accepted yet."""

    identity: bytes
    """The name that ZeroMQ gave to the connection."""
    end: bytes
    """The end that the caller wants to be."""
    address: str
    """The caller's address."""


def _new_keys() -> tuple[bytes, bytes]:
    return secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)


def connect(
    address: str,
    name: str,
    *,
    keys: KeyPair,
    peer: str,
    peer_key: bytes,
    end: Side = "sender",
    **options: Unpack[TcpOptions],
) -> TcpSender | TcpReceiver:
    """Connect to the channel `name` at the listener of `peer`, and wait until the peer accepts the channel.

    Returns this process's end of the channel, the sender or the receiver.
    """
    close_finished()
    deadline = time.monotonic() + options.get("hello_timeout_s", HELLO_TIMEOUT_S)
    host = address.rpartition(":")[0]
    port, ticket, send_key, receive_key = _say_hello(address, name, keys, peer, peer_key, end, deadline)
    connection = TcpConnection(peer, options, send_key=send_key, receive_key=receive_key)
    try:
        show_ticket(connection.socket, ticket)
        connect_socket(connection.socket, host, port)
        connection.send_small(_HELLO)
        if not connection.socket.poll(milliseconds_to(deadline)) or connection.receive_first() != _WELCOME:
            raise peer_lost(peer, 0, f"it answered at {address}, but cannot be reached at port {port}.")
    except BaseException:
        connection.close(linger_s=0.0)
        raise
    return END_OF[end](connection, peer, options)


def _say_hello(
    address: str, name: str, keys: KeyPair, peer: str, peer_key: bytes, end: Side, deadline: float
) -> tuple[int, bytes, bytes, bytes]:
    """Ask the listener of the peer for a channel, and wait for its answer.

    Returns the port and the ticket of the channel's socket, the key for frames to the peer, and the key for frames from the peer.
    """
    host, _, port = address.rpartition(":")
    with context_of_process().socket(zmq.DEALER) as hello:
        hello.set(zmq.LINGER, 0)
        hello.set(zmq.MAXMSGSIZE, 1024)
        show_key(hello, keys, peer_key)
        connections = Connections(hello)
        try:
            connect_socket(hello, host, port)
            if not connections.await_handshake(deadline) and connections.refused:
                raise HelloRefused(
                    f"The process at {address} is not `{peer}`, or does not know this site; nothing was read from this process.",
                    peer=peer,
                    fix="Check whether another run uses this address.",
                )
        finally:
            connections.close()
        hello.send_multipart([name.encode(), end.encode()])
        if not hello.poll(milliseconds_to(deadline)):
            raise ChannelTimeout(
                f"`{peer}` at {address} did not accept channel `{name}` in time.",
                peer=peer,
                fix=f"Check whether `{peer}` is running, and whether this machine can reach its address.",
            )
        answer = hello.recv_multipart()
    if len(answer) != 4:
        raise HelloRefused(f"`{peer}` at {address} refused channel `{name}`.", peer=peer)
    return int(answer[0]), *answer[1:]  # pyright: ignore[reportReturnType]
