"""The channel within a node: a ring of slots in shared memory, and a doorbell.

    memory   │ written │ read │ flags │ slot 0: number, bytes, arrays │ slot 1: ... │
    doorbell   a socket pair: a byte wakes whoever sleeps; its end means that the peer is gone

Neither has a name anywhere, so nothing can be left behind: when the last process that holds them is gone, however it
went, so are they. The coordinator makes both ends, passes their file descriptors to two workers, and closes its own
copies; from then on the end of the doorbell's stream means exactly that the peer is gone.

    sender_end, receiver_end = make_shm_channel(message_bytes([obs, reward]))
    subprocess.Popen([...], pass_fds=sender_end.fds)       # there: ShmSender.open(*fds, slot_bytes, slots, peer="learner-0")
    sender_end.close()

**No wake-up is lost.** Each word of the memory has one writer. To sleep, an end raises its flag, passes a fence, and looks
at the other's counter once more; to hand over, an end writes its counter, passes a fence, and looks at the other's flag.
Whatever the order, one of the two sees what the other wrote: either the sleeper does not sleep, or it is woken. The
fence is the release and acquisition of a lock of one's own: atomic read-modify-writes, a full barrier on x86 and a
release followed by an acquire of the same word elsewhere, past which no earlier store and no later load moves. It also
stands between a slot and the counter that publishes it, so the arrays are there when the counter says so.
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
from types import TracebackType
from typing import TypeAlias, TypeVar

import numpy as np

from choreo.runtime.channels.base import (
    ALIGNMENT,
    ChannelError,
    ChannelStatistics,
    closed,
    end_of_channel,
    in_good_order,
    mismatch,
    pack,
    peer_lost,
    receiver_closed,
    timed_out,
)

# Words of the memory, a cache line apart so that no two writers share one; counted in units of 8 bytes.
WRITTEN, READ, SENDER_SLEEPS, RECEIVER_SLEEPS, SENDER_CLOSED, RECEIVER_CLOSED = range(0, 48, 8)
CONTROL_BYTES = 512
SLOT_HEADER_BYTES = ALIGNMENT
MAX_SPIN_US = 50


@dataclass(frozen=True, kw_only=True)
class _End:
    memory_fd: int
    """The shared memory."""
    doorbell_fd: int
    """This end's half of the socket pair."""
    slot_bytes: int
    """Room for one message."""
    slots: int
    """Messages that may be unread."""

    @property
    def fds(self) -> tuple[int, int]:
        """What the process that opens this end must inherit."""
        return self.memory_fd, self.doorbell_fd

    def close(self) -> None:
        """Give up this process's copies; call it once the worker has been started."""
        os.close(self.memory_fd)
        os.close(self.doorbell_fd)


class SenderEnd(_End):
    """A sender that some process has yet to open."""

    def open(self, *, peer: str, timeout_s: float | None = None, spin_us: float = 0.0) -> "ShmSender":
        return ShmSender.open(*self.fds, self.slot_bytes, self.slots, peer=peer, timeout_s=timeout_s, spin_us=spin_us)


class ReceiverEnd(_End):
    """A receiver that some process has yet to open."""

    def open(self, *, peer: str, timeout_s: float | None = None, spin_us: float = 0.0) -> "ShmReceiver":
        return ShmReceiver.open(*self.fds, self.slot_bytes, self.slots, peer=peer, timeout_s=timeout_s, spin_us=spin_us)


