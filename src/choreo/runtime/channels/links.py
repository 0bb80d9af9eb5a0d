"""How a worker reaches the others: for each of them a channel out and a channel in, over whatever carries it.

A description of a link, as it comes with a worker's briefing:

    ["env+actor-0", "learner", "", "shm", memory fd, doorbell fd, slot bytes, slots]     sender, receiver, kind, carrier ...
    ["learner", "env+actor-0", " (bundle)", "tcp", slot bytes, slots]
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

    def ready(self) -> bool:
        """Is there a message, so that `receive` would not wait?"""
        return self.receiver.ready()


class Links:
    """All channels of the worker `me`."""

    def __init__(self, me: str, descriptions: list[list[Any]], *, host: str = "127.0.0.1", keys: Any = None):
        """`host` and `keys` are for channels over TCP: where to listen, and a pair of keys, if there is one already."""
        self.me = me
        self.by_peer: dict[str, TwoWay] = {}
        self.remote = sorted(d for d in descriptions if d[3] == "tcp")
        self.listener: Any = None
        for sender, receiver, kind, *how in descriptions:
            if how[0] == "shm":
                self._open_shared(sender, receiver, kind, *how[1:])
        if self.remote:
            from choreo.runtime.channels.keys import KeyPair
            from choreo.runtime.channels.tcp import TcpListener

            self.listener = TcpListener.open(host, keys=keys or KeyPair.new())

    @property
    def contact(self) -> list[str] | None:
        """Address and public key for others, if this worker has channels over TCP."""
        return self.listener and [self.listener.address, self.listener.keys.public.decode()]

    def admit(self, contacts: dict[str, list[str]]) -> None:
        """Let the others in. Nobody may connect before all have done this."""
        if self.listener is not None:
            self.listener.admit({key.encode(): name for name, (_, key) in contacts.items()})

    def connect(self, contacts: dict[str, list[str]]) -> None:
        """Open the channels over TCP: in the same order everywhere, since both ends wait for each other."""
        if self.listener is None:
            return
        from choreo.runtime.channels.tcp import connect

        for sender, receiver, kind, _, slot_bytes, slots in self.remote:
            name, sizes = f"{sender} -> {receiver}{kind}", {"slot_bytes": slot_bytes, "slots": slots}
            if sender == self.me:
                address, key = contacts[receiver]
                keys = self.listener.keys
                channel = connect(address, name, keys=keys, peer=receiver, peer_key=key.encode(), end="sender", **sizes)
                self._with(receiver + kind).sender = channel
            else:
                self._with(sender + kind).receiver = self.listener.accept_channel(name, peer=sender, **sizes)
        self.listener.close()

    def _open_shared(self, sender: str, receiver: str, kind: str, *how: int) -> None:
        from choreo.runtime.channels.shm import ShmReceiver, ShmSender

        if sender == self.me:
            self._with(receiver + kind).sender = ShmSender.open(*how, peer=receiver)
        else:
            self._with(sender + kind).receiver = ShmReceiver.open(*how, peer=sender)

    def _with(self, peer: str) -> TwoWay:
        return self.by_peer.setdefault(peer, TwoWay())

    def close(self) -> None:
        for link in self.by_peer.values():
            for channel in (link.sender, link.receiver):
                if channel is not None:
                    channel.close()
        if self.listener is not None:
            self.listener.close()
