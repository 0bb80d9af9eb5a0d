"""The channels from one worker to the others and back, in shared memory or over TCP.

The coordinator describes each channel in the worker's briefing: sender, receiver, kind, carrier, options of the carrier.
The kind is " (bundle)" for the channel of bundles, and empty for the channel of all other messages.

    ["env+actor-0", "learner", "", "shm", memory fd, doorbell fd, slot bytes, slots]
    ["learner", "env+actor-0", " (bundle)", "tcp", slot bytes, slots]
    ["learner", "env+actor-1", "", "passed", slot bytes, slots]

The last of these channels uses shared memory if one of the two workers can pass file descriptors to the other (`passing.py`).
Otherwise it uses TCP.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


class ChannelPair:
    """The channel to a peer and the channel from this peer. One of the two may be missing."""

    def __init__(self):
        self.sender: Any = None
        self.receiver: Any = None

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        self.sender.send(arrays)

    def receive(self, into: Sequence[np.ndarray]) -> None:
        self.receiver.receive(into)

    def ready(self) -> bool:
        """Return True if a message has arrived or the sender has finished; see `channels.base.Receiver`."""
        return self.receiver.ready()


class Links:
    """All channels of one worker."""

    def __init__(
        self,
        me: str,
        descriptions: list[list[Any]],
        *,
        host: str = "127.0.0.1",
        keys: Any = None,
        silence_s: float | None = None,
        secret: str = "",
    ):
        """`me` is the worker's name. `host`, `keys` and `silence_s` are for channels over TCP: the address to listen at, the
        worker's key pair, and the seconds after which a silent peer counts as lost. With `keys=None`, a new key pair is made.
        `secret` is the secret of the run, for channels that are passed."""
        self.me, self.tcp_options = me, {} if silence_s is None else {"silence_s": silence_s}
        self.by_peer: dict[str, ChannelPair] = {}
        """The channels, by the name of the peer followed by the kind."""
        self.over_tcp = sorted(d for d in descriptions if d[3] in ("tcp", "passed"))
        """The descriptions of the channels that use TCP, and of the channels that use TCP if they cannot be passed."""
        self.listener: Any = None
        self.secret, self.passing, self.passed = secret, None, dict[tuple[str, str, str], Any]()
        for sender, receiver, kind, *how in descriptions:
            if how[0] == "shm":
                self._open_shm(sender, receiver, kind, *how[1:])
        if self.over_tcp:
            from choreo.runtime.channels.keys import KeyPair
            from choreo.runtime.channels.tcp import TcpListener

            self.listener = TcpListener.open(host, keys=keys or KeyPair.new())
        if self._to_pass:
            from choreo.runtime.channels.passing import DescriptorListener

            self.passing: Any = DescriptorListener(me, secret, self._to_pass)

    @property
    def contact(self) -> list[str] | None:
        """The address, the public key, and the name of the Unix socket that the other workers need to connect.

        The name is empty if nothing can be passed to this worker. The result is None if none of its channels may use TCP.
        """
        if self.listener is None:
            return None
        return [self.listener.address, self.listener.keys.public.decode(), self.passing.name if self.passing else ""]

    @property
    def _to_pass(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        return {
            (src, dst, kind): (size, slots) for src, dst, kind, how, size, slots in self.over_tcp if how == "passed"
        }

    @property
    def messages(self) -> int:
        """How many messages were sent and received so far. Any thread may call this, also one that does not use the channels."""
        ends = [end for pair in list(self.by_peer.values()) for end in (pair.sender, pair.receiver) if end is not None]
        return sum(end.statistics().messages for end in ends)

    def wait_for_any(self, peers: Sequence[str]) -> None:
        """Wait until the channel from one of these peers may be ready; see `waiting.wait_for_any`."""
        from choreo.runtime.channels.waiting import wait_for_any

        wait_for_any([self.by_peer[peer].receiver for peer in peers])

    def admit(self, contacts: dict[str, list[str]]) -> None:
        """Let the other workers connect. Every worker must call this before any worker calls `connect`."""
        if self.listener is not None:
            self.listener.admit({key.encode(): name for name, (_, key, _) in contacts.items()})

    def pass_on(self, contacts: dict[str, list[str]]) -> list[list[str]]:
        """Pass file descriptors to the workers on this machine, where possible. Returns the channels that now share memory."""
        if not self._to_pass:
            return []
        from choreo.runtime.channels.passing import NotPassed, connects, pass_channels

        found: dict[tuple[str, str, str], Any] = {}
        for peer in sorted({name for key in self._to_pass for name in key[:2]} - {self.me}):
            if connects(self.me, peer):
                try:
                    found |= pass_channels(self.me, peer, contacts[peer][2], self.secret, self._to_pass)
                except (NotPassed, OSError):
                    continue  # `connect` opens the channels between this worker and this peer over TCP
        self.passed = found
        return [list(key) for key in found]

    def connect(self, contacts: dict[str, list[str]], passed: list[list[str]]) -> None:
        """Open the channels over TCP, except for those in `passed`, which share memory.

        All workers open them in the same order (sorted), because the two ends of a channel wait for each other.
        """
        if self.listener is None:
            return
        from choreo.runtime.channels.tcp import connect

        shared = {(src, dst, kind) for src, dst, kind in passed}
        self._use_passed(shared)
        for sender, receiver, kind, _, slot_bytes, slots in self.over_tcp:
            if (sender, receiver, kind) in shared:
                continue
            name, options = (
                f"{sender} -> {receiver}{kind}",
                {"slot_bytes": slot_bytes, "slots": slots, **self.tcp_options},
            )
            if sender == self.me:
                address, key, _ = contacts[receiver]
                keys = self.listener.keys
                channel = connect(
                    address, name, keys=keys, peer=receiver, peer_key=key.encode(), end="sender", **options
                )
                self._pair(receiver + kind).sender = channel
            else:
                self._pair(sender + kind).receiver = self.listener.accept_channel(name, peer=sender, **options)
        self.listener.close()

    def _use_passed(self, shared: set[tuple[str, str, str]]) -> None:
        """Use the ends of the channels in `shared`. Close all other ends that this worker has made or received."""
        if self.passing is None:
            return
        self.passing.close()
        for key, end in (self.passed | self.passing.received).items():
            sender, receiver, kind = key
            if key not in shared:
                end.close()  # the worker that passed this end does not know that it has arrived, so both workers use TCP
            elif sender == self.me:
                self._pair(receiver + kind).sender = end
            else:
                self._pair(sender + kind).receiver = end

    def _open_shm(self, sender: str, receiver: str, kind: str, *how: int) -> None:
        from choreo.runtime.channels.shm import ShmReceiver, ShmSender

        if sender == self.me:
            self._pair(receiver + kind).sender = ShmSender.open(*how, peer=receiver)
        else:
            self._pair(sender + kind).receiver = ShmReceiver.open(*how, peer=sender)

    def _pair(self, peer: str) -> ChannelPair:
        return self.by_peer.setdefault(peer, ChannelPair())

    def close(self) -> None:
        for link in self.by_peer.values():
            for channel in (link.sender, link.receiver):
                if channel is not None:
                    channel.close()
        if self.listener is not None:
            self.listener.close()
