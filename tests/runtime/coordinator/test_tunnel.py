"""Tunnels: encrypted byte streams between a coordinator and a worker on another host. `faults/test_strangers.py` attacks them."""

import contextlib
import os
import threading
import time

import pytest

from choreo.runtime.channels.keys import KeyPair
from choreo.runtime.coordinator.tunnel import CHUNK_BYTES, Tunnel


@contextlib.contextmanager
def ends():
    here, there = KeyPair.new(), KeyPair.new()
    listener, port = Tunnel.listen("127.0.0.1", there, here.public)
    connector = Tunnel.connect("127.0.0.1", port, here, there.public, time.monotonic() + 10)
    try:
        connector.sendall(b"!")
        assert listener.await_peer(time.monotonic() + 10)
        assert listener.recv_into(memoryview(bytearray(1))) == 1
        yield connector, listener
    finally:
        for tunnel in (connector, listener):
            if not tunnel.socket.closed:
                tunnel.close()


def receive(tunnel: Tunnel, size: int) -> bytes:
    data, done = memoryview(bytearray(size)), 0
    tunnel.settimeout(10.0)
    while done < size:
        got = tunnel.recv_into(data[done:])
        assert got, f"the stream ends after {done} bytes"
        done += got
    return bytes(data)


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5_000_000])
def test_messages_of_every_size_pass_in_both_directions(size):
    """ZeroMQ's limit for a message includes the bytes that CURVE adds. So a chunk of CHUNK_BYTES once exceeded the limit."""
    data = os.urandom(size)
    with ends() as pair:
        for sender, receiver in (pair, pair[::-1]):
            thread = threading.Thread(target=sender.sendall, args=(data,))
            thread.start()
            assert receive(receiver, size) == data
            thread.join()


def test_all_bytes_before_the_end_are_read():
    with ends() as (connector, listener):
        connector.sendall(b"x" * 3_000_000)
        connector.close()
        assert receive(listener, 3_000_000) == b"x" * 3_000_000
        assert listener.recv_into(memoryview(bytearray(1))) == 0
