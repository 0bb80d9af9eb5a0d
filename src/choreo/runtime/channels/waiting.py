"""`wait_for_any`: sleep until one of several channels has a message, without polling them in between.

Each receiver has sockets that become readable when its sender wakes it: the doorbell in shared memory, ZeroMQ's socket over TCP.
A sender in shared memory rings the doorbell only if a flag says that the receiver sleeps. So `begin_wait` sets this flag, and
then looks once more for a message. `end_wait` clears the flag, and reads the bytes that have arrived through the doorbell.
"""

from collections.abc import Sequence

import zmq

from choreo.runtime.channels.base import Receiver


def wait_for_any(receivers: Sequence[Receiver]) -> None:
    """Wait until one of these receivers may be ready: a message has arrived, or its sender has finished or is lost.

    This function may also return early, so call `ready` of the receivers afterwards.
    """
    poller, waiting = zmq.Poller(), []
    try:
        for receiver in receivers:
            waiting.append(receiver)
            if receiver.begin_wait():
                return
            for source in receiver.pollable:
                poller.register(source, zmq.POLLIN)
        poller.poll()
    finally:
        for receiver in waiting:
            receiver.end_wait()
