"""Who may connect to whom: key pairs, and the doorkeeper that asks for them.

    token ──HKDF──▶ the agent's and the coordinator's long-term pairs     both know the token, so each knows both
    a worker ─────▶ a pair of its own, made when it starts                only its public key leaves the process

Connections are encrypted by CURVE, ZeroMQ's own protocol: a client must know the public key of the server, and a server
asks, by ZeroMQ's authentication protocol (ZAP), whether a client's public key is welcome. `Doorkeeper` answers. A socket
that it guards lets in nobody whom it was not told of; a socket that nobody guards is never bound.

zmq.auth has a ZAP server, too; it brings an asyncio loop into every worker, and lets in strangers of some kinds unless it
is told not to. This one refuses whatever it was not told of.
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
"""How long a stranger may take to prove who it is."""

Credentials = Callable[[bytes, list[bytes]], str | None]
"""(mechanism, credentials of a client) -> the name of that client; None refuses it."""


class KeyPair(NamedTuple):
    """A pair of Curve25519 keys, in the 40 characters in which ZeroMQ writes them."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> "KeyPair":
        return cls(*zmq.curve_keypair())

    @classmethod
    def from_token(cls, token: bytes, label: str) -> "KeyPair":
        """The long-term pair that everybody who knows the token can compute; another one for each label."""
        kdf = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=f"choreo 1 {label}".encode())
        secret = z85.encode(kdf.derive(token))
        return cls(zmq.curve_public(secret), secret)

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"  # a secret that is never printed is in no log and no traceback


class Doorkeeper:
    """Answers ZeroMQ's questions who may connect to the sockets of this process, in a thread of its own."""

    def __init__(self, context: zmq.Context):
        self._doors: dict[bytes, _Door] = {}
        # To close a connection, ZeroMQ also needs this socket to be polled: hence a thread that always does.
        self._questions = context.socket(zmq.REP)
        self._questions.bind("inproc://zeromq.zap.01")  # where ZeroMQ asks
        self._stop, stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stop.bind("inproc://choreo-doorkeeper")
        stopped.connect("inproc://choreo-doorkeeper")
        self._thread = threading.Thread(target=self._answer, args=(stopped,), name="choreo-doorkeeper", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def admit_keys(self, sock: zmq.Socket, mine: KeyPair, names: Mapping[bytes, str]) -> None:
        """Let in only clients with one of these public keys, which may still change. Messages carry the name: `name_of`."""
        sock.set(zmq.CURVE_SERVER, 1)
        sock.set(zmq.CURVE_SECRETKEY, mine.secret)
        self._guard(sock, lambda mechanism, shown: _name_of_key(mechanism, shown, names))

    def admit_ticket(self, sock: zmq.Socket, ticket: bytes) -> None:
        """Let in only clients with this ticket. It crosses the network in clear text: good for one connection only."""
        sock.set(zmq.PLAIN_SERVER, 1)
        self._guard(sock, lambda mechanism, shown: "ticket" if _is_ticket(mechanism, shown, ticket) else None)

    def _guard(self, sock: zmq.Socket, credentials: Credentials) -> None:
        domain = secrets.token_hex(8).encode()
        self._doors[domain] = _Door(credentials, deque(maxlen=16))
        sock.set(zmq.ZAP_DOMAIN, domain)
        sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else a socket whose doorkeeper is gone would let in everybody
        sock.set(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))

    def forget(self, sock: zmq.Socket) -> None:
        """Refuse new connections; open ones stay open."""
        self._doors.pop(_domain(sock), None)

    def refused(self, sock: zmq.Socket) -> list[str]:
        """The addresses of the last few who were not let in."""
        return sorted(set(self._doors[_domain(sock)].refused))

    def close(self) -> None:
        """Refuse all new connections, and end the thread."""
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(0)

    def _answer(self, stopped: zmq.Socket) -> None:
        poller = zmq.Poller()
        poller.register(self._questions, zmq.POLLIN)
        poller.register(stopped, zmq.POLLIN)
        while stopped not in dict(poller.poll()):
            version, request, domain, address, _, mechanism, *shown = self._questions.recv_multipart()
            door = self._doors.get(domain)
            name = door and door.credentials(mechanism, shown)
            if door is not None and name is None:
                door.refused.append(address.decode(errors="replace"))
            status = [b"400", b"No stranger gets in", b""] if name is None else [b"200", b"OK", name.encode()]
            self._questions.send_multipart([version, request, *status, b""])
        self._questions.close(0)
        stopped.close(0)


class _Door(NamedTuple):
    """A guarded socket."""

    credentials: Credentials
    refused: "deque[str]"


def _domain(sock: zmq.Socket) -> bytes:
    domain = sock.get(zmq.ZAP_DOMAIN)
    assert isinstance(domain, bytes)
    return domain


def _name_of_key(mechanism: bytes, shown: list[bytes], names: Mapping[bytes, str]) -> str | None:
    return names.get(z85.encode(shown[0])) if mechanism == b"CURVE" and len(shown) == 1 else None


def _is_ticket(mechanism: bytes, shown: list[bytes], ticket: bytes) -> bool:
    return mechanism == b"PLAIN" and len(shown) == 2 and hmac.compare_digest(shown[1], ticket)


def name_of(frame: zmq.Frame) -> str:
    """The name of the client that sent a message, as the doorkeeper knows it."""
    return str(frame.get("User-Id"))


def show_key(sock: zmq.Socket, mine: KeyPair, server: bytes) -> None:
    """Before it connects: prove to be `mine`, to nobody but the owner of the public key `server`."""
    sock.set(zmq.CURVE_PUBLICKEY, mine.public)
    sock.set(zmq.CURVE_SECRETKEY, mine.secret)
    sock.set(zmq.CURVE_SERVERKEY, server)


def show_ticket(sock: zmq.Socket, ticket: bytes) -> None:
    """Before it connects: show the ticket."""
    sock.set(zmq.PLAIN_USERNAME, b"choreo")
    sock.set(zmq.PLAIN_PASSWORD, ticket)


@functools.cache
def doorkeeper() -> Doorkeeper:
    """The one of this process."""
    return Doorkeeper(context_of_process())
