"""An encrypted stream of bytes between a coordinator and a worker on another host.

    coordinator                                        host of the worker
      Tunnel.connect ═══ CURVE ═══ Tunnel.listen ── relay (a thread) ── socket pair ── Worker

CURVE is the encryption of ZeroMQ. A `Tunnel` has the methods of a stream socket that `control_frames.py` needs. Every worker,
local or remote, has one end of a socket pair as its control socket. For a remote worker, a thread relays bytes between the other
end of the socket pair and the tunnel. If the peer's process ends, the tunnel notices at once. If the peer becomes silent, the
tunnel notices after `silence_s` seconds.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Collection
from typing import Any

import zmq

from choreo.runtime.channels.keys import KeyPair, authenticator, show_key
from choreo.runtime.channels.sockets import (
    DEFAULT_SILENCE_S,
    Connections,
    bind,
    context_of_process,
    fd_of,
    milliseconds_to,
)
from choreo.runtime.channels.sockets import connect as connect_socket

CHUNK_BYTES = 256 * 1024
"""The size of the largest message. Longer data is divided. A connection that announces a larger message is closed."""
CURVE_BYTES = 64
"""Room for what CURVE adds to each message (33 bytes): the limit of ZeroMQ applies to the encrypted message."""
_NUMBER = struct.Struct("<Q")
SILENCE_VARIABLE = "CHOREO_SILENCE_S"
"""The environment variable that tells a worker on another host the `silence_s` of its tunnel."""
LAST_MESSAGES_MS = 50
"""After the end of the connection: how long to wait for each message that ZeroMQ has not delivered yet."""
MAX_QUEUED = 64
"""How many messages may wait to be transmitted."""


class Tunnel:
    """One end of a tunnel. Only one thread may use it."""

    def __init__(self, silence_s: float):
        """The peer counts as lost after `silence_s` seconds without a heartbeat of ZeroMQ."""
        self.socket = context_of_process().socket(zmq.PAIR)
        for option, value in (
            (zmq.MAXMSGSIZE, _NUMBER.size + CHUNK_BYTES + CURVE_BYTES),
            (zmq.SNDHWM, MAX_QUEUED),
            (zmq.RCVHWM, 0),  # no limit: heartbeats need this, see `keep_alive`
            (zmq.RECONNECT_IVL, 24 * 3600 * 1000),  # never reconnect: a tunnel that was cut is lost
            (zmq.HEARTBEAT_IVL, 1000),
            (zmq.HEARTBEAT_TIMEOUT, int(1000 * silence_s)),
            (zmq.LINGER, 1000),
        ):
            self.socket.set(option, value)
        self._connections = Connections(self.socket)
        self._sent = self._received = 0
        """How many messages were sent and received. Each message carries its number: CURVE does not detect a missing message."""
        self._unread = memoryview(b"")
        """Bytes of the last message that `recv_into` has not returned yet."""
        self._timeout_s: float | None = None
        self.lost = False
        """True when the connection to the peer is gone."""

    @classmethod
    def listen(
        cls, host: str, keys: KeyPair, coordinator: bytes, silence_s: float = DEFAULT_SILENCE_S
    ) -> "tuple[Tunnel, int]":
        """Return the worker's end and its port. Only the owner of the public key `coordinator` can connect."""
        tunnel = cls(silence_s)
        authenticator().admit_keys(tunnel.socket, keys, {coordinator: "coordinator"})
        return tunnel, bind(tunnel.socket, host)

    def await_peer(self, deadline: float) -> bool:
        """Wait for the first bytes of the coordinator. Returns False if no bytes come in time.

        After this call, no other client can connect.
        """
        came = bool(self.socket.poll(milliseconds_to(deadline)))
        authenticator().forget(self.socket)
        if came:
            self._unread = self._receive()
        return came

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        keys: KeyPair,
        worker: bytes,
        deadline: float,
        silence_s: float = DEFAULT_SILENCE_S,
    ) -> "Tunnel":
        """Return the coordinator's end. Raises ConnectionRefusedError if the owner of the public key `worker` does not answer
        in time."""
        tunnel = cls(silence_s)
        show_key(tunnel.socket, keys, worker)
        connect_socket(tunnel.socket, host, port)
        if not tunnel._connections.await_handshake(deadline):
            tunnel.close()
            raise ConnectionRefusedError(f"nobody with the worker's key answers at {host}:{port}")
        return tunnel

    @property
    def monitor(self) -> zmq.Socket:
        """When this socket is ready, call `check_connection`."""
        return self._connections.monitor

    @property
    def pollable(self) -> list[zmq.Socket]:
        """Sockets to poll. Do not wait for them while `pending` is True."""
        return [self.socket, self.monitor]

    @property
    def pending(self) -> bool:
        """Whether `recv_into` can return bytes at once."""
        return bool(self._unread)

    def check_connection(self) -> None:
        """Set `lost` if the peer's connection has ended."""
        self._connections.read_events()
        self.lost |= self._connections.peer_gone

    def settimeout(self, seconds: float | None) -> None:
        """Set how long `sendall` and `recv_into` may wait. None means no limit."""
        self._timeout_s = seconds

    def has_bytes(self, ready: Collection[Any]) -> bool:
        """Return True if `recv_into` can return bytes, or 0, without waiting. `ready`: the ready sockets of `pollable`."""
        if self.monitor in ready:
            self.check_connection()
        return self.pending or self.lost or self.socket in ready

    def send(self, data: "bytes | memoryview", /) -> int:
        """Send the first bytes. Returns how many; raises ConnectionResetError if the peer is gone, TimeoutError after the limit."""
        part = memoryview(data).cast("B")[:CHUNK_BYTES]
        while not self._try_to_send(part):
            self._wait(zmq.POLLOUT)
            if self.lost:
                raise ConnectionResetError("the connection to it ended")
        return len(part)

    def sendall(self, data: "bytes | memoryview") -> None:
        """Send all bytes. Raises ConnectionResetError if the peer is gone."""
        view = memoryview(data).cast("B")
        while view:
            view = view[self.send(view) :]

    def recv_into(self, view: memoryview) -> int:
        """Read at least one byte into `view`. Returns the number of bytes, or 0 if the peer is gone and all bytes were read.

        Raises ConnectionResetError if a message is missing, because somebody in the network has removed it.
        """
        while not self._unread:
            try:
                self._unread = self._receive()
            except zmq.Again:
                # ZeroMQ may report the end of the connection a moment before it delivers the last messages.
                if not self.lost:
                    self._wait(zmq.POLLIN)
                elif not self.socket.poll(LAST_MESSAGES_MS):
                    return 0
        size = min(len(view), len(self._unread))
        view[:size], self._unread = self._unread[:size], self._unread[size:]
        return size

    def close(self) -> None:
        self._connections.close()
        self.socket.close(0 if self.lost else None)

    def _try_to_send(self, part: memoryview) -> bool:
        try:
            self.socket.send(_NUMBER.pack(self._sent) + part, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent += 1
        return True

    def _receive(self) -> memoryview:
        frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        self._connections.follow(fd_of(frame))
        if frame.bytes[: _NUMBER.size] != _NUMBER.pack(self._received):
            self.lost = True
            raise ConnectionResetError("a message was left out on its way")
        self._received += 1
        return memoryview(frame.bytes)[_NUMBER.size :]

    def _wait(self, event: int) -> None:
        """Wait for POLLIN or POLLOUT of the socket, or for the end of the connection. Raises TimeoutError after the limit."""
        poller = zmq.Poller()
        poller.register(self.socket, event)
        poller.register(self.monitor, zmq.POLLIN)
        ready = dict(poller.poll(None if self._timeout_s is None else int(1000 * self._timeout_s)))
        if not ready:
            raise TimeoutError
        if self.monitor in ready:
            self.check_connection()


def start_relay(tunnel: Tunnel, lifeline: int) -> tuple[socket.socket, threading.Thread]:
    """Return a plain socket to use instead of the tunnel, and the thread that relays bytes between the socket and the tunnel.

    The socket is closed and the thread ends when the tunnel ends, or when the agent closes its end of the socket whose file
    descriptor is `lifeline`. To send all bytes before the process exits, shut the socket down for writing, and join the
    thread.
    """
    ours, theirs = socket.socketpair()
    relay = threading.Thread(target=_relay, args=(tunnel, ours, lifeline), name="choreo-tunnel", daemon=True)
    relay.start()
    return theirs, relay


def _relay(tunnel: Tunnel, plain: socket.socket, lifeline: int) -> None:
    """Move bytes in both directions until one of the two ends is gone, or the lifeline is closed."""
    poller, buffer = zmq.Poller(), memoryview(bytearray(CHUNK_BYTES))
    for each in (*tunnel.pollable, plain.fileno(), lifeline):
        poller.register(each, zmq.POLLIN)
    with contextlib.closing(tunnel), plain:
        while True:
            ready = {} if tunnel.pending else dict(poller.poll())
            if tunnel.monitor in ready:
                tunnel.check_connection()
            try:
                if lifeline in ready:
                    return
                if tunnel.pending or tunnel.lost or tunnel.socket in ready:
                    size = tunnel.recv_into(buffer)
                    if not size:
                        return
                    plain.sendall(buffer[:size])
                elif plain.fileno() in ready:
                    size = plain.recv_into(buffer)
                    if not size:
                        return
                    tunnel.sendall(buffer[:size])
            except ConnectionError:
                return
