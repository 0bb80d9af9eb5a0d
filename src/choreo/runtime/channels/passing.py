"""Shared memory between two workers on one machine, if the coordinator has not started them itself (but, for example, an agent).

    connector                              listener            an abstract Unix socket: it has no name in the file system
      ── hello, nonce ─────────────────▶                       the channels that the two workers need
      ◀───────────── nonce, proof ──                           HMAC of both nonces and the hello, with the secret of the run
      ── proof, file descriptors ──────▶                       the memory and a doorbell of each channel (SCM_RIGHTS)
      ◀────────────────────── done ──

The connector makes all channels between the two workers, in both directions. It keeps one end of each channel, and passes the
other end to the listener. The secret reaches the workers only through their encrypted control connections, and never crosses the
socket. Each worker also asks the kernel for the user account of the other worker, which must be the same as its own account. If
any step fails, the two workers use TCP.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from choreo.runtime.channels.shm import ReceiverEnd, SenderEnd, ShmReceiver, ShmSender, make_shm_channel

PATIENCE_S = 5.0
"""How long each step of the handshake may take."""
NONCE_BYTES, PROOF_BYTES = 32, 32
MAX_HELLO_BYTES = 64 * 1024
"""The largest hello that a listener reads."""
_CREDENTIALS = struct.Struct("3i")
_SIZE = struct.Struct("<I")
_DONE = b"done"
ChannelKey = tuple[str, str, str]
"""Sender, receiver and kind of a channel."""
Wanted = dict[ChannelKey, tuple[int, int]]
"""The channels of one worker that may use shared memory, with their slot_bytes and slots."""
OpenEnds = dict[ChannelKey, "ShmSender | ShmReceiver"]
"""This worker's ends of channels."""


class NotPassed(Exception):
    """The peer is not a worker of this run and account, or it does not answer. So the two workers use TCP."""


class DescriptorListener:
    """Receives the ends of channels from other workers of the run on this machine, in a thread of its own."""

    def __init__(self, me: str, secret: str, wanted: Wanted, *, patience_s: float = PATIENCE_S):
        self._patience_s = patience_s
        self._me, self._secret, self._wanted = me, secret.encode(), wanted
        self.name = f"choreo-{secrets.token_hex(16)}"
        """The name of the abstract socket, without its first byte, which is zero."""
        self.received: OpenEnds = {}
        """The ends that other workers have passed. Read it after `close`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(1024)
        self._thread = threading.Thread(target=self._serve, name="choreo-passing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Receive no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return  # `close` was called
            with peer, contextlib.suppress(NotPassed, OSError, ValueError, KeyError, TypeError):
                _begin(peer, self._patience_s)
                self._receive(peer)

    def _receive(self, peer: socket.socket) -> None:
        (size,) = _SIZE.unpack(_read(peer, _SIZE.size))
        if size > MAX_HELLO_BYTES:
            raise NotPassed
        hello, their_nonce, our_nonce = _read(peer, size), _read(peer, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        peer.sendall(our_nonce + _proof(self._secret, b"listener", hello, their_nonce, our_nonce))
        proof, fds = b"", list[int]()
        try:
            while len(proof) < PROOF_BYTES:
                part, more, _, _ = socket.recv_fds(peer, PROOF_BYTES - len(proof), 253)
                fds += more
                if not part:
                    raise NotPassed
                proof += part
            if not hmac.compare_digest(proof, _proof(self._secret, b"connector", hello, their_nonce, our_nonce)):
                raise NotPassed
            keys = self._keys_of(hello, num_fds=len(fds))
            for key in keys:
                self.received[key] = _open(self._me, key, fds.pop(0), fds.pop(0), *self._wanted[key])
        finally:
            for fd in fds:
                os.close(fd)
        peer.sendall(_DONE)

    def _keys_of(self, hello: bytes, *, num_fds: int) -> list[ChannelKey]:
        """The channels that a hello announces. Raises NotPassed unless this worker expects exactly these channels."""
        message = json.loads(hello)
        keys = [tuple(key) for key in message["channels"]]
        expected = _between(self._wanted, self._me, message["from"])
        sizes = [list(self._wanted[key]) for key in expected]
        if (
            keys != expected
            or message["sizes"] != sizes
            or num_fds != 2 * len(keys)
            or self.received.keys() & set(keys)
        ):
            raise NotPassed
        return expected


def pass_channels(me: str, peer: str, name: str, secret: str, wanted: Wanted) -> OpenEnds:
    """Make all channels between this worker and `peer`. Pass the ends of the peer to its listener, whose socket is `name`.

    Returns this worker's ends. Raises NotPassed or OSError if the peer cannot be reached, or does not know the secret.
    """
    keys = _between(wanted, me, peer)
    hello = json.dumps({"from": me, "channels": keys, "sizes": [wanted[key] for key in keys]}).encode()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
        contextlib.ExitStack() as theirs,
        contextlib.ExitStack() as ours,
    ):
        sock.settimeout(PATIENCE_S)
        sock.connect(f"\0{name}")
        _begin(sock, PATIENCE_S)
        our_nonce = secrets.token_bytes(NONCE_BYTES)
        sock.sendall(_SIZE.pack(len(hello)) + hello + our_nonce)
        their_nonce, proof = _read(sock, NONCE_BYTES), _read(sock, PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(secret.encode(), b"listener", hello, our_nonce, their_nonce)):
            raise NotPassed
        fds, own = list[int](), dict[ChannelKey, SenderEnd | ReceiverEnd]()
        for key in keys:
            sender_end, receiver_end = make_shm_channel(*wanted[key])
            mine, other = (sender_end, receiver_end) if key[0] == me else (receiver_end, sender_end)
            theirs.callback(other.close)
            ours.callback(mine.close)
            own[key] = mine
            fds += other.fds
        socket.send_fds(sock, [_proof(secret.encode(), b"connector", hello, our_nonce, their_nonce)], fds)
        if _read(sock, len(_DONE)) != _DONE:
            raise NotPassed
        ours.pop_all()  # from here on, the descriptors belong to the open ends
        return {key: _open(me, key, *end.fds, *wanted[key]) for key, end in own.items()}


def connects(me: str, peer: str) -> bool:
    """Return True if `me` connects to `peer`, and False if `peer` connects to `me`. Both workers get the same answer."""
    return me < peer


def _between(wanted: Wanted, one: str, other: str) -> list[ChannelKey]:
    return sorted(key for key in wanted if {*key[:2]} == {one, other})


def _open(me: str, key: ChannelKey, memory_fd: int, doorbell_fd: int, slot_bytes: int, slots: int) -> Any:
    sender, receiver, _ = key
    if sender == me:
        return ShmSender.open(memory_fd, doorbell_fd, slot_bytes, slots, peer=receiver)
    return ShmReceiver.open(memory_fd, doorbell_fd, slot_bytes, slots, peer=sender)


def _begin(sock: socket.socket, patience_s: float) -> None:
    """Check that the process at the other end belongs to the same user account as this process.

    A process of another account does not know the secret. But without this check, this worker would wait for its messages.
    """
    sock.settimeout(patience_s)
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        raise NotPassed


def _proof(secret: bytes, who: bytes, hello: bytes, connectors_nonce: bytes, listeners_nonce: bytes) -> bytes:
    """The proof that `who` knows the secret. `who` is a part of the proof, so that nobody can send a proof back to its author."""
    parts: Sequence[bytes] = (who, hashlib.sha256(hello).digest(), connectors_nonce, listeners_nonce)
    return hmac.digest(secret, b"".join([b"choreo descriptors ", *parts]), "sha256")


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise NotPassed
        data += part
    return data
