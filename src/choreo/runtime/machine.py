"""Executes a program at the sites that live in this process: all of them (`inprocess`), or those of one worker.

    step      at a site that lives here             between sites
    Segment   a compiled call
    HostCall  Python on numpy arrays
    Loop      its body again and again
    Transfer                                        handed over, if both live here; else a message through a channel

A program is one global order, and every process runs a subsequence of it. It is turned into a list of functions once, so
that a step costs little more than what it calls. Nothing here imports JAX: what is done with compiled functions and device
arrays is the `Backend`'s.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from choreo.host import HostObjects
from choreo.partition.program import (
    Axis,
    Constant,
    HostCall,
    Loop,
    LoopPart,
    Move,
    Program,
    Ref,
    Segment,
    Step,
    Transfer,
    groups_of,
)
from choreo.runtime.profile import kind_of
from choreo.runtime.schedule import Read, Versions
from choreo.types import GroupName

Site = tuple[GroupName, int]
"""A group and the number of one of its replicas."""
Store = dict[Ref, Any]
"""What one site holds, by slot."""
Action = Callable[[int], None]
"""One step of a program at the sites here; its argument is the step of the loop around."""


Watch = Callable[[str, str, Callable[..., Any]], Callable[..., Any]]
"""From a kind of work, its name and a function to the same function, timed."""


@runtime_checkable
class Backend(Protocol):
    """What can be done with compiled functions and device arrays."""

    def load(self, segment: Segment, replica: int = 0) -> Callable[..., Sequence[Any]]:
        """The compiled function `(replica, step, *inputs) -> results`, to run at one of the replicas."""
        ...

    def scalar(self, number: int) -> Any:
        """A number as a compiled function likes it best."""
        ...

    def to_host(self, value: Any) -> np.ndarray:
        """A value as numpy, to be sent."""
        ...

    def on_host(self, value: Any) -> bool:
        """Is it cheap to read from Python?"""
        ...

    def load_together(self, segment: Segment, here: Sequence[int], replicas: int) -> Callable[..., list[Sequence[Any]]]:
        """A compiled function whose replicas combine values: `(step, inputs of each replica here) -> results of each`."""
        ...

    def from_host(self, array: np.ndarray, like: Any, site: Site) -> Any:
        """What was received, on the site's device; `like` tells its type."""
        ...

    def host_type(self, like: Any) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and type of a value as it is sent."""
        ...

    def stack(self, slices: list[Any], like: Any) -> Any:
        """Slices of a loop as one array."""
        ...

    def reshard(self, parts: list[Any], move: Move, receiver: int, receivers: int, transfer: Transfer) -> Any:
        """What a receiver here gets from senders that are all here."""
        ...

    def key(self, data: np.ndarray, site: Site) -> Any:
        """A random key from its numbers."""
        ...

    def fold_in(self, key: Any, number: int) -> Any:
        """Another random key."""
        ...

    def number(self, value: int, site: Site) -> Any:
        """The number of an iteration."""
        ...

    def copy(self, value: Any) -> Any:
        """The same in memory of its own."""
        ...

    def own(self, values: list[Any], refs: Sequence[Ref | None]) -> list[Any]:
        """What is carried on, each value in memory of its own."""
        ...

    def chunks(self, program: Program, segment: Segment, num_carry: int, here: Sequence[int]) -> Any:
        """Runs several iterations at once."""
        ...


class PythonOnly:
    """The `Backend` of sites that compile nothing."""

    def load(self, segment: Segment, replica: int = 0) -> Callable[..., Sequence[Any]]:
        raise AssertionError(f"`{segment.group}` was to run nothing but Python, and got the segment `{segment.name}`")

    def scalar(self, number: int) -> int:
        return number

    def to_host(self, value: Any) -> np.ndarray:
        return np.asarray(value)

    def on_host(self, value: Any) -> bool:
        return True

    def load_together(self, segment: Segment, here: Sequence[int], replicas: int) -> Callable[..., list[Sequence[Any]]]:
        raise AssertionError(f"`{segment.group}` was to run nothing but Python, and got the segment `{segment.name}`")

    def from_host(self, array: np.ndarray, like: Any, site: Site) -> np.ndarray:
        return array

    def host_type(self, like: Any) -> tuple[tuple[int, ...], np.dtype]:
        return like.shape, like.dtype

    def stack(self, slices: list[Any], like: Any) -> np.ndarray:
        return np.stack(slices) if slices else np.empty(like.shape, like.dtype)

    def reshard(self, parts: list[Any], move: Move, receiver: int, receivers: int, transfer: Transfer) -> Any:
        raise AssertionError("a worker that only runs Python holds sites of one group")

    def key(self, data: np.ndarray, site: Site) -> np.ndarray:
        return data

    def fold_in(self, key: Any, number: int) -> np.ndarray:
        return key  # nothing here draws random numbers

    def number(self, value: int, site: Site) -> np.ndarray:
        return np.asarray(value, np.int32)

    def copy(self, value: Any) -> Any:
        return np.array(value)

    def own(self, values: list[Any], refs: Sequence[Ref | None]) -> list[Any]:
        return values  # nothing here takes over memory

    def chunks(self, program: Program, segment: Segment, num_carry: int, here: Sequence[int]) -> Any:
        raise AssertionError("Python alone is never one compiled segment")


@runtime_checkable
class Link(Protocol):
    """The two channels between this worker and another."""

    def send(self, arrays: Sequence[np.ndarray]) -> None: ...
    def receive(self, into: Sequence[np.ndarray]) -> None: ...
    def ready(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """Who lives where."""

    me: str
    """The name of this process."""
    homes: Mapping[Site, str]
    """The process in which each site lives."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """How to reach the other processes."""

    def replicas(self, group: GroupName) -> int:
        return sum(site[0] == group for site in self.homes)

    def here(self, group: GroupName) -> list[int]:
        return [r for (g, r), home in self.homes.items() if g == group and home == self.me]

    @property
    def sites(self) -> list[Site]:
        return [site for site, home in self.homes.items() if home == self.me]


BUNDLE = " (bundle)"
"""After the name of a peer: the link for what may be out of date."""


class NoMoreWork(Exception):
    """Whoever learns wants no more parts for now."""


class Machine:
    """One program at the sites of this process."""

    def __init__(
        self,
        program: Program,
        hood: Neighbourhood,
        backend: Backend,
        hosts: Mapping[Site, HostObjects],
        watch: "Watch | None" = None,
        *,
        versions: Versions | None = None,
        one_by_one: bool = False,
    ):
        """`versions` says which version of a bundle is read, where sender and reader are both here. `one_by_one`: bundles
        are sent by `publish`, and read once each."""
        self.program, self.hood, self.backend, self.hosts = program, hood, backend, hosts
        self.watch: Watch = watch or (lambda kind, name, fn: fn)
        self.versions, self.one_by_one = versions, one_by_one
        self.update = 0
        """The number of the update that this run of the program goes into."""
        self.log: list[Read] = []
        self.publishing: list[Action] = []
        self.stores: dict[Site, Store] = {site: {} for site in hood.sites}
        self.actions = self._lower(program.steps, self.stores, inside=False)

    def publish(self, given: Mapping[Site, Mapping[int, Any]]) -> None:
        """Send bundles, for a later run of the program."""
        self._load(given)
        for action in self.publishing:
            action(0)

    def _load(self, given: Mapping[Site, Mapping[int, Any]]) -> None:
        for site, store in self.stores.items():
            store.clear()
            for position, port in enumerate(self.program.ins):
                if site in given and site[0] in port.held and position in given[site]:
                    store[port.held[site[0]][0]] = given[site][position]

    def run(self, given: Mapping[Site, Mapping[int, Any]]) -> dict[Site, list[Any]]:
        """Run the program once. `given`: inputs by position; returns every output at each site that holds it, else None."""
        self._load(given)
        for action in self.actions:
            action(0)
        results = {}
        for site, store in self.stores.items():
            held = [port.held.get(site[0]) for port in self.program.outs]
            results[site] = [None if where is None else _read(store, where[0]) for where in held]
            store.clear()
        return results

    def _lower(self, steps: Iterable[Step], stores: dict[Site, Store], *, inside: bool) -> list[Action]:
        actions: list[Action] = []
        for step in steps:
            if not any(self.hood.here(group) for group in groups_of(step)):
                continue
            if isinstance(step, Segment):
                actions += self._segment(step, stores)
            elif isinstance(step, HostCall):
                actions += self._host_call(step, stores)
            elif isinstance(step, Loop):
                actions.append(self._loop(step, stores))
            else:
                actions += self._transfer(step, stores, inside=inside)
        return actions

    def _segment(self, step: Segment, stores: dict[Site, Store]) -> list[Action]:
        if step.combines:
            return [self._segment_together(step, stores)]
        scalar = self.backend.scalar
        slots, outs = [given.slot for given in step.ins], step.outs

        def at(store: Store, index: Any, call: Callable[..., Sequence[Any]]) -> Action:
            def run(t: int) -> None:
                store.update(zip(outs, call(index, scalar(t), *[store[slot] for slot in slots]), strict=True))

            return self.watch(kind_of(step.roles), step.name, run)

        return [at(stores[step.group, r], scalar(r), self.backend.load(step, r)) for r in self.hood.here(step.group)]

    def _segment_together(self, step: Segment, stores: dict[Site, Store]) -> Action:
        here, scalar = self.hood.here(step.group), self.backend.scalar
        call = self.backend.load_together(step, here, self.hood.replicas(step.group))
        slots, outs = [given.slot for given in step.ins], step.outs
        held = [stores[step.group, r] for r in here]

        def run(t: int) -> None:
            results = call(scalar(t), [[store[slot] for slot in slots] for store in held])
            for store, values in zip(held, results, strict=True):
                store.update(zip(outs, values, strict=True))

        return self.watch(kind_of(step.roles), step.name, run)

    def _host_call(self, step: HostCall, stores: dict[Site, Store]) -> list[Action]:
        replicas, to_host, on_host = self.hood.replicas(step.group), self.backend.to_host, self.backend.on_host
        wanted = [(i, slot) for i, slot in enumerate(step.outs) if slot is not None]

        def at(site: Site) -> Action:
            store, call = stores[site], self.hosts[site].bind(step.fn, step.shards)
            block = _block(0, site[1], replicas)
            ins = list(zip(step.ins, step.cuts, strict=True))

            def run(_: int) -> None:
                given = []
                for ref, cut in ins:
                    value = _read(store, ref)
                    if not isinstance(value, np.ndarray):
                        host = to_host(value)
                        if on_host(value) and not isinstance(ref, Constant):
                            store[ref] = host  # who stacks it need not convert it again
                        value = host
                    given.append(block(value) if cut else value)
                results = call(*given)
                for i, slot in wanted:
                    store[slot] = results[i]

            return self.watch("env", step.name, run)

        return [at((step.group, r)) for r in self.hood.here(step.group)]

    def _loop(self, loop: Loop, outside: dict[Site, Store]) -> Action:
        parts = {site: loop.parts[site[0]] for site in self.hood.sites if site[0] in loop.parts}
        inside: dict[Site, Store] = {site: {} for site in parts}
        body = self._lower(loop.body, inside, inside=True)
        runs = [_LoopRun(part, loop, outside[site], inside[site], self.backend) for site, part in parts.items()]
        steps = range(loop.length - 1, -1, -1) if loop.reverse else range(loop.length)

        def run(_: int) -> None:
            for each in runs:
                each.begin()
            for t in steps:
                for each in runs:
                    each.slice(t)
                for action in body:
                    action(t)
                for each in runs:
                    each.keep(t)
            for each in runs:
                each.end()

        return run

    def _transfer(self, step: Transfer, stores: dict[Site, Store], *, inside: bool) -> list[Action]:
        senders, receivers = self.hood.replicas(step.src), self.hood.replicas(step.dst)
        src_here, dst_here = self.hood.here(step.src), self.hood.here(step.dst)
        if step.lag is not None:
            return self._bundle(step, stores)
        if len(src_here) == senders and len(dst_here) == receivers:
            return [lambda _: self._hand_over(step, stores)]
        pieces = messages(step, self.hood)
        actions = []
        me = self.hood.me
        for (src, dst), message in pieces.items():
            if src == me != dst:
                actions.append(self._send(step, dst, message, stores))
        incoming = {src: message for (src, dst), message in pieces.items() if dst == me}
        if incoming:
            actions.append(self._receive(step, incoming, stores, inside=inside))
        return actions

    def _bundle(self, step: Transfer, stores: dict[Site, Store]) -> list[Action]:
        """What may be out of date: sent whenever there is a new version, read as it is."""
        if self.hood.here(step.src) and self.hood.here(step.dst):
            return self._bundle_here(step, stores)
        pieces, me = messages(step, self.hood), self.hood.me
        sends = [self._send_bundle(step, dst, message, stores) for (src, dst), message in pieces.items() if src == me]
        if self.one_by_one:
            self.publishing += sends
            sends = []
        incoming = {src: message for (src, dst), message in pieces.items() if dst == me}
        return sends + ([self._receive_bundle(step, incoming, stores)] if incoming else [])

    def _bundle_here(self, step: Transfer, stores: dict[Site, Store]) -> list[Action]:
        assert step.lag is not None
        senders = [stores[step.src, r] for r in self.hood.here(step.src)]
        receivers = self.hood.here(step.dst)
        kept: deque[tuple[int, list[list[Any]]]] = deque(maxlen=1 if self.one_by_one else step.lag + 1)

        def publish(_: int) -> None:
            parts = [[self.backend.copy(store[move.src]) for store in senders] for move in step.moves]
            kept.append((self.update, parts))

        def read(_: int) -> None:
            for r in receivers:
                oldest, name = kept[0][0], f"{step.dst}-{r}"
                version = oldest if self.one_by_one or not self.versions else self.versions(name, self.update, oldest)
                self.log.append(Read(name, self.update, version))
                parts = next(parts for v, parts in kept if v == version)
                for move, own in zip(step.moves, parts, strict=True):
                    stores[step.dst, r][move.dst] = self.backend.reshard(own, move, r, len(receivers), step)

        if self.one_by_one:
            self.publishing.append(publish)
            return [read]
        return [publish, read]

    def _send_bundle(self, step: Transfer, dst: str, message: "list[Piece]", stores: dict[Site, Store]) -> Action:
        send, to_host = self.watch("send", dst, self.hood.links[dst + BUNDLE].send), self.backend.to_host
        sources = [(stores[step.src, piece.sender], piece.move.src, piece.take) for piece in message]

        def run(_: int) -> None:
            head = np.array([self.update, 1], np.int64)
            send([head, *(to_host(store[slot])[take] for store, slot, take in sources)])

        return run

    def say_no_more_work(self) -> None:
        """With `one_by_one`: tell the worker to stop."""
        for step in self.program.steps:
            for (src, dst), message in (messages(step, self.hood) if isinstance(step, Transfer) else {}).items():
                if isinstance(step, Transfer) and step.lag is not None and src == self.hood.me:
                    types = [_taken_type(self.backend, piece, self.hood.replicas(step.src)) for piece in message]
                    nothing = [np.zeros(shape, dtype) for shape, dtype in types]
                    self.hood.links[dst + BUNDLE].send([np.zeros(2, np.int64), *nothing])

    def _receive_bundle(self, step: Transfer, incoming: "dict[str, list[Piece]]", stores: dict[Site, Store]) -> Action:
        """Blocks only if what is here is older than allowed."""
        backend, receivers = self.backend, self.hood.replicas(step.dst)
        targets = list(itertools.product(range(len(step.moves)), self.hood.here(step.dst)))
        types = [_piece_type(backend, step.moves[m], receivers) for m, _ in targets]
        number = {(id(step.moves[m]), d): i for i, (m, d) in enumerate(targets)}
        links = [self.hood.links[src + BUNDLE] for src in incoming]
        receives = [self.watch("wait", src, link.receive) for src, link in zip(incoming, links, strict=True)]
        puts = [[(number[id(p.move), p.receiver], p.put) for p in message] for message in incoming.values()]
        version: int | None = None
        held: list[Any] = []

        def take_next() -> None:
            nonlocal version, held
            buffers, head = [np.empty(shape, dtype) for shape, dtype in types], np.empty(2, np.int64)
            for receive, where in zip(receives, puts, strict=True):
                receive([head, *(buffers[i][index] for i, index in where)])
            if not head[1]:
                raise NoMoreWork
            version = int(head[0])
            held = [
                backend.from_host(buffer, step.moves[m].aval, (step.dst, d))
                for buffer, (m, d) in zip(buffers, targets, strict=True)
            ]

        def read(_: int) -> None:
            assert step.lag is not None
            if self.one_by_one:
                take_next()
            else:
                while version is None or version < self.update - step.lag or all(link.ready() for link in links):
                    take_next()
            assert version is not None
            for value, (m, d) in zip(held, targets, strict=True):
                stores[step.dst, d][step.moves[m].dst] = value
            for d in self.hood.here(step.dst):
                self.log.append(Read(f"{step.dst}-{d}", self.update, version))

        return read

    def _hand_over(self, step: Transfer, stores: dict[Site, Store]) -> None:
        senders = [stores[step.src, r] for r in self.hood.here(step.src)]
        receivers = [stores[step.dst, r] for r in self.hood.here(step.dst)]
        for move in step.moves:
            parts = [store[move.src] for store in senders]
            for r, store in enumerate(receivers):
                store[move.dst] = self.backend.reshard(parts, move, r, len(receivers), step)

    def _send(self, step: Transfer, dst: str, message: "list[Piece]", stores: dict[Site, Store]) -> Action:
        send, to_host = self.watch("send", dst, self.hood.links[dst].send), self.backend.to_host
        sources = [(stores[step.src, piece.sender], piece.move.src, piece.take) for piece in message]

        def run(_: int) -> None:
            send([to_host(store[slot])[take] for store, slot, take in sources])

        return run

    def _receive(
        self, step: Transfer, incoming: "dict[str, list[Piece]]", stores: dict[Site, Store], *, inside: bool
    ) -> Action:
        backend, receivers, me = self.backend, self.hood.replicas(step.dst), self.hood.me
        targets = list(itertools.product(range(len(step.moves)), self.hood.here(step.dst)))
        types = [_piece_type(backend, step.moves[m], receivers) for m, _ in targets]
        number = {(id(step.moves[m]), d): i for i, (m, d) in enumerate(targets)}
        put = {src: [(number[id(p.move), p.receiver], p) for p in message] for src, message in incoming.items()}
        own = put.pop(me, [])
        gets = []
        for src, message in put.items():
            receive = self.watch("wait", src, self.hood.links[src].receive)
            gets.append((receive, [(i, piece.put) for i, piece in message]))
        moves = [((step.dst, d), step.moves[m].dst, step.moves[m].aval) for m, d in targets]

        def wait(_: int) -> None:
            buffers = [np.empty(shape, dtype) for shape, dtype in types]
            for i, piece in own:
                buffers[i][piece.put] = backend.to_host(stores[step.src, piece.sender][piece.move.src])[piece.take]
            for receive, where in gets:
                receive([buffers[i][index] for i, index in where])
            # Within a loop a compiled function takes numpy as it is; what many steps will read is put on the device once.
            for buffer, (site, slot, aval) in zip(buffers, moves, strict=True):
                store = stores[site]
                store[slot] = buffer if inside and _is_plain(aval) else backend.from_host(buffer, aval, site)

        return wait


class _LoopRun:
    """One site's side of a split scan."""

    def __init__(self, part: LoopPart, loop: Loop, outer: Store, inner: Store, backend: Backend):
        self.part, self.loop, self.outer, self.inner, self.backend = part, loop, outer, inner, backend
        self.stacked = [ref for ref, _, _ in part.ys]
        self.stacks: list[Any] | None = None

    def begin(self) -> None:
        part, outer = self.part, self.outer
        self.inner.clear()
        for slot, ref, *_ in (*part.consts, *part.carry, *part.xs):
            self.inner[slot] = _read(outer, ref)
        self.stacks = None

    def slice(self, t: int) -> None:
        for slot, ref in self.part.slices:
            self.inner[slot] = _read(self.outer, ref)[t]

    def keep(self, t: int) -> None:
        """Stack what this step gave, and go on to the next."""
        inner = self.inner
        if self.stacks is None:
            self.stacks = [self._stack(_read(inner, ref), aval) for ref, _, aval in self.part.ys]
        for stack, ref in zip(self.stacks, self.stacked, strict=True):
            value = inner[ref] if ref.__class__ is int else ref.value  # pyright: ignore[reportAttributeAccessIssue]
            if stack.__class__ is list:
                stack.append(value)
            elif value.__class__ is np.ndarray:
                stack[t] = value
            else:
                stack[t] = np.asarray(value)  # several times faster than to assign a device array
        inner.update([(slot, _read(inner, after)) for slot, _, after, _ in self.part.carry])

    def _stack(self, value: Any, aval: Any) -> Any:
        """What will hold a result of every step: in numpy where Python made it, else a list until the end."""
        return np.empty(aval.shape, aval.dtype) if value.__class__ is np.ndarray and _is_plain(aval) else []

    def end(self) -> None:
        for slot, _, _, last in self.part.carry:
            if last is not None:
                self.outer[last] = self.inner[slot]
        for (_, slot, aval), stack in zip(self.part.ys, self.stacks or [[]] * len(self.part.ys), strict=True):
            if stack.__class__ is list:
                stack = self._joined(stack[::-1] if self.loop.reverse else stack, aval)
            self.outer[slot] = stack
        self.inner.clear()
        self.stacks = None

    def _joined(self, slices: list[Any], aval: Any) -> Any:
        if not slices or not _is_plain(aval) or not self.backend.on_host(slices[0]):
            return self.backend.stack(slices, aval)
        whole = np.empty(aval.shape, aval.dtype)
        for t, value in enumerate(slices):
            whole[t] = np.asarray(value)
        return whole