def make_shm_channel(slot_bytes: int, slots: int = 2) -> tuple[SenderEnd, ReceiverEnd]:
    """Both ends of a new channel; each owns its file descriptors until it is opened or closed."""
    if slots < 1:
        raise ChannelError(f"A channel of {slots} slots can hold no message.", fix="Give it one slot or more.")
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
        with tempfile.TemporaryFile() as file:  # has no name either
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def _memory_bytes(slot_bytes: int, slots: int) -> int:
    return CONTROL_BYTES + slots * (SLOT_HEADER_BYTES + slot_bytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


_Layout: TypeAlias = tuple[int, list[tuple[int, list[np.ndarray]]]]
"""Of a message: its bytes, and for each slot the word where it begins and the views in which the arrays lie."""


_R = TypeVar("_R", bound="_Ring")


class _Ring:
    """What the two ends have in common: the memory, the doorbell, and how to wait."""

    _closed_word: int
    """Where this end says that it closed in good order."""
    _idle: str
    """What a peer does that keeps this end waiting."""

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
        """Take over both file descriptors."""
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
                f"spin_us={spin_us:g} is not between 0 and {MAX_SPIN_US}: who waits longer than that should sleep.",
                peer=peer,
            )
        self.peer, self._timeout_s, self._spin_s = peer, timeout_s, spin_us * 1e-6
        self._slot_bytes, self._slots = _aligned(slot_bytes), slots
        self._memory = mmap.mmap(memory_fd, _memory_bytes(self._slot_bytes, slots))
        os.close(memory_fd)  # the mapping keeps a copy of its own
        self._words = memoryview(self._memory).cast("Q")
        self._bell = socket.socket(fileno=doorbell_fd)
        self._bell.settimeout(None)  # whatever socket.setdefaulttimeout says
        # A program that an environment starts must not keep this end open when this process is gone.
        self._bell.set_inheritable(False)
        if timeout_s is not None:
            self._bell.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
        self._fence = _make_fence()
        self._layouts: dict[tuple, _Layout] = {}
        self._number = self._bytes = self._waits = 0
        self._wait_s, self._closed = 0.0, False
        _open_rings.add(self)

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(messages=self._number, bytes=self._bytes, waits=self._waits, wait_s=self._wait_s)

    def __enter__(self: _R) -> _R:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(in_good_order=in_good_order(error))

    def close(self) -> None:
        """Tell the peer that this was all; returns at once, and what was sent can still be read."""
        self._close(in_good_order=True)

    def _close(self, *, in_good_order: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if in_good_order:
            self._words[self._closed_word] = 1
        self._words.release()
        self._layouts.clear()
        del self._memory  # unmapped when the last view is gone; a traceback may still hold one
        with suppress(OSError):  # the peer may be gone already
            self._bell.shutdown(socket.SHUT_RDWR)
        self._bell.close()
        _open_rings.discard(self)

    def _layout(self, arrays: Sequence[np.ndarray]) -> _Layout:
        key = tuple([(a.shape, a.dtype) for a in arrays])
        found = self._layouts.get(key)
        if found is None:
            if self._closed:
                raise closed(self.peer)
            found = self._layouts[key] = self._new_layout(arrays)
        return found

    def _new_layout(self, arrays: Sequence[np.ndarray]) -> _Layout:
        packing = pack(arrays)
        if packing.packed_bytes > self._slot_bytes:
            raise ChannelError(
                f"A message of {packing.packed_bytes} bytes does not fit a slot of {self._slot_bytes} bytes.",
                peer=self.peer,
                fix="Make the channel with slot_bytes=message_bytes(arrays) of its largest message.",
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
        """Publish one more message, or one more free slot; False if the peer is gone."""
        words, self._number, self._bytes = self._words, self._number + 1, self._bytes + payload
        self._fence()  # first the slot, then the counter
        words[counter] = self._number
        self._fence()  # first the counter, then their flag
        return not words[their_flag] or self._ring()

    def _ring(self) -> bool:
        """Wake the peer; False if it is gone."""
        try:
            self._bell.send(b"!", socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True  # so many bytes are unread that the peer will wake anyway
        except OSError:
            return False
        return True

    def _wait(self, counter: int, above: int, my_flag: int) -> bool:
        """Until the peer's counter is above a number; False if the peer is gone and it never will be."""
        words, start = self._words, perf_counter()
        self._waits += 1
        try:
            while perf_counter() - start < self._spin_s:
                if words[counter] > above:
                    return True
            while True:
                words[my_flag] = 1
                self._fence()  # first my flag, then their counter
                if words[counter] > above:
                    return True
                if not self._sleep(start):
                    return words[counter] > above  # what came before the end still counts
        finally:
            words[my_flag] = 0
            self._wait_s += perf_counter() - start

    def _sleep(self, start: float) -> bool:
        """Until the doorbell rings; False if the peer is gone."""
        try:
            return bool(self._bell.recv(4096))
        except BlockingIOError:
            assert self._timeout_s is not None, "a socket without a time limit does not give up"
            if perf_counter() - start < 0.9 * self._timeout_s:
                return True
            raise timed_out(self.peer, self._number, self._timeout_s, self._idle) from None
        except ConnectionResetError:
            return False


class ShmSender(_Ring):
    """The sending end; see `choreo.runtime.channels.base.Sender`."""

    _closed_word, _idle = SENDER_CLOSED, "read nothing"

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy a message into the next slot; blocks while all slots are unread."""
        payload, slots = self._layout(arrays)
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
            raise self._gone()  # and it had not read this message

    def _gone(self) -> ChannelError:
        if self._words[RECEIVER_CLOSED]:
            return receiver_closed(self.peer, self._number)
        return peer_lost(self.peer, self._number, "it ended without closing the channel.")


class ShmReceiver(_Ring):
    """The receiving end; see `choreo.runtime.channels.base.Receiver`."""

    _closed_word, _idle = RECEIVER_CLOSED, "sent nothing"

    def ready(self) -> bool:
        """Is there a message, or nobody left to send one?"""
        return self._words[WRITTEN] > self._number or bool(self._words[SENDER_CLOSED])

    def receive(self, into: Sequence[np.ndarray]) -> None:
        """Copy the next message into these arrays; blocks until there is one."""
        payload, slots = self._layout(into)
        words, number = self._words, self._number
        if words[WRITTEN] <= number and not self._wait(WRITTEN, number, RECEIVER_SLEEPS):
            raise self._gone()
        self._fence()  # first their counter, then the slot
        header, views = slots[number % self._slots]
        if words[header] != number or words[header + 1] != payload:
            raise mismatch(self.peer, (number, payload), (words[header], words[header + 1]))
        for view, array in zip(views, into, strict=True):
            array[...] = view
        self._hand_over(READ, SENDER_SLEEPS, payload)  # a sender that is gone may have left more messages to read

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
    # A forked child (an environment that starts processes of its own) would keep the doorbell open after our death.
    for ring in list(_open_rings):
        ring._bell.close()


os.register_at_fork(after_in_child=_close_doorbells)
