"""Bundles: values that a reader may use although they are up to `max_lag` updates old.

All these values from one group to another group are one bundle: they travel together. The sender sends a new version of the
bundle with every update.

    BundleHere       sender and reader are in this process: keeps the last versions, and a schedule chooses one to read
    BundleSender     sends to another process: one message per version
    BundleReceiver   receives from other processes: takes all versions that have arrived; waits only if the newest is too old

With merge="any" (`one_by_one`), each version is sent to one worker, and this worker reads it once; see `arrivals.py`.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from choreo.partition.program import Ref, Transfer
from choreo.runtime.engine.backend import Backend, Site, Timed
from choreo.runtime.engine.messages import Overlap, Topology, received_type, sent_type
from choreo.runtime.engine.schedule import ChooseVersion, VersionRead

BUNDLE = " (bundle)"
"""The name of the link for bundles is the name of the peer followed by this text."""
Stores = Mapping[Site, dict[Ref, Any]]
"""For each site in this process, the values that the site holds."""


class NoMoreWork(Exception):
    """With merge="any": the learner needs no more work from this worker until the next call of `run`."""


@dataclass(kw_only=True)
class CurrentUpdate:
    """The update that the program currently computes, and the versions that were read for it."""

    one_by_one: bool = False
    """True with merge="any". Then each version is sent to one worker, and this worker reads it once."""
    choose_version: ChooseVersion | None = None
    """Chooses the version that `BundleHere` reads. If this is None, `BundleHere` reads the oldest version that it keeps."""
    number: int = 0
    """The number of the update."""
    log: list[VersionRead] = field(default_factory=list)
    """The versions that were read."""


class BundleHere:
    """A bundle from all sites of one group to all sites of another group. All these sites are in this process."""

    def __init__(self, step: Transfer, stores: Stores, topology: Topology, backend: Backend, update: CurrentUpdate):
        assert step.lag is not None
        self.step, self.stores, self.backend, self.update = step, stores, backend, update
        self.senders, self.receivers = topology.here(step.src), topology.here(step.dst)
        self.kept: deque[tuple[int, list[list[Any]]]] = deque(maxlen=1 if update.one_by_one else step.lag + 1)

    def publish(self, _: int) -> None:
        stores = [self.stores[self.step.src, r] for r in self.senders]
        parts = [[self.backend.copy(store[move.src]) for store in stores] for move in self.step.moves]
        self.kept.append((self.update.number, parts))

    def read(self, _: int) -> None:
        for r in self.receivers:
            reader = f"{self.step.dst}-{r}"
            version = self._version(reader)
            self.update.log.append(VersionRead(reader, self.update.number, version))
            parts = next(parts for v, parts in self.kept if v == version)
            for move, own in zip(self.step.moves, parts, strict=True):
                value = self.backend.reshard(own, move, r, len(self.receivers), self.step)
                self.stores[self.step.dst, r][move.dst] = value

    def _version(self, reader: str) -> int:
        oldest, choose = self.kept[0][0], self.update.choose_version
        return oldest if choose is None else choose(reader, self.update.number, oldest)


class BundleSender:
    """The sending end of a bundle from this process to one other process."""

    def __init__(
        self, step: Transfer, peer: str, message: list[Overlap], stores: Stores, topology: Topology, backend: Backend,
        update: CurrentUpdate, timed: Timed,
    ):  # fmt: skip
        self.backend, self.update = backend, update
        self.send = timed("send", peer, topology.links[peer + BUNDLE].send)
        self.sources = [(stores[step.src, each.sender], each.move.src, each.take) for each in message]
        self.types = [sent_type(backend, each, topology.replicas(step.src)) for each in message]

    def publish(self, _: int) -> None:
        to_host, head = self.backend.to_host, np.array([self.update.number, True], np.int64)
        self.send([head, *(to_host(store[slot])[take] for store, slot, take in self.sources)])

    def send_no_more_work(self) -> None:
        """Send a message of zeros. `BundleReceiver` reads its second number as the flag `is_work`, and raises `NoMoreWork`."""
        self.send([np.zeros(2, np.int64), *(np.zeros(shape, dtype) for shape, dtype in self.types)])


class BundleReceiver:
    """The receiving end of a bundle from other processes to this process."""

    def __init__(
        self, step: Transfer, incoming: Mapping[str, list[Overlap]], stores: Stores, topology: Topology,
        backend: Backend, update: CurrentUpdate, timed: Timed,
    ):  # fmt: skip
        self.step, self.stores, self.backend, self.update = step, stores, backend, update
        self.readers = topology.here(step.dst)
        self.targets = list(itertools.product(step.moves, self.readers))
        self.types = [received_type(backend, move, topology.replicas(step.dst)) for move, _ in self.targets]
        number = {(id(move), d): i for i, (move, d) in enumerate(self.targets)}
        self.links = [topology.links[peer + BUNDLE] for peer in incoming]
        self.receives = [timed("wait", peer, link.receive) for peer, link in zip(incoming, self.links, strict=True)]
        self.puts = [
            [(number[id(each.move), each.receiver], each.put) for each in message] for message in incoming.values()
        ]
        self.version: int | None = None
        self.held: list[Any] = []

    def read(self, _: int) -> None:
        if self.update.one_by_one or self._is_too_old():
            self._take_next()
        while not self.update.one_by_one and (self._is_too_old() or all(link.ready() for link in self.links)):
            self._take_next()
        assert self.version is not None
        for value, (move, d) in zip(self.held, self.targets, strict=True):
            self.stores[self.step.dst, d][move.dst] = value
        for d in self.readers:
            self.update.log.append(VersionRead(f"{self.step.dst}-{d}", self.update.number, self.version))

    def _is_too_old(self) -> bool:
        assert self.step.lag is not None
        return self.version is None or self.version < self.update.number - self.step.lag

    def _take_next(self) -> None:
        buffers, head = [np.empty(shape, dtype) for shape, dtype in self.types], np.empty(2, np.int64)
        for receive, where in zip(self.receives, self.puts, strict=True):
            # With `...`, indexing returns a view even if the index selects a single number.
            receive([head, *(buffers[i][(*index, ...)] for i, index in where)])
        version, is_work = head.tolist()
        if not is_work:
            raise NoMoreWork
        self.version = version
        self.held = [
            self.backend.from_host(buffer, move.aval, (self.step.dst, d))
            for buffer, (move, d) in zip(buffers, self.targets, strict=True)
        ]
