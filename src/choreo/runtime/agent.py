"""Workers on other hosts: `choreo agent` runs on each of them, and starts a worker whenever a coordinator asks.

    coordinator ── TCP ──▶ agent        hello: each proves that it knows the token, by an HMAC over both nonces
                ── "spawn" ──▶          name and environment variables of the worker
                ══ the same connection ══ worker        from here on it is the worker's control socket

So a worker on another host is the same process as one on this host, with another carrier under its channels. Nothing is
unpickled before the token is proved. An agent that ends takes its workers with it.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from choreo.cluster import Host
from choreo.errors import RunError
from choreo.runtime.wire import receive_frame, send_frame

NONCE_BYTES, PROOF_BYTES = 32, 32
HELLO_S = 10.0
"""How long a hello may take."""
SILENCE_S = 6
"""After how long a connection without any sign of life counts as cut."""


def serve(address: str, port: int, token: bytes) -> int:
    """Start workers for whoever knows the token, until interrupted."""
    workers: list[subprocess.Popen[bytes]] = []
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            raise RunError(f"Cannot listen at {address}:{port}: {error.strerror}.",
                           fix="Choose another --port, or end what uses this one.") from error  # fmt: skip
        listener.listen()
        where = f"{address}:{listener.getsockname()[1]}"
        print(f"Waiting for coordinators at {where}. Ctrl-C ends this and all its workers.", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while True:
                connection, (peer, *_) = listener.accept()
                workers = [worker for worker in workers if worker.poll() is None]
                with connection:
                    if worker := _welcome(connection, peer, token):
                        workers.append(worker)
        finally:
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):  # gone already
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()


def _welcome(connection: socket.socket, peer: str, token: bytes) -> "subprocess.Popen[bytes] | None":
    connection.settimeout(HELLO_S)
    try:
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(mine)
        answer = _exactly(connection, NONCE_BYTES + PROOF_BYTES)
        theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(token, b"coordinator", mine, theirs)):
            print(f"Refused {peer}: it does not know the token.", flush=True)
            return None
        connection.sendall(_proof(token, b"agent", mine, theirs))
        frame = receive_frame(connection)
    except (TimeoutError, OSError, EOFError) as error:
        print(f"Lost {peer} during its hello: {error}", flush=True)
        return None
    if frame is None:
        return None
    name, variables = frame[0]["name"], frame[0]["environment"]
    connection.settimeout(None)
    keep_alive(connection)
    print(f"Starting `{name}` for {peer}.", flush=True)
    return subprocess.Popen(
        [sys.executable, "-m", "choreo.worker", str(connection.fileno())],
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables},
        start_new_session=True,
    )


def ask_for_worker(host: Host, name: str, variables: Mapping[str, str], token: bytes) -> socket.socket:
    """The control socket of a new worker on another host."""
    fix = f"Run there: choreo agent --port {host.port} --token-file token"
    try:
        connection = socket.create_connection((host.address, host.port), timeout=HELLO_S)
        theirs = _exactly(connection, NONCE_BYTES)
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(mine + _proof(token, b"coordinator", theirs, mine))
        answer = _exactly(connection, PROOF_BYTES)
    except EOFError as error:
        raise RunError(f"The agent at {host.address}:{host.port} refused this run: it has another token.",
                       fix="Use the same token file on every host.") from error  # fmt: skip
    except OSError as error:
        raise RunError(f"There is no agent at {host.address}:{host.port}: {error}.", fix=fix) from error
    if not hmac.compare_digest(answer, _proof(token, b"agent", theirs, mine)):
        connection.close()
        raise RunError(f"Whoever answers at {host.address}:{host.port} does not know the token.", fix=fix)
    send_frame(connection, {"kind": "spawn", "name": name, "environment": dict(variables)})
    connection.settimeout(None)
    keep_alive(connection)
    return connection


class RemoteProcess:
    """A worker on another host, as far as its coordinator can tell; stands where a `Popen` would."""

    stdout = None

    def __init__(self, host: Host, control: socket.socket):
        self.host, self.control, self.pid = host, control, -1

    def poll(self) -> int | None:
        """None as long as the connection may be used; how it ended is known there only."""
        return None if self.control.fileno() >= 0 else 0

    def wait(self, timeout: Any = None) -> None:
        """A worker whose connection is closed ends by itself."""


def keep_alive(connection: socket.socket) -> None:
    """Notice a cut cable within seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", SILENCE_S - 2)):
        if hasattr(socket, option):  # not every system can set them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _proof(token: bytes, who: bytes, agent: bytes, coordinator: bytes) -> bytes:
    return hmac.new(token, b"choreo-agent-1" + who + agent + coordinator, hashlib.sha256).digest()


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return data
