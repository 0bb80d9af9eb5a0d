"""`activity` tells what the main thread of a worker does. `faults/test_silence.py` tests heartbeats in real runs."""

import contextlib
import importlib
import queue
import sys
import threading
import time

import numpy as np
import pytest

from choreo.runtime.channels.shm import make_shm_channel
from choreo.runtime.channels.waiting import wait_for_any
from choreo.runtime.engine import jax_backend
from choreo.runtime.heartbeat import COMPUTING, STACK_LINES, activity, stack_text
from choreo.runtime.worker import Worker


def frame_of(thread: threading.Thread):
    return sys._current_frames()[thread.ident]


@contextlib.contextmanager
def busy(call, *args):
    """A thread that is inside of `call` until the end of the `with` statement."""
    thread = threading.Thread(target=call, args=args)
    thread.start()
    time.sleep(0.2)
    yield thread
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_worker_without_a_command_is_idle():
    worker = Worker.__new__(Worker)
    worker.commands, worker.steps_done = queue.SimpleQueue(), 0
    worker.execution = worker.links = None
    with busy(worker.serve) as thread:
        assert activity(frame_of(thread)) == "idle"
        worker.commands.put(({"kind": "stop"}, []))


@pytest.mark.parametrize("how", ["receive", "wait for any"])
def test_a_worker_that_waits_for_a_message_is_waiting(how):
    sender_end, receiver_end = make_shm_channel(64)
    with sender_end.open(peer="a") as sender, receiver_end.open(peer="b") as receiver:
        call, args = (receiver.receive, [np.zeros(1)]) if how == "receive" else (wait_for_any, [receiver])
        with busy(call, args) as thread:
            assert activity(frame_of(thread)) == "waiting"
            sender.send([np.ones(1)])


def test_a_worker_inside_of_the_backend_is_computing():
    """While JAX compiles or computes, the innermost frame of Choreo is one of the backend. This test makes such a frame."""
    done = threading.Event()
    scope = {"__name__": jax_backend.__name__, "inside": lambda: done.wait(10.0)}
    exec("def compute():\n    inside()", scope)
    with busy(scope["compute"]) as thread:
        assert activity(frame_of(thread)) == "computing"
        done.set()


def test_everything_else_is_python():
    done = threading.Event()
    with busy(done.wait, 10.0) as thread:
        assert activity(frame_of(thread)) == "python"
        done.set()
    assert activity(None) == "python"


def test_a_stack_has_the_innermost_calls_with_their_code():
    text = stack_text(sys._getframe())
    assert text.endswith("text = stack_text(sys._getframe())")
    assert text.count("File ") == STACK_LINES


def test_the_modules_that_compute_exist():
    assert all(importlib.import_module(module).__name__ == module for module in COMPUTING)
