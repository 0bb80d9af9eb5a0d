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
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from choreo.host import HostObjects
from choreo.partition.program import (
    Axis,
    Constant,
    HostCall,
    Loop,
    LoopPart,
    Program,
    Ref,
    Segment,
    Step,
    Transfer,
    groups_of,
)
from choreo.runtime.engine.backend import Backend, Loaded, Site, Watch
from choreo.runtime.engine.bundles import BundleHere, BundleReceiver, BundleSender, Updates
from choreo.runtime.engine.messages import Neighbourhood, Piece, messages, piece_type
from choreo.runtime.engine.profile import kind_of
from choreo.runtime.engine.schedule import ChooseVersion

Store = dict[Ref, Any]
"""What one site holds, by slot."""
Action = Callable[[int], None]
"""One step of a program at the sites here; its argument is the step of the loop around."""
SMALL = 4096
"""Bytes."""


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
        versions: ChooseVersion | None = None,
        one_by_one: bool = False,
    ):
        """`versions` says which version of a bundle is read, where sender and reader are both here. `one_by_one`: bundles
        are sent by `publish`, and read once each."""
        self.program, self.hood, self.backend, self.hosts = program, hood, backend, hosts
        self.watch: Watch = watch or (lambda kind, name, fn: fn)
        self.updates = Updates(one_by_one=one_by_one, versions=None if one_by_one else versions)
        self.publishers: list[BundleHere | BundleSender] = []
        self.stores: dict[Site, Store] = {site: {} for site in hood.sites}
        self.read_once = _read_once(program)
        self.actions = self._lower(program.steps, self.stores, inside=False)

    def publish(self, given: Mapping[Site, Mapping[int, Any]]) -> None:
        """Send bundles, for a later run of the program."""
        self._load(given)
        for bundle in self.publishers:
            bundle.publish(0)

    def say_no_more_work(self) -> None:
        """Tell the worker that reads the bundles to stop."""
        for bundle in self.publishers:
            assert isinstance(bundle, BundleSender)
            bundle.say_no_more_work()

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
        take, outs = _taking([given.slot for given in step.ins]), step.outs

        def at(store: Store, index: Any, loaded: Loaded) -> Action:
            def run(t: int) -> None:
                store.update(zip(outs, loaded.call(index, scalar(t), *take(store)), strict=True))

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
                    value = store[ref] if ref.__class__ is int else ref.value  # pyright: ignore[reportAttributeAccessIssue]
                    if value.__class__ is not np.ndarray:
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
        common = stores, self.hood, self.backend, self.updates
        if self.hood.here(step.src) and self.hood.here(step.dst):
            here = BundleHere(step, *common)
            return [*self._publishing([here]), here.read]
        pieces, me = messages(step, self.hood), self.hood.me
        sent = {dst: message for (src, dst), message in pieces.items() if src == me}
        incoming = {src: message for (src, dst), message in pieces.items() if dst == me}
        senders = [BundleSender(step, dst, message, *common, self.watch) for dst, message in sent.items()]
        reads = [BundleReceiver(step, incoming, *common, self.watch).read] if incoming else []
        return [*self._publishing(senders), *reads]

    def _publishing(self, bundles: "Sequence[BundleHere | BundleSender]") -> list[Action]:
        """What sends them: a step of the program, unless `publish` does."""
        self.publishers += bundles
        return [] if self.updates.one_by_one else [bundle.publish for bundle in bundles]

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
        types = [piece_type(backend, step.moves[m], receivers) for m, _ in targets]
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
                receive([buffers[i][(*index, ...)] for i, index in where])  # a view, also of one number
            # A compiled function takes numpy as it is; what is read again and again is put on the device once.
            for buffer, (site, slot, aval) in zip(buffers, moves, strict=True):
                as_it_is = _is_plain(aval) and (inside or slot in self.read_once)
                stores[site][slot] = buffer if as_it_is else backend.from_host(buffer, aval, site)

        return wait


