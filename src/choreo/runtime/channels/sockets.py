"""ZeroMQ sockets: the context of this process, addresses, and the connections of a socket."""

import atexit
import functools
import socket
import struct
import time

import zmq

LINGER_S = 3.0
"""How long the last messages may take to be transmitted when the process exits."""

CONTROL_SILENCE_S = 6
"""A control connection counts as lost after this many seconds without any sign of the peer."""

_OPENED = (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED)
# Without the events of failed handshakes: when ZeroMQ 4.3.5 reports one for a forged frame, it overwrites errno, takes the
# failure for EAGAIN, keeps the connection, and aborts the process at the next heartbeat.
_EVENTS = functools.reduce(int.__or__, (*_OPENED, zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED))
_EVENT = struct.Struct("=Hi")


@functools.cache
def context_of_process() -> zmq.Context:
    """The ZeroMQ context of this process. At exit it waits up to LINGER_S for the last messages to be transmitted."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 16384)
    atexit.register(context.destroy, int(1000 * LINGER_S))
    return context


class Connections:
    """Follows the connections of a socket, by the events of its monitor. Make it before the socket is bound or connected.

    Strangers may connect to a bound socket and leave, so a connection is identified by its file descriptor (`fd_of` a
    message). The system reuses descriptors, and events may come late: a connection counts as open if it is open after all events.
    """

    def __init__(self, sock: zmq.Socket):
        self._sock = sock
        self.monitor = sock.get_monitor_socket(_EVENTS)
        self.open: set[int] = set()
        """Descriptors of the open connections."""
        self.connected = self.handshake_done = self.refused = False
        """For a socket that connects: has it reached a server, has the server let it in, or closed the connection?"""
        self._peer: int | None = None
        self._peer_ended = False

    def read_events(self) -> list[int]:
        """Read all events that have arrived; returns the descriptors of connections that have ended."""
        ended = []
        while self.monitor.poll(0):
            event, fd = _EVENT.unpack(self.monitor.recv_multipart()[0])
            self.connected |= event == zmq.EVENT_CONNECTED
            self.handshake_done |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event in _OPENED:
                self.open.add(fd)
            elif event == zmq.EVENT_DISCONNECTED and fd in self.open:
                self.open.remove(fd)
                self.refused |= not self.handshake_done
                self._peer_ended |= fd == self._peer
                ended.append(fd)
        return ended

    def follow(self, fd: int) -> None:
        """Declare this descriptor the connection of the peer: from now on `peer_gone` says whether that connection has ended."""
        if self._peer is None:
            self.read_events()  # older events may be about other connections with the same descriptor
            self._peer, self._peer_ended = fd, fd not in self.open

    @property
    def peer_gone(self) -> bool:
        """Has the peer's connection ended, as of the last `read_events`? Before `follow`: has every connection ended?"""
        return self._peer_ended if self._peer is not None else self.connected and not self.open

    def await_handshake(self, deadline: float) -> bool:
        """Wait until the server has let this socket in; False if the server refuses, or does not answer in time."""
        while not (self.handshake_done or self.refused) and self.monitor.poll(milliseconds_to(deadline)):
            self.read_events()
        return self.handshake_done

    def close(self) -> None:
        self._sock.disable_monitor()
        self.monitor.close(0)


def keep_alive(sock: zmq.Socket) -> None:
    """Notice a cut cable within CONTROL_SILENCE_S, by TCP keep-alive.

    ZeroMQ's heartbeats would notice a stopped process, too. But ZeroMQ 4.3.5 aborts the process if a connection with
    heartbeats breaks while RCVHWM holds its messages back, so only sockets whose RCVHWM is 0 can use heartbeats.
    """
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 2),
        (zmq.TCP_KEEPALIVE_INTVL, 1),
        (zmq.TCP_KEEPALIVE_CNT, CONTROL_SILENCE_S - 2),
        (zmq.TCP_MAXRT, 1000 * CONTROL_SILENCE_S),
    ):
        sock.set(option, value)


def fd_of(message: zmq.Frame) -> int:
    """The file descriptor of the connection that a message came through."""
    return int(message.get(zmq.SRCFD))


def endpoint(host: str, port: int | str) -> str:
    """ZeroMQ's name for a port of a host. ZeroMQ needs a numeric address, so a host name is looked up."""
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return f"tcp://[{address[0]}]:{port}" if family == socket.AF_INET6 else f"tcp://{address[0]}:{port}"


def bind(sock: zmq.Socket, host: str, port: int = 0) -> int:
    """Listen at a port of this host, or at a free port if `port` is 0; returns the port. Raises OSError."""
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
    """The time left until a deadline on the monotonic clock; 0 if it has passed."""
    return max(0, int(1000 * (deadline - time.monotonic())))
