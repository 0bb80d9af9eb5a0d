"""The process at the other ends of a test's channels: `python channel_peer.py '{"carrier": ..., "ends": ..., "does": ...}'`.

It opens these ends, and calls the function of this file whose name is `does`. Each message is one array of `size` integers.
"""

import json
import os
import sys
import time

import numpy as np

from choreo.runtime.channels import shm, tcp
from choreo.runtime.channels.keys import KeyPair


def main(*, carrier, ends, does, count=3, size=1, spin_us=0.0):
    opened = [open_end(carrier, **end, spin_us=spin_us) for end in ends]
    ACTIONS[does](*opened, [np.zeros(size, np.int64)], count)


def open_end(carrier, *, end, where, spin_us):
    if carrier == "shm":
        kind = shm.ShmSender if end == "sender" else shm.ShmReceiver
        return kind.open(*where, peer="test", timeout_s=20.0, spin_us=spin_us)
    address, name, *keys, test_key = where
    keys = KeyPair(*(key.encode() for key in keys))
    return tcp.connect(address, name, keys=keys, peer="test", peer_key=test_key.encode(), end=end, timeout_s=20.0)


def send_and_hang(sender, message, count):
    for i in range(count):
        message[0][...] = i
        sender.send(message)
    print("ready", flush=True)
    time.sleep(600)


def receive_and_hang(receiver, message, count):
    for _ in range(count):
        receiver.receive(message)
    print("ready", flush=True)
    time.sleep(600)


def send_and_exit(sender, message, count):
    with sender:
        for i in range(count):
            message[0][...] = i
            sender.send(message)


def send_and_fail(sender, message, count):
    with sender:
        for _ in range(count):
            sender.send(message)
        raise RuntimeError("the environment is on fire")


def fork_send_and_hang(sender, message, count):
    """Fork a child, then send and hang. The child outlives the killed parent, like a process that an environment has started."""
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)
    send_and_hang(sender, message, count)


def echo(receiver, sender, message, count):
    with receiver, sender:
        for _ in range(count):
            receiver.receive(message)
            sender.send(message)


ACTIONS = {
    f.__name__: f for f in (send_and_hang, receive_and_hang, send_and_exit, send_and_fail, fork_send_and_hang, echo)
}


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