class _LoopRun:
    """One site's side of a split scan."""

    def __init__(self, part: LoopPart, loop: Loop, outer: Store, inner: Store, backend: Backend):
        self.part, self.loop, self.outer, self.inner, self.backend = part, loop, outer, inner, backend
        self.results = _taking([ref for ref, _, _ in part.ys])
        self.slots, self.nexts = [slot for slot, *_ in part.carry], _taking([after for _, _, after, _ in part.carry])
        refs = itertools.chain((ref for ref, _, _ in part.ys), (after for _, _, after, _ in part.carry))
        self.constants: Store = {ref: ref.value for ref in refs if isinstance(ref, Constant)}
        self.stacks: list[Any] = []

    def begin(self) -> None:
        part, outer, inner = self.part, self.outer, self.inner
        inner.clear()
        inner.update(self.constants)
        for slot, ref, *_ in (*part.consts, *part.carry, *part.xs):
            inner[slot] = _read(outer, ref)
        self.stacks = []

    def slice(self, t: int) -> None:
        for slot, ref in self.part.slices:
            self.inner[slot] = _read(self.outer, ref)[t]

    def keep(self, t: int) -> None:
        """Stack what this step gave, and go on to the next."""
        inner = self.inner
        results = self.results(inner)
        if not self.stacks:
            self.stacks = [_stack(value, aval) for value, (_, _, aval) in zip(results, self.part.ys, strict=True)]
        for stack, value in zip(self.stacks, results, strict=True):
            if stack.__class__ is list:
                stack.append(value)
            else:
                stack[t] = value if value.__class__ is np.ndarray else np.asarray(value)
        inner.update(zip(self.slots, self.nexts(inner), strict=True))

    def end(self) -> None:
        for slot, _, _, last in self.part.carry:
            if last is not None:
                self.outer[last] = self.inner[slot]
        for (_, slot, aval), stack in zip(self.part.ys, self.stacks or [[]] * len(self.part.ys), strict=True):
            if stack.__class__ is list:
                stack = self._joined(stack[::-1] if self.loop.reverse else stack, aval)
            self.outer[slot] = stack
        self.inner.clear()
        self.stacks = []

    def _joined(self, rows: list[Any], aval: Any) -> Any:
        if not rows or not _is_plain(aval) or not self.backend.on_host(rows[0]):
            return self.backend.stack(rows, aval)
        return np.array([row if row.__class__ is np.ndarray else np.asarray(row) for row in rows], aval.dtype)


def _stack(value: Any, aval: Any) -> Any:
    """What will hold a result of every step: large ones of Python's go where they stay, others are joined at the end,
    which takes a fifth of the time of as many small writes."""
    in_place = value.__class__ is np.ndarray and value.nbytes > SMALL and _is_plain(aval)
    return np.empty(aval.shape, aval.dtype) if in_place else []


def _block(axis: Axis, r: int, n: int) -> Callable[[Any], Any]:
    """Rows [r E/n, (r+1) E/n) of an axis."""

    def cut(value: Any) -> Any:
        if axis is None or n == 1:
            return value
        size = value.shape[axis] // n
        return value[(slice(None),) * axis + (slice(r * size, (r + 1) * size),)]

    return cut


def _read_once(program: Program) -> set[int]:
    """Slots that one compiled call reads, and nobody else."""
    segments = [{given.slot for given in step.ins} for step in program.steps if isinstance(step, Segment)]
    others: list[Ref] = [ref for port in program.outs for ref, _ in port.held.values()]
    for step in program.steps:
        if isinstance(step, Loop):
            for part in step.parts.values():
                others += [ref for _, ref, *_ in (*part.consts, *part.carry, *part.xs, *part.slices)]
        elif isinstance(step, Transfer):
            others += [move.src for move in step.moves]
        elif isinstance(step, HostCall):
            others += step.ins
    counts = Counter(itertools.chain(*segments))
    return {slot for slot, count in counts.items() if count == 1} - {ref for ref in others if isinstance(ref, int)}


def _taking(refs: Sequence[Ref]) -> Callable[[Store], Sequence[Any]]:
    """What a store holds there."""
    return operator.itemgetter(*refs) if len(refs) > 1 else lambda store: [store[ref] for ref in refs]


def _is_plain(aval: Any) -> bool:
    """Is it an array of numbers, not of random keys?"""
    return isinstance(aval.dtype, np.dtype)


def _read(store: Store, ref: Ref) -> Any:
    return ref.value if isinstance(ref, Constant) else store[ref]
