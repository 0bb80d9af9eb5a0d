"""Decides which processes may connect to a socket: key pairs, and the authenticator that checks them.

    token ──HKDF──▶ the key pairs of the agent and of the coordinator     both know the token, so each can compute both pairs
    a worker ─────▶ its own key pair, made when it starts                 only the public key leaves the process

CURVE, ZeroMQ's own protocol, encrypts connections. A client must know the public key of the server. For each client that
connects, ZeroMQ asks a ZAP server (ZAP is ZeroMQ's authentication protocol) whether to admit the client. `Authenticator` is this
ZAP server, and must guard every bound socket. It admits only clients whose public key or ticket it was given before.

The package zmq.auth also has a ZAP server. But that server starts an asyncio loop in every worker, and it admits unknown
clients by default.
"""

import atexit
import functools
import hmac
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import zmq
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from choreo.runtime.channels.sockets import context_of_process

HANDSHAKE_S = 10.0
"""A client that needs more time than this for the handshake is disconnected."""

Credentials = Callable[[bytes, list[bytes]], str | None]
"""A function `(mechanism, credentials of a client) -> name of the client, or None to refuse the client`. The mechanism is
b"CURVE" or b"PLAIN"."""


class KeyPair(NamedTuple):
    """A pair of Curve25519 keys. Each key is written as 40 characters (Z85), as in ZeroMQ."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> "KeyPair":
        return cls(*zmq.curve_keypair())

    @classmethod
    def from_token(cls, token: bytes, label: str) -> "KeyPair":
        """Derive a key pair from a token and a label. The same token and label give the same pair in every process."""
        kdf = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=f"choreo 1 {label}".encode())
        secret = z85.encode(kdf.derive(token))
        return cls(zmq.curve_public(secret), secret)

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"  # without the secret, which must not appear in logs and tracebacks


class Authenticator:
    """A ZAP server: decides which clients may connect to the sockets of this process. It runs in its own thread."""

    def __init__(self, context: zmq.Context):
        self._guarded: dict[bytes, _GuardedSocket] = {}
        # While nobody polls this socket, ZeroMQ can neither open nor close a connection. So a thread polls it all the time.
        self._requests = context.socket(zmq.REP)
        self._requests.bind("inproc://zeromq.zap.01")  # ZeroMQ sends its requests there
        self._stop, stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stop.bind("inproc://choreo-authenticator")
        stopped.connect("inproc://choreo-authenticator")
        self._thread = threading.Thread(target=self._answer, args=(stopped,), name="choreo-authenticator", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def admit_keys(self, sock: zmq.Socket, mine: KeyPair, names: Mapping[bytes, str]) -> None:
        """Admit only the clients whose public keys are in `names`, which maps each key to the name of its client.

        The caller may change `names` later. `name_of` returns the name of the client that sent a message.
        """
        sock.set(zmq.CURVE_SERVER, 1)
        sock.set(zmq.CURVE_SECRETKEY, mine.secret)
        self._guard(sock, lambda mechanism, shown: _name_of_key(mechanism, shown, names))

    def admit_ticket(self, sock: zmq.Socket, ticket: bytes) -> None:
        """Admit only clients with this ticket. The ticket crosses the network unencrypted, so use it for one connection only."""
        sock.set(zmq.PLAIN_SERVER, 1)
        self._guard(sock, lambda mechanism, shown: "ticket" if _is_ticket(mechanism, shown, ticket) else None)

    def _guard(self, sock: zmq.Socket, credentials: Credentials) -> None:
        domain = secrets.token_hex(8).encode()
        self._guarded[domain] = _GuardedSocket(credentials, deque(maxlen=16))
        sock.set(zmq.ZAP_DOMAIN, domain)
        sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without this, ZeroMQ admits everybody when no authenticator runs
        sock.set(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))

    def forget(self, sock: zmq.Socket) -> None:
        """Refuse new connections to a socket; open connections stay open."""
        self._guarded.pop(_domain(sock), None)

    def refused(self, sock: zmq.Socket) -> list[str]:
        """The addresses of the last clients that were refused."""
        return sorted(set(self._guarded[_domain(sock)].refused))

    def close(self) -> None:
        """Refuse all new connections, and end the thread."""
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(0)

    def _answer(self, stopped: zmq.Socket) -> None:
        poller = zmq.Poller()
        poller.register(self._requests, zmq.POLLIN)
        poller.register(stopped, zmq.POLLIN)
        while stopped not in dict(poller.poll()):
            version, request, domain, address, _, mechanism, *shown = self._requests.recv_multipart()
            guarded = self._guarded.get(domain)
            name = guarded and guarded.credentials(mechanism, shown)
            if guarded is not None and name is None:
                guarded.refused.append(address.decode(errors="replace"))
            status = [b"400", b"Unknown client", b""] if name is None else [b"200", b"OK", name.encode()]
            self._requests.send_multipart([version, request, *status, b""])
        self._requests.close(0)
        stopped.close(0)


class _GuardedSocket(NamedTuple):
    """The rule that decides which clients a socket admits, and the clients that it refused."""

    credentials: Credentials
    """Returns the name of a client to admit, or None."""
    refused: "deque[str]"
    """The addresses of the last clients that were refused."""


def _domain(sock: zmq.Socket) -> bytes:
    domain = sock.get(zmq.ZAP_DOMAIN)
    assert isinstance(domain, bytes)
    return domain


def _name_of_key(mechanism: bytes, shown: list[bytes], names: Mapping[bytes, str]) -> str | None:
    return names.get(z85.encode(shown[0])) if mechanism == b"CURVE" and len(shown) == 1 else None


def _is_ticket(mechanism: bytes, shown: list[bytes], ticket: bytes) -> bool:
    return mechanism == b"PLAIN" and len(shown) == 2 and hmac.compare_digest(shown[1], ticket)


def name_of(frame: zmq.Frame) -> str:
    """The name of the client that sent a message, as given to `Authenticator.admit_keys`."""
    return str(frame.get("User-Id"))


def show_key(sock: zmq.Socket, mine: KeyPair, server: bytes) -> None:
    """Make a socket prove that it owns the key pair `mine`, and accept only the server with the public key `server`.

    Call this before the socket connects.
    """
    sock.set(zmq.CURVE_PUBLICKEY, mine.public)
    sock.set(zmq.CURVE_SECRETKEY, mine.secret)
    sock.set(zmq.CURVE_SERVERKEY, server)


def show_ticket(sock: zmq.Socket, ticket: bytes) -> None:
    """Make a socket show the ticket to the server. Call this before the socket connects."""
    sock.set(zmq.PLAIN_USERNAME, b"choreo")
    sock.set(zmq.PLAIN_PASSWORD, ticket)


@functools.cache
def authenticator() -> Authenticator:
    """The authenticator of this process."""
    return Authenticator(context_of_process())
