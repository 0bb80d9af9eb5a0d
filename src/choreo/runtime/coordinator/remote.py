"""A worker on another host, as the coordinator sees it. The agent of the host starts the worker, and then the coordinator
connects to the worker.

    coordinator ══ agent        the request, and "started", "output", "ended"; closing this connection ends the worker
                ══ worker       commands and replies, through a tunnel

`RemoteProcess` has the methods of `subprocess.Popen` that the coordinator needs.
"""

import json
import socket
import time
from collections.abc import Mapping

import zmq

from choreo.errors import RunError
from choreo.runtime.channels.keys import KeyPair, show_key
from choreo.runtime.channels.sockets import Connections, connect, context_of_process, keep_alive, milliseconds_to
from choreo.runtime.coordinator.agent import AGENT, COORDINATOR
from choreo.runtime.coordinator.cluster import Host
from choreo.runtime.coordinator.tunnel import Tunnel

HELLO_S = 10.0
"""How long an agent may take to answer."""


class RemoteProcess:
    """The process of a worker on another host, and the connection to the agent that starts it."""

    stdout = None

    def __init__(self, host: Host, token: bytes):
        """Connect to the agent of a host. Raises RunError if the host has no agent, or if its agent has a different token."""
        self.host, self.pid, self.returncode, self.agent_stopped = host, -1, None, False
        self._started: tuple[int, bytes] | None = None
        self._output = b""
        self.agent = context_of_process().socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, 1000),
            (zmq.RECONNECT_IVL, 24 * 3600 * 1000),  # never reconnect: an agent that was lost stays lost
        ):
            self.agent.set(option, value)
        keep_alive(self.agent)
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

    def spawn(self, name: str, variables: Mapping[str, str], *, run: str, key: bytes) -> None:
        """Ask the agent to start a worker. The worker accepts only the owner of the public key `key` as its coordinator.

        `agent.SpawnRequest` describes the arguments.
        """
        request = {
            "run": run,
            "name": name,
            "host": self.host.address,
            "key": key.decode(),
            "environment": dict(variables),
        }
        self.agent.send(json.dumps(request).encode())

    def reach_worker(self, name: str, keys: KeyPair, deadline: float) -> Tunnel:
        """Wait until the worker has started, and return the control connection.

        Raises RunError, with the worker's last output, if the worker does not start.
        """
        while self._started is None and self.returncode is None and self.is_connected:
            if not self._wait(deadline):
                break
            self.read_messages()
        printed = "".join(f"\n  {line}" for line in self._output.decode(errors="replace").splitlines()[-60:])
        where = f"`{name}` on {self.host.address}"
        if self._started is None:
            late = "it did not answer in time" if self.is_connected else "its agent is gone"
            ended = late if self.returncode is None else f"it ended with exit code {self.returncode}"
            raise RunError(f"{where} did not start: {ended}.{' Its output:' if printed else ''}{printed}",
                           fix="Check that the same version of Choreo is installed on this host.")  # fmt: skip
        port, key = self._started
        try:
            return Tunnel.connect(self.host.address, port, keys, key, deadline)
        except OSError as error:
            raise RunError(f"{where} has started, but {error}.",
                           fix=f"Check that this machine can reach all ports of {self.host.address}.") from error  # fmt: skip

    @property
    def pollable(self) -> list[zmq.Socket]:
        """Sockets to poll. When one of them is ready, call `read_messages`."""
        return [self.agent, self._connections.monitor]

    @property
    def is_connected(self) -> bool:
        """Whether the connection to the agent is open."""
        return bool(self._connections.open)

    def read_messages(self) -> bytes:
        """Read all messages of the agent. Returns the new output of the worker, or nothing before the worker has started."""
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
        if self._started is None:
            return b""  # `reach_worker` shows the output if the worker does not start
        output, self._output = self._output, b""
        return output

    def poll(self) -> int | None:
        """The exit code, or None before the agent has sent it."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the exit code while the agent is connected. Returns None if the exit code does not come in time.

        With `timeout=None`, this method does not wait, unlike `subprocess.Popen.wait`.
        """
        deadline = time.monotonic() + (timeout or 0.0)
        while self.returncode is None and self.is_connected and self._wait(deadline):
            self._output += self.read_messages()
        return self.returncode

    def close(self) -> None:
        """Close the connection to the agent. The agent then kills the worker."""
        self._connections.close()
        self.agent.close()

    def _wait(self, deadline: float) -> bool:
        poller = zmq.Poller()
        for each in self.pollable:
            poller.register(each, zmq.POLLIN)
        return bool(poller.poll(milliseconds_to(deadline)))
