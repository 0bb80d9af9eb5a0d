"""`choreo agent`: starts workers on this host whenever a coordinator asks.

    coordinator ══ CURVE ══ agent           both keys come from the token; whoever does not know it gets no connection
                ── "spawn" ──▶              name, environment variables, the coordinator's public key for this run
                                  worker    makes a key pair of its own, listens for that coordinator alone (tunnel.py)
                ◀── "started" ──            its port and its public key
                ◀── "output", "ended" ──    what it prints, and its exit code; "stopped" if the agent ends

One connection stands for one worker: when it ends, so does the worker, with all that its environments have started. An
agent that ends takes its workers with it. Whatever else arrives is refused, logged, and changes nothing.
"""

import contextlib
import json
import os
import resource
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

AGENT, COORDINATOR = "agent", "coordinator"
"""The labels of the two pairs of keys that come from the token."""
MAX_BYTES = 64 * 1024
"""Of a message to an agent."""
OUTPUT_BYTES = 16 * 1024
"""Of a worker's output, sent at once."""
LOOK_S = 0.5
"""How often an agent looks for workers that ended without closing their output."""


def serve(address: str, port: int, token: bytes) -> int:
    """Start workers for whoever knows the token, until interrupted."""
    _allow_many_connections()
    agent = Agent(address, port, token)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(f"Waiting for coordinators at {address}:{agent.port}. Ctrl-C ends this and all its workers.", flush=True)
        agent.run()
    finally:
        agent.close()
    return 0


