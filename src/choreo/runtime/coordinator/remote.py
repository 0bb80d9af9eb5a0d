"""`AgentLauncher`: starts workers on another host. The agent of the host starts a worker, and then the coordinator connects to it.

coordinator ══ agent        the request, and "started", "output", "ended"; closing this connection ends the worker
            ══ worker       commands and replies, through a tunnel
"""

import json
import secrets
import socket
import time
from collections.abc import Collection, Mapping
from typing import Literal

import zmq

from choreo.errors import RunError
from choreo.runtime.channels.keys import KeyPair, show_key
from choreo.runtime.channels.sockets import (
    DEFAULT_SILENCE_S,
    Connections,
    connect,
    context_of_process,
    keep_alive,
    milliseconds_to,
)
from choreo.runtime.coordinator.agent import AGENT, COORDINATOR
from choreo.runtime.coordinator.cluster import Host
from choreo.runtime.coordinator.launcher import LostSight
from choreo.runtime.coordinator.tunnel import SILENCE_VARIABLE, Tunnel

HELLO_S = 10.0
"""How long an agent may take to answer."""


class AgentLauncher:
    """Starts workers through the agent of one host."""

    shared_memory: Literal["passed"] = "passed"

    def __init__(self, host: Host, token: bytes, *, silence_s: float = DEFAULT_SILENCE_S):
        """A connection counts as lost after `silence_s` seconds without a sign of life."""
        self._host, self._token, self._silence_s = host, token, silence_s
        self._keys, self._run = KeyPair.new(), secrets.token_hex(4)

    def start(self, name: str, variables: Mapping[str, str], fds: Collection[int] = ()) -> "RemoteProcess":
        """Ask the agent to start a worker. Raises RunError if the host has no agent, or if its agent has a different token."""
        assert not fds, "file descriptors cannot be inherited by a process on another host"
        process = RemoteProcess(self._host, self._token, silence_s=self._silence_s)
        process.spawn(name, variables, run=self._run, keys=self._keys)
        return process


