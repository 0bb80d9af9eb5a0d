"""A stream of bytes through an encrypted connection: how a coordinator talks with a worker on another host.

    coordinator                                    host of the worker
      Tunnel.reach ═══ CURVE ═══ Tunnel.dig ── relay, a thread ── socket pair ── Worker

A `Tunnel` has the methods of a stream socket that `wire.py` needs. A worker on another host is thus the same program as one
on this host: its control socket is one end of a socket pair, and a thread moves the bytes between the other end and the
tunnel. A peer whose process ended is noticed at once, one that falls silent after SILENCE_S.
"""

import contextlib
import socket
import struct
import threading

import zmq

from choreo.runtime.channels.keys import KeyPair, authenticator, show_key
from choreo.runtime.channels.sockets import (
    SILENCE_S,
    Connections,
    bind,
    connect,
    context_of_process,
    fd_of,
    milliseconds_to,
)

CHUNK_BYTES = 256 * 1024
"""The largest message. Longer data is divided; a connection that announces more is closed."""
_NUMBER = struct.Struct("<Q")
WAITING = 64
"""Messages that may wait to be transmitted."""


class Tunnel:
    """One end of it. Belongs to one thread."""

    def __init__(self):
        self.socket = context_of_process().socket(zmq.PAIR)
        for option, value in (
            (zmq.MAXMSGSIZE, _NUMBER.size + CHUNK_BYTES),
            (zmq.SNDHWM, WAITING),
            (zmq.RCVHWM, 0),  # as heartbeats need it, see `keep_alive`
            (zmq.RECONNECT_IVL, 24 * 3600 * 1000),  # a connection that was cut is over
            (zmq.HEARTBEAT_IVL, 1000),
            (zmq.HEARTBEAT_TIMEOUT, 1000 * SILENCE_S),
            (zmq.LINGER, 1000),
        ):
            self.socket.set(option, value)
        self._connections = Connections(self.socket)
        self._sent = self._received = 0
        """Messages so far. Each carries its number: CURVE does not notice one that is left out on the way."""
        self._left = memoryview(b"")
        """Bytes of the last message that nobody has asked for yet."""
        self._timeout_s: float | None = None
        self.lost = False
        """Is the connection to the peer gone?"""

    @classmethod
    def dig(cls, host: str, keys: KeyPair, coordinator: bytes) -> "tuple[Tunnel, int]":
        """The worker's end and its port, where only the owner of the public key `coordinator` gets in."""
        tunnel = cls()
        authenticator().admit_keys(tunnel.socket, keys, {coordinator: "coordinator"})
        return tunnel, bind(tunnel.socket, host)

    def await_peer(self, deadline: float) -> bool:
        """Until the coordinator has said something; False if it does not come in time."""
        came = bool(self.socket.poll(milliseconds_to(deadline)))
        authenticator().forget(self.socket)
        if came:
            self._left = self._receive()
        return came

    @classmethod
    def reach(cls, host: str, port: int, keys: KeyPair, worker: bytes, deadline: float) -> "Tunnel":
        """The coordinator's end. Raises ConnectionRefusedError if nobody with the key `worker` answers in time."""
        tunnel = cls()
        show_key(tunnel.socket, keys, worker)
        connect(tunnel.socket, host, port)
        if not tunnel._connections.await_handshake(deadline):
            tunnel.close()
            raise ConnectionRefusedError(f"nobody with the worker's key answers at {host}:{port}")
        return tunnel

    @property
    def monitor(self) -> zmq.Socket:
        """When this is ready, `check_connection`."""
        return self._connections.monitor

    @property
    def pollable(self) -> list[zmq.Socket]:
        """What to wait for, unless there is something `pending`."""
        return [self.socket, self.monitor]

    @property
    def pending(self) -> bool:
        """Are there bytes here already?"""
        return bool(self._left)

    def check_connection(self) -> None:
        """Look whether the peer's connection is gone."""
        self._connections.read_events()
        self.lost |= self._connections.peer_gone

    def settimeout(self, seconds: float | None) -> None:
        """How long `sendall` and `recv_into` may wait."""
        self._timeout_s = seconds

    def sendall(self, data: "bytes | memoryview") -> None:
        """Raises ConnectionResetError if the peer is gone."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            while not self._try_to_send(view[start : start + CHUNK_BYTES]):
                self._wait(zmq.POLLOUT)
                if self.lost:
                    raise ConnectionResetError("the connection to it ended")

    def recv_into(self, view: memoryview) -> int:
        """Take what has come, at least a byte; 0 if the peer is gone and nothing more will come.

        Raises ConnectionResetError if a message is missing: somebody on the way has left it out.
        """
        while not self._left:
            try:
                self._left = self._receive()
            except zmq.Again:
                if self.lost:
                    return 0
                self._wait(zmq.POLLIN)
        size = min(len(view), len(self._left))
        view[:size], self._left = self._left[:size], self._left[size:]
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

    def _wait(self, for_what: int) -> None:
        """Until it may go on, or the peer is gone."""
        poller = zmq.Poller()
        poller.register(self.socket, for_what)
        poller.register(self.monitor, zmq.POLLIN)
        ready = dict(poller.poll(None if self._timeout_s is None else int(1000 * self._timeout_s)))
        if not ready:
            raise TimeoutError
        if self.monitor in ready:
            self.check_connection()


def start_relay(tunnel: Tunnel, lifeline: int) -> tuple[socket.socket, threading.Thread]:
    """A socket that stands for the tunnel, for any thread, and the thread that relays; both end when the tunnel ends.

    They also end when the other end of the descriptor `lifeline` is closed: that of the agent. Whoever closes the socket and
    waits for the thread has sent everything.
    """
    ours, theirs = socket.socketpair()
    relay = threading.Thread(target=_relay, args=(tunnel, ours, lifeline), name="choreo-tunnel", daemon=True)
    relay.start()
    return theirs, relay


def _relay(tunnel: Tunnel, plain: socket.socket, lifeline: int) -> None:
    """Move bytes both ways until either end is gone, or the lifeline is cut."""
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
