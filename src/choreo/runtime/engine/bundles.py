"""What may be out of date: a bundle is sent whenever there is a new version, and read as it is.

    here       sender and reader in this process: the last versions are kept, a schedule says which is read
    sender     to another process, one message per version
    receiver   takes what has come; waits only if what it has is older than allowed

With merge="any" (`one_by_one`) every version is sent to one worker, which reads it once; see `arrivals.py`.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from choreo.partition.program import Ref, Transfer
from choreo.runtime.engine.backend import Backend, Site, Watch
from choreo.runtime.engine.messages import Neighbourhood, Piece, piece_type, taken_type
from choreo.runtime.engine.schedule import ChooseVersion, VersionRead

BUNDLE = " (bundle)"
"""After the name of a peer: the link for what may be out of date."""
Stores = Mapping[Site, dict[Ref, Any]]


class NoMoreWork(Exception):
    """Whoever learns wants no more parts for now."""


@dataclass(kw_only=True)
class Updates:
    """The update that a run of a program goes into, and what has been read for it."""

    one_by_one: bool = False
    versions: ChooseVersion | None = None
    """Says which version is read, where sender and reader are both here."""
    number: int = 0
    log: list[VersionRead] = field(default_factory=list)


class BundleHere:
    """From all sites of a group to all of another, in this process."""

    def __init__(self, step: Transfer, stores: Stores, hood: Neighbourhood, backend: Backend, updates: Updates):
        assert step.lag is not None
        self.step, self.stores, self.backend, self.updates = step, stores, backend, updates
        self.senders, self.receivers = hood.here(step.src), hood.here(step.dst)
        self.kept: deque[tuple[int, list[list[Any]]]] = deque(maxlen=1 if updates.one_by_one else step.lag + 1)

    def publish(self, _: int) -> None:
        stores = [self.stores[self.step.src, r] for r in self.senders]
        parts = [[self.backend.copy(store[move.src]) for store in stores] for move in self.step.moves]
        self.kept.append((self.updates.number, parts))

    def read(self, _: int) -> None:
        for r in self.receivers:
            reader = f"{self.step.dst}-{r}"
            version = self._version(reader)
            self.updates.log.append(VersionRead(reader, self.updates.number, version))
            parts = next(parts for v, parts in self.kept if v == version)
            for move, own in zip(self.step.moves, parts, strict=True):
                value = self.backend.reshard(own, move, r, len(self.receivers), self.step)
                self.stores[self.step.dst, r][move.dst] = value

    def _version(self, reader: str) -> int:
        oldest, choose = self.kept[0][0], self.updates.versions
        return oldest if choose is None else choose(reader, self.updates.number, oldest)


class BundleSender:
    """From this process to one other."""

    def __init__(
        self, step: Transfer, peer: str, message: list[Piece], stores: Stores, hood: Neighbourhood, backend: Backend,
        updates: Updates, watch: Watch,
    ):  # fmt: skip
        self.backend, self.updates = backend, updates
        self.send = watch("send", peer, hood.links[peer + BUNDLE].send)
        self.sources = [(stores[step.src, piece.sender], piece.move.src, piece.take) for piece in message]
        self.types = [taken_type(backend, piece, hood.replicas(step.src)) for piece in message]

    def publish(self, _: int) -> None:
        to_host, head = self.backend.to_host, np.array([self.updates.number, True], np.int64)
        self.send([head, *(to_host(store[slot])[take] for store, slot, take in self.sources)])

    def say_no_more_work(self) -> None:
        self.send([np.zeros(2, np.int64), *(np.zeros(shape, dtype) for shape, dtype in self.types)])


class BundleReceiver:
    """From other processes to this one."""

    def __init__(
        self, step: Transfer, incoming: Mapping[str, list[Piece]], stores: Stores, hood: Neighbourhood,
        backend: Backend, updates: Updates, watch: Watch,
    ):  # fmt: skip
        self.step, self.stores, self.backend, self.updates = step, stores, backend, updates
        self.readers = hood.here(step.dst)
        self.targets = list(itertools.product(step.moves, self.readers))
        self.types = [piece_type(backend, move, hood.replicas(step.dst)) for move, _ in self.targets]
        number = {(id(move), d): i for i, (move, d) in enumerate(self.targets)}
        self.links = [hood.links[peer + BUNDLE] for peer in incoming]
        self.receives = [watch("wait", peer, link.receive) for peer, link in zip(incoming, self.links, strict=True)]
        self.puts = [[(number[id(p.move), p.receiver], p.put) for p in message] for message in incoming.values()]
        self.version: int | None = None
        self.held: list[Any] = []

    def read(self, _: int) -> None:
        if self.updates.one_by_one or self._is_too_old():
            self._take_next()
        while not self.updates.one_by_one and (self._is_too_old() or all(link.ready() for link in self.links)):
            self._take_next()
        assert self.version is not None
        for value, (move, d) in zip(self.held, self.targets, strict=True):
            self.stores[self.step.dst, d][move.dst] = value
        for d in self.readers:
            self.updates.log.append(VersionRead(f"{self.step.dst}-{d}", self.updates.number, self.version))

    def _is_too_old(self) -> bool:
        assert self.step.lag is not None
        return self.version is None or self.version < self.updates.number - self.step.lag

    def _take_next(self) -> None:
        buffers, head = [np.empty(shape, dtype) for shape, dtype in self.types], np.empty(2, np.int64)
        for receive, where in zip(self.receives, self.puts, strict=True):
            receive([head, *(buffers[i][(*index, ...)] for i, index in where)])  # a view, also of one number
        version, is_work = head.tolist()
        if not is_work:
            raise NoMoreWork
        self.version = version
        self.held = [
            self.backend.from_host(buffer, move.aval, (self.step.dst, d))
            for buffer, (move, d) in zip(buffers, self.targets, strict=True)
        ]