def messages(step: Transfer, hood: Neighbourhood) -> "dict[tuple[str, str], list[Piece]]":
    """What each process sends to each other one for a transfer: the same list at both ends."""
    senders, receivers = hood.replicas(step.src), hood.replicas(step.dst)
    found: dict[tuple[str, str], list[Piece]] = {}
    for move in step.moves:
        for s, d in itertools.product(range(senders), range(receivers)):
            if overlap := _overlap(move, s, senders, d, receivers):
                ends = hood.homes[step.src, s], hood.homes[step.dst, d]
                found.setdefault(ends, []).append(Piece(move, s, d, *overlap))
    return found


@dataclass(frozen=True)
class Piece:
    """What one sender has for one receiver of a value."""

    move: Move
    sender: int
    receiver: int
    take: tuple[slice, ...]
    """Which part of what the sender holds."""
    put: tuple[slice, ...]
    """Where in what the receiver will hold."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of a value of this shape, what is sent."""
        cut = [a if b == slice(None) else b for a, b in zip(self.put, self.take, strict=True)]
        sizes = [n if c == slice(None) else c.stop - c.start for n, c in zip(whole, cut, strict=False)]
        return (*sizes, *whole[len(cut) :])


def _overlap(move: Move, s: int, senders: int, d: int, receivers: int) -> "tuple[tuple[slice, ...], ...] | None":
    """(what sender s takes, where receiver d puts it); None if it has nothing for it."""
    rank = len(move.aval.shape)
    take, put = [slice(None)] * rank, [slice(None)] * rank
    have, want = move.src_axis if senders > 1 else None, move.dst_axis if receivers > 1 else None
    if have is None and s != d * senders // receivers:
        return None  # every sender holds all of it: each sends to receivers of its own
    if have is not None and have == want:
        total = move.aval.shape[have]
        low = max(s * total // senders, d * total // receivers)
        high = min((s + 1) * total // senders, (d + 1) * total // receivers)
        if low >= high:
            return None
        take[have] = slice(low - s * total // senders, high - s * total // senders)
        put[have] = slice(low - d * total // receivers, high - d * total // receivers)
    else:
        if have is not None:
            size = move.aval.shape[have] // senders
            put[have] = slice(s * size, (s + 1) * size)
        if want is not None:
            size = move.aval.shape[want] // receivers
            take[want] = slice(d * size, (d + 1) * size)
    return tuple(take), tuple(put)


def _taken_type(backend: Backend, piece: "Piece", senders: int) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of what is sent of a value."""
    shape, dtype = backend.host_type(piece.move.aval)
    if piece.move.src_axis is not None:
        shape = tuple(n // senders if axis == piece.move.src_axis else n for axis, n in enumerate(shape))
    return np.empty(shape, np.bool_)[piece.take].shape, dtype


def _piece_type(backend: Backend, move: Move, receivers: int) -> tuple[tuple[int, ...], np.dtype]:
    shape, dtype = backend.host_type(move.aval)
    if move.dst_axis is not None:
        shape = tuple(n // receivers if axis == move.dst_axis else n for axis, n in enumerate(shape))
    return shape, dtype


def _block(axis: Axis, r: int, n: int) -> Callable[[Any], Any]:
    """Rows [r E/n, (r+1) E/n) of an axis."""

    def cut(value: Any) -> Any:
        if axis is None or n == 1:
            return value
        size = value.shape[axis] // n
        return value[(slice(None),) * axis + (slice(r * size, (r + 1) * size),)]

    return cut


def _is_plain(aval: Any) -> bool:
    """Is it an array of numbers, not of random keys?"""
    return isinstance(aval.dtype, np.dtype)


def _read(store: Store, ref: Ref) -> Any:
    return ref.value if isinstance(ref, Constant) else store[ref]