class RemoteProcess:
    """The process of a worker on another host, and the connection to the agent that starts it."""

    def __init__(self, host: Host, token: bytes, *, silence_s: float = DEFAULT_SILENCE_S):
        """Connect to the agent of a host. Raises RunError if the host has no agent, or if its agent has a different token."""
        self.host, self.pid, self.returncode, self.agent_stopped = host, -1, None, False
        self._silence_s, self._name, self._keys = silence_s, "", KeyPair.new()
        self._started: tuple[int, bytes] | None = None
        self._output = b""
        self.agent = context_of_process().socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, 1000),
            (zmq.RECONNECT_IVL, 24 * 3600 * 1000),  # never reconnect: an agent that was lost stays lost
        ):
            self.agent.set(option, value)
        keep_alive(self.agent, silence_s)
        show_key(self.agent, KeyPair.from_token(token, COORDINATOR), KeyPair.from_token(token, AGENT).public)
        self._connections = Connections(self.agent)
        try:
            self._reach_agent()
        except BaseException:
            self.close()
            raise

    def _reach_agent(self) -> None:
        where, fix = (
            f"{self.host.address}:{self.host.port}",
            f"Run there: choreo agent --address {self.host.address} --port {self.host.port} --token-file token",
        )
        try:
            # Try a plain connection first. Its error says why the agent cannot be reached; ZeroMQ does not report the reason.
            socket.create_connection((self.host.address, self.host.port), timeout=HELLO_S).close()
            connect(self.agent, self.host.address, self.host.port)
        except OSError as error:
            raise RunError(f"There is no agent at {where}: {error}.", fix=fix) from error
        if self._connections.await_handshake(time.monotonic() + HELLO_S):
            return
        if self._connections.refused:
            raise RunError(
                f"The process at {where} is not an agent with the token of this cluster.",
                fix=f"Use the same token file on every host. {fix}",
            )
        raise RunError(f"The process at {where} does not answer like an agent.", fix=fix)

    def spawn(self, name: str, variables: Mapping[str, str], *, run: str, keys: KeyPair) -> None:
        """Ask the agent to start a worker. The worker accepts only the owner of the key pair `keys` as its coordinator.

        `agent.SpawnRequest` describes the other arguments.
        """
        self._name, self._keys = name, keys
        request = {
            "run": run,
            "name": name,
            "host": self.host.address,
            "key": keys.public.decode(),
            "environment": {**variables, SILENCE_VARIABLE: f"{self._silence_s:g}"},
        }
        self.agent.send(json.dumps(request).encode())

    @property
    def address(self) -> str:
        return self.host.address

    def connect(self, deadline: float) -> Tunnel:
        while self._started is None and self.returncode is None and self.is_connected:
            if not self._wait(deadline):
                break
            self._read_messages()
        printed = "".join(f"\n  {line}" for line in self._output.decode(errors="replace").splitlines()[-60:])
        where = f"`{self._name}` on {self.host.address}"
        if self._started is None:
            late = "it did not answer in time" if self.is_connected else "its agent is gone"
            ended = late if self.returncode is None else f"it ended with exit code {self.returncode}"
            raise RunError(f"{where} did not start: {ended}.{' Its output:' if printed else ''}{printed}",
                           fix="Check that the same version of Choreo is installed on this host.")  # fmt: skip
        port, key = self._started
        try:
            return Tunnel.connect(self.host.address, port, self._keys, key, deadline, self._silence_s)
        except OSError as error:
            raise RunError(f"{where} has started, but {error}.",
                           fix=f"Check that this machine can reach all ports of {self.host.address}.") from error  # fmt: skip

    @property
    def pollable(self) -> list[zmq.Socket]:
        return [self.agent, self._connections.monitor]

    @property
    def is_connected(self) -> bool:
        """Whether the connection to the agent is open."""
        return bool(self._connections.open)

    def read_output(self) -> tuple[bytes, bool]:
        self._read_messages()
        if self._started is None:
            return b"", False  # `connect` shows the output if the worker does not start
        output, self._output = self._output, b""
        return output, self.returncode is not None  # the agent sends the exit code after all output

    def poll(self) -> int | None:
        return self.returncode

    def lost_sight(self) -> LostSight | None:
        agent = f"he agent at {self.host.address}:{self.host.port}"
        if self.agent_stopped:
            return LostSight(
                why=f"T{agent} was stopped, and so its worker `{self._name}` ended.",
                fix="Start the agent again, then train again.",
            )
        if self.returncode is None and not self.is_connected:
            return LostSight(
                why=f"Worker `{self._name}` (process {self.pid} on {self.host.address}) and t{agent} were lost.",
                fix="The agent or its machine has ended, or the network between the machines is cut.",
            )
        return None

    def wait(self, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while self.returncode is None and self.is_connected and self._wait(deadline):
            self._read_messages()
        return self.returncode

    def kill(self) -> None:
        """Do nothing: the agent kills the worker when `close` closes the connection."""

    def close(self) -> None:
        """Close the connection to the agent. The agent then kills the worker."""
        self._connections.close()
        self.agent.close()

    def _read_messages(self) -> None:
        """Read all messages that the agent has sent."""
        self._connections.read_events()
        while self.agent.poll(0):
            text, data = self.agent.recv_multipart()
            header = json.loads(text)
            match header["kind"]:
                case "started":
                    listening = json.loads(data)
                    self.pid, self._started = header["pid"], (listening["port"], listening["key"].encode())
                case "output":
                    self._output += data
                case "ended":
                    self.returncode = header["code"]
                case "stopped":
                    self.agent_stopped = True
                case "refused":
                    raise RunError(f"The agent at {self.host.address}:{self.host.port} refused: {header['why']}.")

    def _wait(self, deadline: float) -> bool:
        poller = zmq.Poller()
        for each in self.pollable:
            poller.register(each, zmq.POLLIN)
        return bool(poller.poll(milliseconds_to(deadline)))
