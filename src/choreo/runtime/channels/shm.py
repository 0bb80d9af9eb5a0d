"""The channel within a machine: a ring buffer in shared memory, and a doorbell.

    memory     │ written │ read │ flags │ slot 0: number, bytes, arrays │ slot 1: ... │
    doorbell   a socket pair: a byte wakes an end that sleeps; the end of the stream means that the peer has closed or died

Neither the memory nor the doorbell has a name in the file system. So the system frees both when the last process that holds
them ends, even if this process is killed. The coordinator makes both ends, passes their file descriptors to two workers, and
closes its own copies. From then on, the stream of the doorbell ends exactly when the peer closes its end or dies.

    sender_end, receiver_end = make_shm_channel(message_bytes([obs, reward]))
    subprocess.Popen([...], pass_fds=sender_end.fds)       # the worker: ShmSender.open(*fds, slot_bytes, slots, peer="learner-0")
    sender_end.close()

**No wake-up is lost.** Only one end writes each word of the control memory. An end that wants to sleep sets its flag, passes
a fence, and reads the peer's counter once more. An end that hands over a slot writes its counter, passes a fence, and reads
the peer's flag. In every interleaving, at least one of the two ends reads the value that the other end has written. So either
the first end does not sleep, or the second end wakes the first end.

**The fence** releases and acquires a private lock. Both are atomic read-modify-write operations. On x86 each of them is a
full barrier. On other CPUs they are a release and then an acquire of the same word: no store before the fence and no load
after the fence can move past it. Another fence stands between the write of a slot and the write of the counter that
publishes this slot. So a reader that sees the new counter also sees the arrays.
"""

import mmap
import os
import socket
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias, TypeVar

import numpy as np

from choreo.runtime.channels.base import (
    ALIGNMENT,
    ChannelEnd,
    ChannelError,
    closed,
    end_of_channel,
    mismatch,
    pack,
    peer_lost,
    receiver_closed,
    timed_out,
)

# Positions of words in the memory, in units of 8 bytes. Each word has its own cache line, so no two writers share a line.
WRITTEN, READ, SENDER_SLEEPS, RECEIVER_SLEEPS, SENDER_CLOSED, RECEIVER_CLOSED = range(0, 48, 8)
CONTROL_BYTES = 512
SLOT_HEADER_BYTES = ALIGNMENT
MAX_SPIN_US = 50
"""The longest time that an end may spin (poll memory in a loop) before it sleeps."""


@dataclass(frozen=True, kw_only=True)
class _UnopenedEnd:
    """The file descriptors and sizes from which a process opens its end of the channel."""

    memory_fd: int
    """The shared memory."""
    doorbell_fd: int
    """This end's half of the socket pair."""
    slot_bytes: int
    """The size of one slot, which holds one message."""
    slots: int
    """How many messages may be unread."""

    @property
    def fds(self) -> tuple[int, int]:
        """The descriptors of this end. The process that opens this end must inherit them."""
        return self.memory_fd, self.doorbell_fd

    def close(self) -> None:
        """Close the descriptors in this process. Call this after the process that opens this end was started."""
        os.close(self.memory_fd)
        os.close(self.doorbell_fd)


class SenderEnd(_UnopenedEnd):
    """A sending end that is not open yet."""

    def open(self, *, peer: str, timeout_s: float | None = None, spin_us: float = 0.0) -> "ShmSender":
        return ShmSender.open(*self.fds, self.slot_bytes, self.slots, peer=peer, timeout_s=timeout_s, spin_us=spin_us)


class ReceiverEnd(_UnopenedEnd):
    """A receiving end that is not open yet."""

    def open(self, *, peer: str, timeout_s: float | None = None, spin_us: float = 0.0) -> "ShmReceiver":
        return ShmReceiver.open(*self.fds, self.slot_bytes, self.slots, peer=peer, timeout_s=timeout_s, spin_us=spin_us)


def make_shm_channel(slot_bytes: int, slots: int = 2) -> tuple[SenderEnd, ReceiverEnd]:
    """Return the two ends of a new channel. Each end owns its file descriptors until the end is opened or closed."""
    if slots < 1:
        raise ChannelError(f"A channel of {slots} slots can hold no message.", fix="Set `slots` to 1 or more.")
    slot_bytes = _aligned(slot_bytes)
    memory_fd = _anonymous_memory(_memory_bytes(slot_bytes, slots))
    bells = [bell.detach() for bell in socket.socketpair()]
    return (
        SenderEnd(memory_fd=memory_fd, doorbell_fd=bells[0], slot_bytes=slot_bytes, slots=slots),
        ReceiverEnd(memory_fd=os.dup(memory_fd), doorbell_fd=bells[1], slot_bytes=slot_bytes, slots=slots),
    )


