"""Executes a program at the sites of this process: at all sites (`inprocess`), or at the sites of one worker.

    step       action of this process
    Segment    calls a compiled function at each of its sites
    HostCall   calls a Python function on numpy arrays at each of its sites
    Loop       repeats the steps of the body
    Transfer   hands values over if all senders and receivers are in this process; otherwise sends or receives messages

A program is one global order of steps, and every process runs a subsequence of these steps. `Machine` translates the steps
once into a list of Python functions. So a step costs little more than the call of its function. This module does not import
JAX: the `Backend` handles compiled functions and device arrays.
"""

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from choreo.host import HostObjects
from choreo.partition.program import (
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
from choreo.plans.step_times import Phase, StepPhase, step_numbers
from choreo.runtime.engine.backend import Backend, Loaded, Site, Timed, untimed
from choreo.runtime.engine.blocks import block
from choreo.runtime.engine.bundles import BundleHere, BundleReceiver, BundleSender, CurrentUpdate
from choreo.runtime.engine.messages import Overlap, Topology, messages, received_type
from choreo.runtime.engine.profile import kind_of
from choreo.runtime.engine.schedule import ChooseVersion
from choreo.types import GroupName

Store = dict[Ref, Any]
"""The values that one site holds, by slot. The store of a loop also holds the constants that are results of a round."""
Action = Callable[[int], None]
"""One step of a program at one or more sites of this process. The argument is the round of the enclosing loop, or 0."""
SMALL_BYTES = 4096
"""If the result of one round of a loop is not larger than this, the results are stacked when the loop ends; see `_stack`."""


class Machine:
    """Runs one program at the sites of this process."""

    def __init__(
        self,
        program: Program,
        topology: Topology,
        backend: Backend,
        objects: Mapping[Site, HostObjects],
        timed: Timed | None = None,
        *,
        choose_version: ChooseVersion | None = None,
        one_by_one: bool = False,
    ):
        """`choose_version` chooses the version to read, for bundles whose sender and reader are both in this process. With
        `one_by_one` (merge="any"), the program itself sends no bundles: the caller sends them with `publish`, and each
        version is read once."""
        self.program, self.topology, self.backend, self.objects = program, topology, backend, objects
        self.timed: Timed = timed or untimed
        self.numbers = step_numbers(program)
        self.update = CurrentUpdate(one_by_one=one_by_one, choose_version=None if one_by_one else choose_version)
        self.publishers: list[BundleHere | BundleSender] = []
        self.stores: dict[Site, Store] = {site: {} for site in topology.sites}
        self.read_once = _read_once(program)
        self.actions = self._lower(program.steps, self.stores, inside=False)

    def publish(self, given: Mapping[Site, Mapping[int, Any]]) -> None:
        """Send the bundles now, with values from the inputs `given`; see `run`.

        Call this only if `one_by_one` is true. The next run of the program reads the bundles.
        """
        self._load(given)
        for bundle in self.publishers:
            bundle.publish(0)

    def send_no_more_work(self) -> None:
        """Make the worker that reads the bundles raise `NoMoreWork`."""
        for bundle in self.publishers:
            assert isinstance(bundle, BundleSender)
            bundle.send_no_more_work()

    def _load(self, given: Mapping[Site, Mapping[int, Any]]) -> None:
        for site, store in self.stores.items():
            store.clear()
            for position, port in enumerate(self.program.ins):
                if site in given and site[0] in port.held and position in given[site]:
                    store[port.held[site[0]][0]] = given[site][position]

    def run(self, given: Mapping[Site, Mapping[int, Any]]) -> dict[Site, list[Any]]:
        """Run the program once. `given` holds the inputs of each site, by position.

        Returns the outputs of each site. An output that the site does not hold is None.
        """
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
            if not any(self.topology.here(group) for group in groups_of(step)):
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
        take, outs = _getter([given.slot for given in step.ins]), step.outs

        def at(store: Store, index: Any, loaded: Loaded) -> Action:
            def run(t: int) -> None:
                store.update(zip(outs, loaded.call(index, scalar(t), *take(store)), strict=True))

            def run_and_wait(t: int) -> None:  # a call may return before the results are computed
                run(t)
                self.backend.wait_for([store[slot] for slot in outs])

            if self.timed is untimed:
                return run
            return self.timed(kind_of(step.roles), step.name, run_and_wait, phase=self._phase(step, step.group, "run"))

        return [
            at(stores[step.group, r], scalar(r), self.backend.load(step, r)) for r in self.topology.here(step.group)
        ]

    def _segment_together(self, step: Segment, stores: dict[Site, Store]) -> Action:
        here, scalar = self.topology.here(step.group), self.backend.scalar
        call = self.backend.load_together(step, here, self.topology.replicas(step.group))
        slots, outs = [given.slot for given in step.ins], step.outs
        held = [stores[step.group, r] for r in here]

        def run(t: int) -> None:
            results = call(scalar(t), [[store[slot] for slot in slots] for store in held])
            for store, values in zip(held, results, strict=True):
                store.update(zip(outs, values, strict=True))
            if self.timed is not untimed:
                self.backend.wait_for(results)

        phase = self._phase(step, step.group, "run")
        return self.timed(kind_of(step.roles), step.name, run, phase=phase, runs=len(here))

    def _phase(self, step: Step, group: GroupName, phase: Phase) -> StepPhase:
        """The name of a phase of a step, for the profile."""
        return StepPhase(self.program.name, group, self.numbers[id(step), group], phase)

    def _host_call(self, step: HostCall, stores: dict[Site, Store]) -> list[Action]:
        replicas, to_host, on_host = self.topology.replicas(step.group), self.backend.to_host, self.backend.on_host
        wanted = [(i, slot) for i, slot in enumerate(step.outs) if slot is not None]

        def at(site: Site) -> Action:
            store, call = stores[site], self.objects[site].bind(step.fn, step.shards)
            ins = list(zip(step.ins, step.sliced, strict=True))

            def run(_: int) -> None:
                given = []
                for ref, is_sliced in ins:
                    value = store[ref] if ref.__class__ is int else ref.value  # pyright: ignore[reportAttributeAccessIssue]
                    if value.__class__ is not np.ndarray:
                        host = to_host(value)
                        if on_host(value) and not isinstance(ref, Constant):
                            store[ref] = host  # so a loop that stacks this value need not convert it again
                        value = host
                    given.append(block(value, 0, site[1], replicas) if is_sliced else value)
                results = call(*given)
                for i, slot in wanted:
                    store[slot] = results[i]

            return self.timed("env", step.name, run, phase=self._phase(step, step.group, "run"))

        return [at((step.group, r)) for r in self.topology.here(step.group)]

    def _loop(self, loop: Loop, outside: dict[Site, Store]) -> Action:
        parts = {site: loop.parts[site[0]] for site in self.topology.sites if site[0] in loop.parts}
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
        senders, receivers = self.topology.replicas(step.src), self.topology.replicas(step.dst)
        src_here, dst_here = self.topology.here(step.src), self.topology.here(step.dst)
        if step.lag is not None:
            return self._bundle(step, stores)
        if len(src_here) == senders and len(dst_here) == receivers:
            phase = self._phase(step, step.dst, "hand over")
            return [self.timed("other", "hand over", functools.partial(self._hand_over, step, stores), phase=phase)]
        found = messages(step, self.topology)
        actions = []
        me = self.topology.me
        for (src, dst), message in found.items():
            if src == me != dst:
                actions.append(self._send(step, dst, message, stores))
        incoming = {src: message for (src, dst), message in found.items() if dst == me}
        if incoming:
            actions.append(self._receive(step, incoming, stores, inside=inside))
        return actions

    def _bundle(self, step: Transfer, stores: dict[Site, Store]) -> list[Action]:
        common = stores, self.topology, self.backend, self.update
        if self.topology.here(step.src) and self.topology.here(step.dst):
            here, phase = BundleHere(step, *common), self._phase(step, step.dst, "hand over")
            return [*self._publishing([here]), self.timed("other", "hand over", here.read, phase=phase)]
        found, me = messages(step, self.topology), self.topology.me
        sent = {dst: message for (src, dst), message in found.items() if src == me}
        incoming = {src: message for (src, dst), message in found.items() if dst == me}
        sending = functools.partial(self.timed, phase=self._phase(step, step.src, "send"))
        waiting = functools.partial(self.timed, phase=self._phase(step, step.dst, "wait"))
        senders = [BundleSender(step, dst, message, *common, sending) for dst, message in sent.items()]
        reads = [BundleReceiver(step, incoming, *common, waiting).read] if incoming else []
        return [*self._publishing(senders), *reads]

    def _publishing(self, bundles: "Sequence[BundleHere | BundleSender]") -> list[Action]:
        """Add bundles to `publishers`. Returns the actions that send them; none with `one_by_one`, where `publish` sends them."""
        self.publishers += bundles
        return [] if self.update.one_by_one else [bundle.publish for bundle in bundles]

    def _hand_over(self, step: Transfer, stores: dict[Site, Store], _: int) -> None:
        senders = [stores[step.src, r] for r in self.topology.here(step.src)]
        receivers = [stores[step.dst, r] for r in self.topology.here(step.dst)]
        for move in step.moves:
            parts = [store[move.src] for store in senders]
            for r, store in enumerate(receivers):
                store[move.dst] = self.backend.reshard(parts, move, r, len(receivers), step)
        if self.timed is not untimed:
            self.backend.wait_for([store[move.dst] for store in receivers for move in step.moves])

    def _send(self, step: Transfer, dst: str, message: "list[Overlap]", stores: dict[Site, Store]) -> Action:
        phase, to_host = self._phase(step, step.src, "send"), self.backend.to_host
        send = self.timed("send", dst, self.topology.links[dst].send, phase=phase)
        sources = [(stores[step.src, each.sender], each.move.src, each.take) for each in message]

        def run(_: int) -> None:
            send([to_host(store[slot])[take] for store, slot, take in sources])

        return run

    def _receive(
        self, step: Transfer, incoming: "dict[str, list[Overlap]]", stores: dict[Site, Store], *, inside: bool
    ) -> Action:
        backend, receivers, me = self.backend, self.topology.replicas(step.dst), self.topology.me
        targets = list(itertools.product(range(len(step.moves)), self.topology.here(step.dst)))
        types = [received_type(backend, step.moves[m], receivers) for m, _ in targets]
        number = {(id(step.moves[m]), d): i for i, (m, d) in enumerate(targets)}
        put = {
            src: [(number[id(each.move), each.receiver], each) for each in message] for src, message in incoming.items()
        }
        own = put.pop(me, [])
        gets, phase = [], self._phase(step, step.dst, "wait")
        for src, message in put.items():
            receive = self.timed("wait", src, self.topology.links[src].receive, phase=phase)
            gets.append((receive, [(i, each.put) for i, each in message]))
        moves = [((step.dst, d), step.moves[m].dst, step.moves[m].aval) for m, d in targets]

        def wait(_: int) -> None:
            buffers = [np.empty(shape, dtype) for shape, dtype in types]
            for i, each in own:
                buffers[i][each.put] = backend.to_host(stores[step.src, each.sender][each.move.src])[each.take]
            for receive, where in gets:
                # With `...`, indexing returns a view even if the index selects a single number.
                receive([buffers[i][(*index, ...)] for i, index in where])
            # A compiled function also accepts a numpy array, but copies the array to the device in every call. So outside of
            # loops, a value that is read several times is put on the device here, once.
            for buffer, (site, slot, aval) in zip(buffers, moves, strict=True):
                stays_numpy = _is_plain(aval) and (inside or slot in self.read_once)
                stores[site][slot] = buffer if stays_numpy else backend.from_host(buffer, aval, site)

        return wait


class _LoopRun:
    """A loop at one site. It holds the store of the loop, and the stacks of its results."""

    def __init__(self, part: LoopPart, loop: Loop, outer: Store, inner: Store, backend: Backend):
        self.part, self.loop, self.outer, self.inner, self.backend = part, loop, outer, inner, backend
        self.results = _getter([ref for ref, _, _ in part.ys])
        self.slots, self.nexts = [slot for slot, *_ in part.carry], _getter([after for _, _, after, _ in part.carry])
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
        """At the end of a round, add its results to the stacks, and make the new carry the carry of the next round."""
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
    """The container that collects one result from every round: an array, or a list that is joined when the loop ends.

    Large numpy results are written into the array in each round. All other results are collected in the list. For small results,
    joining the list at the end takes a fifth of the time of writing each result into an array.
    """
    in_place = value.__class__ is np.ndarray and value.nbytes > SMALL_BYTES and _is_plain(aval)
    return np.empty(aval.shape, aval.dtype) if in_place else []


def _read_once(program: Program) -> set[int]:
    """The slots that exactly one segment reads, and that no other step and no output of the program reads."""
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


def _getter(refs: Sequence[Ref]) -> Callable[[Store], Sequence[Any]]:
    """A fast function that returns the values of a store at `refs`."""
    return operator.itemgetter(*refs) if len(refs) > 1 else lambda store: [store[ref] for ref in refs]


def _is_plain(aval: Any) -> bool:
    """Return True for a type of numbers, False for a type of random keys."""
    return isinstance(aval.dtype, np.dtype)


def _read(store: Store, ref: Ref) -> Any:
    return ref.value if isinstance(ref, Constant) else store[ref]
