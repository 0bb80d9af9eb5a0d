"""How a worker reaches the others: for each of them a channel out and a channel in, over whatever carries it.

A description of a link, as it comes with a worker's briefing:

    ["env+actor-0", "learner", "shm", memory fd, doorbell fd, slot bytes, slots]        sender, receiver, carrier ...
    ["env+actor-0", "learner", "tcp", slots]
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


class TwoWay:
    """The channels to one peer."""

    def __init__(self):
        self.sender: Any = None
        self.receiver: Any = None

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        self.sender.send(arrays)

    def receive(self, into: Sequence[np.ndarray]) -> None:
        self.receiver.receive(into)


class Links:
    """All channels of the worker `me`."""

    def __init__(self, me: str, descriptions: list[list[Any]], *, host: str = "127.0.0.1", token: bytes = b""):
        self.me, self.token = me, token
        self.by_peer: dict[str, TwoWay] = {}
        self.remote = sorted(d for d in descriptions if d[2] == "tcp")
        self.listener: Any = None
        for sender, receiver, *how in descriptions:
            if how[0] == "shm":
                self._open_shared(sender, receiver, *how[1:])
        if self.remote:
            from choreo.runtime.tcp import TcpListener

            self.listener = TcpListener.open(host, token=token)

    @property
    def address(self) -> str | None:
        """Where others may connect, if this worker has channels over TCP."""
        return self.listener and self.listener.address

    def connect(self, addresses: dict[str, str]) -> None:
        """Open the channels over TCP: in the same order everywhere, since both ends wait for each other."""
        from choreo.runtime.tcp import connect

        for sender, receiver, _, slots in self.remote:
            name = f"{sender} -> {receiver}"
            if sender == self.me:
                channel = connect(addresses[receiver], name, self.token, peer=receiver, end="sender", slots=slots)
                self._with(receiver).sender = channel
            else:
                self._with(sender).receiver = self.listener.accept_channel(name, peer=sender, slots=slots)

    def _open_shared(self, sender: str, receiver: str, memory_fd: int, doorbell_fd: int, size: int, slots: int) -> None:
        from choreo.runtime.shm import ShmReceiver, ShmSender

        if sender == self.me:
            self._with(receiver).sender = ShmSender.open(memory_fd, doorbell_fd, size, slots, peer=receiver)
        else:
            self._with(sender).receiver = ShmReceiver.open(memory_fd, doorbell_fd, size, slots, peer=sender)

    def _with(self, peer: str) -> TwoWay:
        return self.by_peer.setdefault(peer, TwoWay())

    def close(self) -> None:
        for link in self.by_peer.values():
            for channel in (link.sender, link.receiver):
                if channel is not None:
                    channel.close()
        if self.listener is not None:
            self.listener.close()
