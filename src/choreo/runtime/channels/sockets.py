"""ZeroMQ sockets: the context of this process, addresses, and the connections of a socket."""

import atexit
import functools
import socket
import struct
import time

import zmq

LINGER_S = 3.0
"""How long the last messages may take to be transmitted when the process exits."""

DEFAULT_SILENCE_S = 300.0
"""A peer counts as lost after this many seconds without any sign of it, unless `silence_s` says otherwise."""
_MOST_PROBES = 100
"""The largest number of keep-alive probes; Linux accepts up to 127."""

_OPENED = (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED)
# The events of failed handshakes are left out because of an error in ZeroMQ 4.3.5. When it reports such an event for a forged
# frame, it overwrites errno, reads the failure as EAGAIN, keeps the connection, and aborts the process at the next heartbeat.
_EVENTS = functools.reduce(int.__or__, (*_OPENED, zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED))
_EVENT = struct.Struct("=Hi")


@functools.cache
def context_of_process() -> zmq.Context:
    """The ZeroMQ context of this process. At exit, the process waits up to LINGER_S for the last messages to be transmitted."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 16384)
    atexit.register(context.destroy, int(1000 * LINGER_S))
    return context


class Connections:
    """Tracks the connections of a socket by the events of its monitor. Make this object before the socket is bound or connected.

    Any client may connect to a bound socket and leave, so a connection is identified by its file descriptor. `fd_of` returns
    the descriptor of the connection through which a message came. The system reuses descriptors, and events may come late.
    So whether a connection is open is known only after all events have been read.
    """

    def __init__(self, sock: zmq.Socket):
        self._sock = sock
        self.monitor = sock.get_monitor_socket(_EVENTS)
        self.open: set[int] = set()
        """Descriptors of the open connections."""
        self.connected = self.handshake_done = self.refused = False
        """For a socket that connects to a server: whether it has reached the server, was admitted, was refused."""
        self._peer: int | None = None
        self._peer_ended = False

    def read_events(self) -> list[int]:
        """Read all events that have arrived. Returns the descriptors of the connections that have ended."""
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
        """Set the descriptor of the peer's connection. From now on `peer_gone` says whether this connection has ended.

        Only the first call has an effect.
        """
        if self._peer is None:
            self.read_events()  # older events may be about other connections with the same descriptor
            self._peer, self._peer_ended = fd, fd not in self.open

    @property
    def peer_gone(self) -> bool:
        """Whether the peer's connection had ended when `read_events` was last called.

        Before the first call of `follow`, the peer's connection is unknown. Then this is True only for a socket that had connected
        to a server, and whose connections had all ended.
        """
        return self._peer_ended if self._peer is not None else self.connected and not self.open

    def await_handshake(self, deadline: float) -> bool:
        """Wait until the server has admitted this socket. Returns False if the server refuses, or does not answer in time."""
        while not (self.handshake_done or self.refused) and self.monitor.poll(milliseconds_to(deadline)):
            self.read_events()
        return self.handshake_done

    def close(self) -> None:
        self._sock.disable_monitor()
        self.monitor.close(0)


def keep_alive(sock: zmq.Socket, silence_s: float = DEFAULT_SILENCE_S) -> None:
    """Turn on TCP keep-alive for a socket, so that it notices a cut cable within about `silence_s` seconds.

    ZeroMQ's heartbeats would also notice a stopped process. But ZeroMQ 4.3.5 aborts the process if a connection with
    heartbeats breaks while messages wait because of the limit RCVHWM. So only sockets without this limit (0) can use heartbeats.
    """
    probing_s = max(1, round(silence_s) - 2)
    interval_s = -(-probing_s // _MOST_PROBES)
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 2),
        (zmq.TCP_KEEPALIVE_INTVL, interval_s),
        (zmq.TCP_KEEPALIVE_CNT, max(1, probing_s // interval_s)),
        (zmq.TCP_MAXRT, int(1000 * silence_s)),
    ):
        sock.set(option, value)


def fd_of(message: zmq.Frame) -> int:
    """The file descriptor of the connection that a message came through."""
    return int(message.get(zmq.SRCFD))


def endpoint(host: str, port: int | str) -> str:
    """The address of a port of a host, as ZeroMQ writes it. ZeroMQ needs a numeric address, so a host name is looked up."""
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return f"tcp://[{address[0]}]:{port}" if family == socket.AF_INET6 else f"tcp://{address[0]}:{port}"


def bind(sock: zmq.Socket, host: str, port: int = 0) -> int:
    """Listen at a port of this host, or at a free port if `port` is 0. Returns the port. Raises OSError on failure."""
    where = endpoint(host, port or "*")
    sock.set(zmq.IPV6, int("[" in where))
    try:
        sock.bind(where)
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from error
    return int(sock.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def connect(sock: zmq.Socket, host: str, port: int | str) -> None:
    """Begin to connect to a port of a host; does not wait for the connection. Raises OSError for an unknown host."""
    where = endpoint(host, port)
    sock.set(zmq.IPV6, int("[" in where))
    sock.connect(where)


def milliseconds_to(deadline: float) -> int:
    """The time left until a deadline on the monotonic clock; 0 if it has passed."""
    return max(0, int(1000 * (deadline - time.monotonic())))