class Agent:
    """One thread, which waits for coordinators and workers alike."""

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
        self._jobs: dict[bytes, Job] = {}
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
        while True:
            ready = dict(self._poller.poll(int(1000 * LOOK_S)))
            # In this order: the system gives a descriptor that is closed to the next that asks. What is `ready` is of the
            # workers that were here before, and a coordinator that is gone may leave its connection's to the one that asks.
            for job in list(self._jobs.values()):
                self._look_after(job, ready)
            for fd in self._connections.read_events():
                self._forget(fd)
            if self._socket in ready:
                self._take(self._socket.recv_multipart(copy=False))

    def close(self) -> None:
        """End all workers, and tell their coordinators why."""
        for job in list(self._jobs.values()):
            self._tell(job.identity, {"kind": "stopped"})
            self._end(job)
        authenticator().forget(self._socket)
        self._connections.close()
        self._socket.close()

    def _take(self, frames: list[zmq.Frame]) -> None:
        """A message of somebody who knows the token; it may still be nonsense."""
        identity, peer = frames[0].bytes, str(frames[-1].get("Peer-Address"))
        try:
            if len(frames) != 2:
                raise ValueError(f"a message of {len(frames) - 1} parts")
            order = Order.read(frames[1].bytes)
            if identity in self._jobs:
                raise ValueError("a second worker over one connection")
            job = Job.start(order, identity, peer, fd_of(frames[1]))
        except (ValueError, OSError) as error:
            log(f"Refused {peer}: {error!r}")
            self._tell(identity, {"kind": "refused", "why": str(error)})
            return
        self._jobs[identity] = job
        for fd in (job.output, job.news):
            self._poller.register(fd, zmq.POLLIN)
        log(f"{job.title}: started, process {job.process.pid}.")

    def _look_after(self, job: "Job", ready: dict[Any, int]) -> None:
        """Pass on what a worker has to tell."""
        if job.news in ready:
            if told := os.read(job.news, 4096):  # one short line, written at once
                self._tell(job.identity, {"kind": "started", "pid": job.process.pid}, told)
            else:
                job.news = self._unwatch(job.news)
        if job.output in ready:
            if data := os.read(job.output, OUTPUT_BYTES):
                self._tell(job.identity, {"kind": "output"}, data)
            else:
                job.output = self._unwatch(job.output)
        if job.process.poll() is not None and not self._has_more(job):
            # A coordinator that does not read, and has let its queue fill, is told the next time.
            if self._tell(job.identity, {"kind": "ended", "code": job.process.returncode}):
                self._end(job)

    def _has_more(self, job: "Job") -> bool:
        poller = zmq.Poller()
        for fd in (job.output, job.news):
            if fd >= 0:
                poller.register(fd, zmq.POLLIN)
        # The end of a pipe counts as something to read; what an environment has started may hold it open.
        return bool(poller.poll(0))

    def _forget(self, fd: int) -> None:
        """A connection has ended: end its worker."""
        for job in [job for job in self._jobs.values() if job.fd == fd]:
            if job.process.poll() is None:
                log(f"{job.title}: its coordinator is gone.")
            self._end(job)

    def _end(self, job: "Job") -> None:
        del self._jobs[job.identity]
        for fd in (job.output, job.news):
            if fd >= 0:
                self._unwatch(fd)
        code = job.kill()
        log(f"{job.title}: ended with exit code {code} after {time.monotonic() - job.began:.0f} s.")

    def _unwatch(self, fd: int) -> int:
        """Nothing will be read there any more."""
        self._poller.unregister(fd)
        os.close(fd)
        return -1

    def _tell(self, identity: bytes, header: dict[str, Any], data: bytes = b"") -> bool:
        """False if it cannot be told now. Output that nobody takes is dropped: an agent never waits."""
        try:
            self._socket.send_multipart([identity, json.dumps(header).encode(), data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno == zmq.EHOSTUNREACH  # it is gone, and wants to know nothing more
        return True


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a coordinator asks for."""

    run: str
    """Tells its runs apart, in the log."""
    name: str
    """The worker's."""
    host: str
    """This host, as the coordinator calls it: where the worker listens."""
    key: str
    """The coordinator's public key for this run."""
    environment: dict[str, str]
    """Variables of the worker, beside the agent's own."""

    @classmethod
    def read(cls, data: bytes) -> "Order":
        """Raises ValueError for anything that is not exactly an order."""
        try:
            order = json.loads(data)
        except RecursionError as error:
            raise ValueError("an order that is nested too deeply") from error
        if not isinstance(order, dict) or set(order) != {"run", "name", "host", "key", "environment"}:
            raise ValueError("an order with other parts")
        environment = order["environment"]
        if not isinstance(environment, dict):
            raise ValueError("an order without a table of variables")
        texts = [value for name, value in order.items() if name != "environment"]
        for text in (*texts, *environment, *environment.values()):
            if not isinstance(text, str) or not text.isprintable():
                raise ValueError("an order with something other than printable text")
        if len(order["key"]) != 40 or not order["key"].isascii():
            raise ValueError("an order with a key that is none")
        if any(not name or "=" in name for name in environment):
            raise ValueError("an order with a variable that has no name")
        return cls(**order)


@dataclass(eq=False)
class Job:
    """A worker and the connection it belongs to."""

    title: str
    identity: bytes
    fd: int
    """Descriptor of the connection."""
    process: "subprocess.Popen[bytes]"
    output: int
    """Where it prints to; -1 once it has closed that."""
    news: int
    """Our end of a socket, where it tells its port and its public key, and hears of our end; -1 once it has closed that."""
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, order: Order, identity: bytes, peer: str, fd: int) -> "Job":
        """Raises OSError or ValueError if it cannot be started."""
        ours, theirs = socket.socketpair()
        news, tell = ours.detach(), theirs.detach()
        output, printed = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "choreo.runtime.worker", "--remote", order.host, order.key, str(tell)],
                pass_fds=[tell],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env={**os.environ, **order.environment},
                start_new_session=True,
            )
        except BaseException:
            os.close(news)
            os.close(output)
            raise
        finally:
            os.close(tell)
            os.close(printed)
        title = f"run {order.run[:16]} of {peer}, `{order.name[:80]}`"
        return cls(title=title, identity=identity, fd=fd, process=process, output=output, news=news)

    def kill(self) -> int:
        """End it, with all that its environments have started; its exit code."""
        with contextlib.suppress(ProcessLookupError):  # gone already
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def log(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}", flush=True)


def _allow_many_connections() -> None:
    """As many as the system lets this process have: a thousand strangers must not keep a coordinator out."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