def _anonymous_memory(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("choreo")
    else:
        with tempfile.TemporaryFile() as file:  # this file, too, has no name in the file system
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def _memory_bytes(slot_bytes: int, slots: int) -> int:
    return CONTROL_BYTES + slots * (SLOT_HEADER_BYTES + slot_bytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


_SlotViews: TypeAlias = tuple[int, list[tuple[int, list[np.ndarray]]]]
"""The size of a message without gaps, in bytes. Then for each slot: the position of its first word, and a view for each array."""


_R = TypeVar("_R", bound="_Ring")


class _Ring(ChannelEnd):
    """The base class of sender and receiver. It holds the memory and the doorbell, and waits for the peer."""

    _closed_word: int
    """The position of the word that this end sets when it is closed in good order."""
    _idle: str
    """What an idle peer has done, for the error after a timeout: "read nothing" or "sent nothing"."""

    @classmethod
    def open(
        cls: type[_R],
        memory_fd: int,
        doorbell_fd: int,
        slot_bytes: int,
        slots: int,
        *,
        peer: str,
        timeout_s: float | None = None,
        spin_us: float = 0.0,
    ) -> _R:
        """Open an end from its file descriptors. From then on, the descriptors belong to the end that is returned."""
        return cls(memory_fd, doorbell_fd, slot_bytes, slots, peer=peer, timeout_s=timeout_s, spin_us=spin_us)

    def __init__(
        self,
        memory_fd: int,
        doorbell_fd: int,
        slot_bytes: int,
        slots: int,
        *,
        peer: str,
        timeout_s: float | None,
        spin_us: float,
    ):
        if not 0 <= spin_us <= MAX_SPIN_US:
            raise ChannelError(
                f"spin_us={spin_us:g} is not between 0 and {MAX_SPIN_US}: an end that waits longer should sleep.",
                peer=peer,
            )
        super().__init__(peer, timeout_s)
        self._spin_s = spin_us * 1e-6
        self._slot_bytes, self._slots = _aligned(slot_bytes), slots
        self._memory = mmap.mmap(memory_fd, _memory_bytes(self._slot_bytes, slots))
        os.close(memory_fd)  # the mapping stays valid without the descriptor
        self._words = memoryview(self._memory).cast("Q")
        self._bell = socket.socket(fileno=doorbell_fd)
        self._bell.settimeout(None)  # socket.setdefaulttimeout must not apply here
        # An environment may start a program. This program must not hold the doorbell open after this process has ended.
        self._bell.set_inheritable(False)
        if timeout_s is not None:
            self._bell.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
        self._fence = _make_fence()
        self._views: dict[tuple, _SlotViews] = {}
        _open_rings.add(self)

    def _close(self, *, in_good_order: bool) -> None:
        if in_good_order:
            self._words[self._closed_word] = 1
        self._words.release()
        self._views.clear()
        del self._memory  # the memory is unmapped when the last view is gone; a traceback may still hold a view
        with suppress(OSError):  # the peer may be gone already
            self._bell.shutdown(socket.SHUT_RDWR)
        self._bell.close()
        _open_rings.discard(self)

    def _views_for(self, arrays: Sequence[np.ndarray]) -> _SlotViews:
        key = tuple([(a.shape, a.dtype) for a in arrays])
        found = self._views.get(key)
        if found is None:
            if self._closed:
                raise closed(self.peer)
            found = self._views[key] = self._make_views(arrays)
        return found

    def _make_views(self, arrays: Sequence[np.ndarray]) -> _SlotViews:
        packing = pack(arrays)
        if packing.packed_bytes > self._slot_bytes:
            raise ChannelError(
                f"A message of {packing.packed_bytes} bytes does not fit a slot of {self._slot_bytes} bytes.",
                peer=self.peer,
                fix="Make the channel with slot_bytes=message_bytes(arrays), where `arrays` is its largest message.",
            )
        starts = [CONTROL_BYTES + i * (SLOT_HEADER_BYTES + self._slot_bytes) for i in range(self._slots)]
        placed = list(zip(arrays, packing.offsets, strict=True))
        return packing.payload_bytes, [
            (
                start // 8,
                [
                    np.ndarray(a.shape, a.dtype, self._memory, start + SLOT_HEADER_BYTES + offset)
                    for a, offset in placed
                ],
            )
            for start in starts
        ]

    def _hand_over(self, counter: int, their_flag: int, payload: int) -> bool:
        """Publish one more message (sender) or one more free slot (receiver). Returns False if the peer slept and is gone."""
        words, self._number, self._bytes = self._words, self._number + 1, self._bytes + payload
        self._fence()  # between writing the slot and writing the counter
        words[counter] = self._number
        self._fence()  # between writing the counter and reading the peer's flag
        return not words[their_flag] or self._wake_peer()

    def _wake_peer(self) -> bool:
        """Wake the peer. Returns False if the peer is gone."""
        try:
            self._bell.send(b"!", socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True  # the doorbell is full of unread bytes, and these bytes wake the peer
        except OSError:
            return False
        return True

    def _wait(self, counter: int, above: int, my_flag: int) -> bool:
        """Wait until the peer's counter is larger than `above`. Returns False if the peer ends before that."""
        words, start = self._words, perf_counter()
        self._waits += 1
        try:
            while perf_counter() - start < self._spin_s:
                if words[counter] > above:
                    return True
            while True:
                words[my_flag] = 1
                self._fence()  # between writing my flag and reading the peer's counter
                if words[counter] > above:
                    return True
                if not self._sleep(start):
                    return words[counter] > above  # the peer may have handed over a slot before it ended
        finally:
            words[my_flag] = 0
            self._wait_s += perf_counter() - start

    def _sleep(self, start: float) -> bool:
        """Wait until the doorbell rings. Returns False if the peer is gone."""
        try:
            return bool(self._bell.recv(4096))
        except BlockingIOError:
            assert self._timeout_s is not None, "a socket without a time limit timed out"
            if perf_counter() - start < 0.9 * self._timeout_s:
                return True
            raise timed_out(self.peer, self._number, self._timeout_s, self._idle) from None
        except ConnectionResetError:
            return False


class ShmSender(_Ring):
    """The sending end; see `choreo.runtime.channels.base.Sender`."""

    _closed_word, _idle = SENDER_CLOSED, "read nothing"

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy a message into the next slot. Blocks while all slots hold unread messages."""
        payload, slots = self._views_for(arrays)
        words, number = self._words, self._number
        if words[RECEIVER_CLOSED]:
            raise receiver_closed(self.peer, number)
        free_above = number - self._slots
        if words[READ] <= free_above and not self._wait(READ, free_above, SENDER_SLEEPS):
            raise self._gone()
        header, views = slots[number % self._slots]
        for view, array in zip(views, arrays, strict=True):
            view[...] = array
        words[header], words[header + 1] = number, payload
        if not self._hand_over(WRITTEN, RECEIVER_SLEEPS, payload) and words[READ] <= number:
            raise self._gone()  # the receiver ended before it read this message

    def _gone(self) -> ChannelError:
        if self._words[RECEIVER_CLOSED]:
            return receiver_closed(self.peer, self._number)
        return peer_lost(self.peer, self._number, "it ended without closing the channel.")


class ShmReceiver(_Ring):
    """The receiving end; see `choreo.runtime.channels.base.Receiver`."""

    _closed_word, _idle = RECEIVER_CLOSED, "sent nothing"
    _sender_gone = False

    def ready(self) -> bool:
        """Return True if there is an unread message, or if the sender has finished. A lost sender is noticed by `end_wait`."""
        return self._words[WRITTEN] > self._number or bool(self._words[SENDER_CLOSED]) or self._sender_gone

    @property
    def pollable(self) -> list[int]:
        return [self._bell.fileno()]

    def begin_wait(self) -> bool:
        self._words[RECEIVER_SLEEPS] = 1
        self._fence()  # between writing my flag and reading the peer's counter
        return self.ready()

    def end_wait(self) -> None:
        self._words[RECEIVER_SLEEPS] = 0
        with suppress(BlockingIOError):  # nobody has rung
            try:
                self._sender_gone = not self._bell.recv(4096, socket.MSG_DONTWAIT)
            except ConnectionResetError:
                self._sender_gone = True

    def receive(self, into: Sequence[np.ndarray]) -> None:
        """Copy the next message into these arrays. Blocks until a message arrives."""
        payload, slots = self._views_for(into)
        words, number = self._words, self._number
        if words[WRITTEN] <= number and not self._wait(WRITTEN, number, RECEIVER_SLEEPS):
            raise self._gone()
        self._fence()  # between reading the peer's counter and reading the slot
        header, views = slots[number % self._slots]
        if words[header] != number or words[header + 1] != payload:
            raise mismatch(self.peer, (number, payload), (words[header], words[header + 1]))
        for view, array in zip(views, into, strict=True):
            array[...] = view
        # Ignore the result. If the sender is gone, the messages that it sent before can still be read.
        self._hand_over(READ, SENDER_SLEEPS, payload)

    def _gone(self) -> ChannelError:
        if self._words[SENDER_CLOSED]:
            return end_of_channel(self.peer, self._number)
        return peer_lost(self.peer, self._number, "it ended without closing the channel.")


def _make_fence() -> Callable[[], None]:
    lock = threading.Lock()
    lock.acquire()
    release, acquire = lock.release, lock.acquire

    def fence() -> None:
        release()
        acquire()

    return fence


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, max(1, int((seconds - whole) * 1e6)))


_open_rings: weakref.WeakSet[_Ring] = weakref.WeakSet()


def _close_doorbells() -> None:
    # An environment may fork this process. The child must not hold the doorbell open after this process has ended.
    for ring in list(_open_rings):
        ring._bell.close()


os.register_at_fork(after_in_child=_close_doorbells)
