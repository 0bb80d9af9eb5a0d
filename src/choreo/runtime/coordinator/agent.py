"""`choreo agent`: starts workers on this host when a coordinator asks for them.

    coordinator ══ CURVE ══ agent           the keys of both come from the token; a client without the token cannot connect
                ── SpawnRequest ──▶         name, environment variables, the coordinator's public key for this run
                                  worker    makes its own key pair, and admits only this coordinator (tunnel.py)
                ◀── "started" ──            the worker's port and public key
                ◀── "output", "ended" ──    the output of the worker, and its exit code; "stopped" if the agent ends

Each connection belongs to one worker. When the connection ends, the agent kills the worker and all processes that the
worker's environments have started. When the agent ends, its workers end. A message that is not a valid request is refused and
logged. CURVE is the encryption of ZeroMQ.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from choreo.errors import RunError
from choreo.runtime.channels.keys import KeyPair, authenticator
from choreo.runtime.channels.sockets import Connections, bind, context_of_process, fd_of, keep_alive
from choreo.runtime.coordinator.open_files import raise_limit

AGENT, COORDINATOR = "agent", "coordinator"
"""The labels of the two key pairs that are derived from the token."""
MAX_BYTES = 64 * 1024
"""The largest message that an agent accepts."""
OUTPUT_BYTES = 16 * 1024
"""How many bytes of a worker's output the agent sends in one message, at most."""
CHECK_S = 0.5
"""The longest time between two checks for workers that have ended without closing their output."""


def serve(address: str, port: int, token: bytes) -> int:
    """Start workers for coordinators that have the token, until Ctrl-C or SIGTERM. Both raise KeyboardInterrupt."""
    raise_limit()  # so that even many connections of unknown clients leave file descriptors for a coordinator
    agent = Agent(address, port, token)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(f"Waiting for coordinators at {address}:{agent.port}. Ctrl-C ends the agent and its workers.", flush=True)
        agent.run()
    finally:
        agent.close()
    return 0


