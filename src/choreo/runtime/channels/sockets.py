"""ZeroMQ's sockets: the context of this process, addresses, and what becomes of a connection."""

import atexit
import functools
import socket
import struct
import time

import zmq

LINGER_S = 3.0
"""At exit, how long the last messages may take to leave."""

SILENCE_S = 6
"""After how long a connection over which nothing comes through counts as cut."""

_OPENED = (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED)
# Without the events of failed handshakes. To report one of them for a forged frame, ZeroMQ 4.3.5 overwrites errno, so it
# takes the failure for EAGAIN, keeps the connection, and aborts the process at the next heartbeat.
_EVENTS = functools.reduce(int.__or__, (*_OPENED, zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED))
_EVENT = struct.Struct("=Hi")


@functools.cache
def context_of_process() -> zmq.Context:
    """The one context of this process. At exit it lets the last messages go, but not for ever."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 16384)
    atexit.register(context.destroy, int(1000 * LINGER_S))
    return context


class Connections:
    """The connections of a socket, as its monitor reports them, in order. Made before the socket is bound or connected.

    Strangers come and go at a bound socket, so a connection is known by its descriptor (`fd_of` a message). The system gives
    a descriptor to another connection once it is free, and the monitor may lag behind: what counts is what is open after
    all reports.
    """

    def __init__(self, sock: zmq.Socket):
        self._sock = sock
        self.monitor = sock.get_monitor_socket(_EVENTS)
        self.open: set[int] = set()
        """Descriptors of those that are open."""
        self.connected = self.welcome = self.refused = False
        """Of a socket that connects: did it reach a server, did that let it in, or hang up instead?"""
        self._peer: int | None = None
        self._peer_ended = False

    def hear(self) -> list[int]:
        """Read all reports there are; returns the descriptors of connections that have ended."""
        ended = []
        while self.monitor.poll(0):
            event, fd = _EVENT.unpack(self.monitor.recv_multipart()[0])
            self.connected |= event == zmq.EVENT_CONNECTED
            self.welcome |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event in _OPENED:
                self.open.add(fd)
            elif event == zmq.EVENT_DISCONNECTED and fd in self.open:
                self.open.remove(fd)
                self.refused |= not self.welcome
                self._peer_ended |= fd == self._peer
                ended.append(fd)
        return ended

    def follow(self, fd: int) -> None:
        """This is the connection of the peer: `peer_gone` tells from now on whether it has ended."""
        if self._peer is None:
            self.hear()  # older reports are about other connections that had the same descriptor
            self._peer, self._peer_ended = fd, fd not in self.open

    @property
    def peer_gone(self) -> bool:
        """As of the last `hear`. Until a peer is followed: has a socket that was connected lost its connection?"""
        return self._peer_ended if self._peer is not None else self.connected and not self.open

    def await_welcome(self, deadline: float) -> bool:
        """Until the server has let this socket in; False if it refuses, or nothing is heard in time."""
        while not (self.welcome or self.refused) and self.monitor.poll(milliseconds_to(deadline)):
            self.hear()
        return self.welcome

    def close(self) -> None:
        self._sock.disable_monitor()
        self.monitor.close(0)


def keep_alive(sock: zmq.Socket) -> None:
    """Notice a cut cable within SILENCE_S, by the system's own means.

    ZeroMQ's heartbeats also notice a process that is stopped. But in ZeroMQ 4.3.5 they end the process if a connection breaks
    while its messages wait to be read (RCVHWM), so they are only for sockets whose RCVHWM is 0.
    """
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 2),
        (zmq.TCP_KEEPALIVE_INTVL, 1),
        (zmq.TCP_KEEPALIVE_CNT, SILENCE_S - 2),
        (zmq.TCP_MAXRT, 1000 * SILENCE_S),
    ):
        sock.set(option, value)


def fd_of(message: zmq.Frame) -> int:
    """The descriptor of the connection through which a message came."""
    return int(message.get(zmq.SRCFD))


def endpoint(host: str, port: int | str) -> str:
    """ZeroMQ's name for a port of this host; it wants numbers, so a name is looked up."""
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return f"tcp://[{address[0]}]:{port}" if family == socket.AF_INET6 else f"tcp://{address[0]}:{port}"


def bind(sock: zmq.Socket, host: str, port: int = 0) -> int:
    """Listen at a port of this host, or at a free one if `port` is 0; returns the port. Raises OSError."""
    where = endpoint(host, port or "*")
    sock.set(zmq.IPV6, int("[" in where))
    try:
        sock.bind(where)
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from error
    return int(sock.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def connect(sock: zmq.Socket, host: str, port: int | str) -> None:
    """Begin to connect to a port of a host. Raises OSError for an unknown host."""
    where = endpoint(host, port)
    sock.set(zmq.IPV6, int("[" in where))
    sock.connect(where)


def milliseconds_to(deadline: float) -> int:
    return max(0, int(1000 * (deadline - time.monotonic())))
