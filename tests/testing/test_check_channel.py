"""`check_channel` accepts a correct channel within one process, and names the promise that each broken channel breaks."""

import contextlib
import os
import threading
import time
from collections import deque

import numpy as np
import pytest

from choreo.runtime.channels.base import (
    ChannelError,
    ChannelStatistics,
    closed,
    end_of_channel,
    in_good_order,
    mismatch,
    peer_lost,
    receiver_closed,
    timed_out,
)
from choreo.testing import channels, check_channel


class Pipe:
    """The state that both ends share. `spoil` names the promise that the channel breaks; with "nothing", it breaks none."""

    def __init__(self, slots, spoil):
        self.slots, self.spoil = slots, spoil
        self.messages, self.changed = deque(), threading.Condition()
        self.endings = {"sender": None, "receiver": None}
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        """Is readable if something has changed."""

    def notify(self):
        self.changed.notify_all()
        if self.spoil != "bell" or self.endings["receiver"]:
            os.eventfd_write(self.bell, 1)

    def __del__(self):
        os.close(self.bell)


class End:
    def __init__(self, pipe, role, timeout_s):
        self.pipe, self.role, self.timeout_s = pipe, role, timeout_s
        self.peer = "" if pipe.spoil == "peer" else "there"
        self.count = self.bytes = self.waits = 0
        self.wait_s = 0.0

    def wait(self, ready, doing):
        start = time.perf_counter()
        self.waits += not ready()
        limit = None if self.pipe.spoil == "timeout" else self.timeout_s
        in_time = self.pipe.changed.wait_for(ready, limit)
        self.wait_s += 0.0 if self.pipe.spoil == "waiting" else time.perf_counter() - start
        if not in_time:
            raise timed_out(self.peer, self.count, self.timeout_s, doing)

    def close(self, how="finished"):
        with self.pipe.changed:
            self.pipe.endings[self.role] = self.pipe.endings[self.role] or how
            if self.pipe.spoil == "drain" and self.role == "sender":
                self.pipe.messages.clear()
            self.pipe.notify()

    def passed(self, arrays):
        self.count += 1
        self.bytes += sum(a.nbytes for a in arrays) + (self.pipe.spoil == "statistics")

    def statistics(self):
        return ChannelStatistics(messages=self.count, bytes=self.bytes, waits=self.waits, wait_s=self.wait_s)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close("finished" if in_good_order(error) or self.pipe.spoil == "failure" else "lost")


class PipeSender(End):
    def send(self, arrays):
        pipe, ending = self.pipe, self.pipe.endings
        with pipe.changed:
            if ending["sender"] and pipe.spoil != "closed":
                raise closed(self.peer)
            limit = pipe.slots + (pipe.spoil == "bound")
            self.wait(lambda: len(pipe.messages) < limit or ending["receiver"], "read nothing")
            if ending["receiver"] == "finished" and pipe.spoil != "receiver closed":
                raise receiver_closed(self.peer, self.count)
            if ending["receiver"]:
                raise peer_lost(self.peer, self.count, "it ended.")
            message = list(arrays) if pipe.spoil == "copy" else [a.copy() for a in arrays]
            pipe.messages.append(message)
            self.passed(message)
            pipe.notify()


class PipeReceiver(End):
    def receive(self, into):
        pipe, ending = self.pipe, self.pipe.endings
        with pipe.changed:
            if ending["receiver"]:
                raise closed(self.peer)
            self.wait(lambda: pipe.messages or ending["sender"], "sent nothing")
            if not pipe.messages:
                finished = ending["sender"] == "finished" and pipe.spoil != "finish"
                raise (
                    end_of_channel(self.peer, self.count) if finished else peer_lost(self.peer, self.count, "it ended.")
                )
            message = pipe.messages.pop() if pipe.spoil == "order" else pipe.messages.popleft()
            sizes = [sum(a.nbytes for a in arrays) for arrays in (into, message)]
            if sizes[0] != sizes[1] and pipe.spoil != "mismatch":
                raise mismatch(self.peer, (self.count, sizes[0]), (self.count, sizes[1]))
            for array, value in zip(into, message, strict=True):
                self.write(array, value)
            self.passed(message)
            pipe.notify()

    def ready(self):
        with self.pipe.changed:
            return bool(self.pipe.messages or any(self.pipe.endings.values()))

    @property
    def pollable(self):
        return [self.pipe.bell]

    def begin_wait(self):
        return self.ready()

    def end_wait(self):
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.pipe.bell)

    def write(self, array, value):
        spoil = self.pipe.spoil
        if spoil == "mismatch":
            array.flat[: value.size] = value.flat[: array.size]
        elif spoil == "bits":
            array[...] = np.nan_to_num(value)
        elif spoil == "outside" and array.base is not None and array.base.ndim > array.ndim:
            array[...] = value
            array.base[...] = array.base.flat[0] if array.size == 0 else np.zeros(1, array.base.dtype)[0]
            array[...] = value
        else:
            array[...] = value


def factory(spoil):
    def make(slot_bytes, *, slots, timeout_s):
        pipe = Pipe(slots, spoil)
        return PipeSender(pipe, "sender", timeout_s), PipeReceiver(pipe, "receiver", timeout_s)

    return make


def test_a_channel_that_keeps_its_promises_passes():
    check_channel(factory("nothing"))


BROKEN = {
    "peer": "does not name its peer",
    "bits": "NaN, infinity and negative zero do not arrive as they were sent",
    "outside": "writes outside of the array",
    "copy": "before it has copied|not arrive in order",
    "order": "not arrive in order|first message is not the first",
    "bound": "`send` when all slots are unread raises nothing; it should raise ChannelTimeout",
    "timeout": "does not return; it should raise ChannelTimeout",
    "drain": "drops messages that it had sent",
    "finish": "raises PeerLost, not EndOfChannel",
    "receiver closed": "raises PeerLost, not ReceiverClosed",
    "closed": "`send` after `close` raises ReceiverClosed, not ChannelClosed",
    "failure": "raises EndOfChannel, not PeerLost",
    "mismatch": "of another size raises nothing",
    "statistics": "statistics count 3 messages and 162 bytes",
    "waiting": "statistics do not count waiting",
    "bell": "a call does not return, although the other end makes the matching call|read nothing for 1 s",
}


@pytest.mark.parametrize("spoil", BROKEN)
def test_a_broken_promise_is_named(spoil, monkeypatch):
    monkeypatch.setattr(channels, "PATIENCE_S", 1.0)
    pipes = []

    def make(slot_bytes, *, slots, timeout_s):
        sender, receiver = factory(spoil)(slot_bytes, slots=slots, timeout_s=timeout_s)
        pipes.append((sender, receiver))
        return sender, receiver

    with pytest.raises(ChannelError, match=BROKEN[spoil]):
        check_channel(make)
    for end in (end for pair in pipes for end in pair):
        end.close()  # a thread of `check_channel` may still wait in a broken channel; this wakes the thread