class Agent:
    """Starts and ends workers for coordinators. One thread polls all workers and connections."""

    def __init__(self, address: str, port: int, token: bytes):
        self._socket = context_of_process().socket(zmq.ROUTER)
        for option, value in (
            (zmq.MAXMSGSIZE, MAX_BYTES),
            (zmq.RCVHWM, 16),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.LINGER, 500),
        ):
            self._socket.set(option, value)
        keep_alive(self._socket)
        coordinator = KeyPair.from_token(token, COORDINATOR)
        authenticator().admit_keys(self._socket, KeyPair.from_token(token, AGENT), {coordinator.public: COORDINATOR})
        self._connections = Connections(self._socket)
        self._workers: dict[bytes, SpawnedWorker] = {}
        """The worker of each connection. The keys are ZeroMQ's names of the connections."""
        try:
            self.port = bind(self._socket, address, port)
        except OSError as error:
            self.close()
            raise RunError(f"Cannot listen at {address}:{port}: {error.strerror}.",
                           fix="Give an --address of this machine and a free --port.") from error  # fmt: skip
        self._poller = zmq.Poller()
        for each in (self._socket, self._connections.monitor):
            self._poller.register(each, zmq.POLLIN)

    def run(self) -> None:
        """Serve coordinators forever."""
        while True:
            ready = dict(self._poller.poll(int(1000 * CHECK_S)))
            # The order matters, because the system reuses the numbers of closed file descriptors. Workers come first: the
            # descriptors in `ready` belong to workers that exist now, and a later step may close or reuse them. Ended
            # connections come before new requests: a new connection may get the descriptor of an ended connection.
            for worker in list(self._workers.values()):
                self._serve(worker, ready)
            for fd in self._connections.read_events():
                self._connection_ended(fd)
            if self._socket in ready:
                self._take_request(self._socket.recv_multipart(copy=False))

    def close(self) -> None:
        """End all workers, and tell their coordinators that the agent was stopped."""
        for worker in list(self._workers.values()):
            self._tell(worker.identity, {"kind": "stopped"})
            self._end(worker)
        authenticator().forget(self._socket)
        self._connections.close()
        self._socket.close()

    def _take_request(self, frames: list[zmq.Frame]) -> None:
        """Start the worker that a client asks for. The client has the token, but its message may still be invalid."""
        identity, peer = frames[0].bytes, str(frames[-1].get("Peer-Address"))
        try:
            if len(frames) != 2:
                raise ValueError(f"a message of {len(frames) - 1} parts")
            request = SpawnRequest.from_bytes(frames[1].bytes)
            if identity in self._workers:
                raise ValueError("a second worker over one connection")
            worker = SpawnedWorker.start(request, identity, peer, fd_of(frames[1]))
        except (ValueError, OSError) as error:
            log(f"Refused {peer}: {error!r}")
            self._tell(identity, {"kind": "refused", "why": str(error)})
            return
        self._workers[identity] = worker
        for fd in (worker.output, worker.control):
            self._poller.register(fd, zmq.POLLIN)
        log(f"{worker.title}: started, process {worker.process.pid}.")

    def _serve(self, worker: "SpawnedWorker", ready: dict[Any, int]) -> None:
        """Tell the coordinator where a worker listens, pass on its new output, and report its end."""
        if worker.control in ready:
            if contact := os.read(worker.control, 4096):  # a short text, which the worker writes at once
                self._tell(worker.identity, {"kind": "started", "pid": worker.process.pid}, contact)
            else:
                worker.control = self._close_fd(worker.control)
        if worker.output in ready:
            if data := os.read(worker.output, OUTPUT_BYTES):
                self._tell(worker.identity, {"kind": "output"}, data)
            else:
                worker.output = self._close_fd(worker.output)
        if worker.process.poll() is not None and not self._has_more(worker):
            # If the coordinator's queue is full, the message is not sent, and the next round of `run` tries again.
            if self._tell(worker.identity, {"kind": "ended", "code": worker.process.returncode}):
                self._end(worker)

    def _has_more(self, worker: "SpawnedWorker") -> bool:
        """Return True if there is still unread data of a worker that has ended."""
        poller = zmq.Poller()
        for fd in (worker.output, worker.control):
            if fd >= 0:
                poller.register(fd, zmq.POLLIN)
        # Do not wait for the end of the pipe. A process that an environment has started may hold the pipe open.
        return bool(poller.poll(0))

    def _connection_ended(self, fd: int) -> None:
        """End the worker of a connection that has ended."""
        for worker in [worker for worker in self._workers.values() if worker.fd == fd]:
            if worker.process.poll() is None:
                log(f"{worker.title}: its coordinator is gone.")
            self._end(worker)

    def _end(self, worker: "SpawnedWorker") -> None:
        """Kill a worker, close its descriptors, and remove it from `_workers`.

        Removing comes last: if Ctrl-C interrupts this function, `close` still finds the worker and ends it again.
        """
        code = worker.kill()
        log(f"{worker.title}: ended with exit code {code} after {time.monotonic() - worker.began:.0f} s.")
        if worker.output >= 0:
            worker.output = self._close_fd(worker.output)
        if worker.control >= 0:
            worker.control = self._close_fd(worker.control)
        del self._workers[worker.identity]

    def _close_fd(self, fd: int) -> int:
        """Stop polling a descriptor and close it. Returns -1, the value that stands for a closed descriptor."""
        self._poller.unregister(fd)
        os.close(fd)
        return -1

    def _tell(self, identity: bytes, header: dict[str, Any], data: bytes = b"") -> bool:
        """Send a message to a coordinator. Returns False if the coordinator's queue is full: then the message is dropped."""
        try:
            self._socket.send_multipart([identity, json.dumps(header).encode(), data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno == zmq.EHOSTUNREACH  # the coordinator is gone and needs no message, so do not try again
        return True


@dataclass(frozen=True, kw_only=True)
class SpawnRequest:
    """The worker that a coordinator asks for."""

    run: str
    """The name of the run in the agent's log."""
    name: str
    """The worker's name."""
    host: str
    """The address of this host in the coordinator's cluster. The worker listens at this address."""
    key: str
    """The coordinator's public key for this run."""
    environment: dict[str, str]
    """Environment variables of the worker, in addition to the agent's own variables."""

    @classmethod
    def from_bytes(cls, data: bytes) -> "SpawnRequest":
        """Read a request from a message. Raises ValueError if the message is not a valid request."""
        try:
            request = json.loads(data)
        except RecursionError as error:
            raise ValueError("a request that is nested too deeply") from error
        if not isinstance(request, dict) or set(request) != {"run", "name", "host", "key", "environment"}:
            raise ValueError("a request with unknown or missing fields")
        environment = request["environment"]
        if not isinstance(environment, dict):
            raise ValueError("a request without a table of variables")
        texts = [value for name, value in request.items() if name != "environment"]
        for text in (*texts, *environment, *environment.values()):
            if not isinstance(text, str) or not text.isprintable():
                raise ValueError("a request with something other than printable text")
        if len(request["key"]) != 40 or not request["key"].isascii():
            raise ValueError("a request whose key is not a public key")
        if any(not name or "=" in name for name in environment):
            raise ValueError("a request with a variable that has no name")
        return cls(**request)


@dataclass(eq=False)
class SpawnedWorker:
    """A worker that the agent has started, and the connection of the coordinator that asked for it."""

    title: str
    """The run, the coordinator and the worker, for the log."""
    identity: bytes
    """ZeroMQ's name of the connection."""
    fd: int
    """The file descriptor of the connection."""
    process: "subprocess.Popen[bytes]"
    """The worker's process."""
    output: int
    """The pipe with the worker's output, or -1 after it is closed."""
    control: int
    """A socket on which the worker sends its port and public key, or -1 after it is closed. The worker ends when the agent
    closes this socket."""
    began: float = field(default_factory=time.monotonic)
    """When the worker was started."""

    @classmethod
    def start(cls, request: SpawnRequest, identity: bytes, peer: str, fd: int) -> "SpawnedWorker":
        """Start a worker. Raises OSError or ValueError if the worker cannot be started."""
        ours, theirs = socket.socketpair()
        control, theirs_fd = ours.detach(), theirs.detach()
        output, printed = os.pipe()
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "choreo.runtime.worker",
                    "--remote",
                    request.host,
                    request.key,
                    str(theirs_fd),
                ],
                pass_fds=[theirs_fd],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env={**os.environ, **request.environment},
                start_new_session=True,
            )
        except BaseException:
            os.close(control)
            os.close(output)
            raise
        finally:
            os.close(theirs_fd)
            os.close(printed)
        title = f"run {request.run[:16]} of {peer}, `{request.name[:80]}`"
        return cls(title=title, identity=identity, fd=fd, process=process, output=output, control=control)

    def kill(self) -> int:
        """Kill the worker and the processes that its environments have started. Returns the worker's exit code."""
        with contextlib.suppress(ProcessLookupError):  # the worker has already ended
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def log(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}", flush=True)
