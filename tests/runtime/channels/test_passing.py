"""Channels in shared memory whose file descriptors one worker passes to another, and attempts to get such descriptors."""

import contextlib
import gc
import json
import os
import socket
import struct
import subprocess
import sys
import threading

import pytest

from choreo.runtime.channels import passing, shm
from choreo.runtime.channels.passing import (
    DescriptorListener,
    NotPassed,
    connects,
    pass_channels,
)
from choreo.runtime.channels.shm import ShmReceiver, ShmSender
from choreo.testing import check_channel

SECRET = "ab" * 32
FORTH, BACK = ("a", "b", ""), ("b", "a", " (bundle)")
WANTED = {FORTH: (64, 2), BACK: (640, 3), ("a", "c", ""): (64, 2)}
"""The channels of worker `a`. Worker `b` has only the first two of them."""
OF_B = {FORTH: WANTED[FORTH], BACK: WANTED[BACK]}


@pytest.fixture(autouse=True)
def no_file_stays_open():
    before = open_files()
    yield
    gc.collect()  # tracebacks of expected errors may refer to ends of channels, and so keep them open
    assert not open_files() - before


def open_files() -> set[tuple[str, str]]:
    """The numbers of all open files, each with the file, pipe or socket that is open under this number."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the number under which `listdir` had the folder open
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@contextlib.contextmanager
def listening(secret: str = SECRET, **options):
    listener = DescriptorListener("b", secret, OF_B, **options)
    try:
        yield listener
    finally:
        listener.close()
        for end in listener.received.values():
            end.close()


def test_the_ends_of_all_channels_between_two_workers_are_passed():
    with listening() as listener:
        ours = pass_channels("a", "b", listener.name, SECRET, WANTED)
        listener.close()
        assert {key: type(end) for key, end in ours.items()} == {FORTH: ShmSender, BACK: ShmReceiver}
        assert {key: type(end) for key, end in listener.received.items()} == {FORTH: ShmReceiver, BACK: ShmSender}
        for end in ours.values():
            end.close()


@pytest.mark.parametrize("passer", ["sender", "receiver"])
def test_a_channel_that_was_passed_keeps_the_contract(passer):
    def make(slot_bytes, *, slots, timeout_s):
        key = FORTH if passer == "sender" else BACK[:2] + ("",)
        wanted = {key: (slot_bytes, slots)}
        with contextlib.closing(DescriptorListener("b", SECRET, wanted)) as listener:
            (ours,) = pass_channels("a", "b", listener.name, SECRET, wanted).values()
        (theirs,) = listener.received.values()
        for end in (ours, theirs):
            end._timeout_s = timeout_s
            if timeout_s is not None:
                end._bell.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, shm._timeval(timeout_s))
        return (ours, theirs) if passer == "sender" else (theirs, ours)

    check_channel(
        lambda *args, **options: make(*args, **options | {"timeout_s": min(options["timeout_s"] or 0.9, 0.9)})
    )


def test_of_two_workers_exactly_one_connects():
    assert connects("a", "b") and not connects("b", "a")


class TestStrangers:
    def test_a_connector_without_the_secret_gets_nothing_and_passes_nothing(self):
        with listening() as listener:
            with pytest.raises(NotPassed):
                pass_channels("a", "b", listener.name, "cd" * 32, WANTED)
            listener.close()
            assert listener.received == {}

    def test_a_listener_without_the_secret_receives_no_descriptors(self, monkeypatch):
        sent = []
        monkeypatch.setattr(passing.socket, "send_fds", lambda *args: sent.append(args))
        with listening("cd" * 32) as impostor, pytest.raises(NotPassed):
            pass_channels("a", "b", impostor.name, SECRET, WANTED)
        assert sent == []

    def test_an_impostor_that_sends_the_connectors_words_back_receives_no_descriptors(self):
        """The impostor returns the connector's own nonce, with a proof that it makes from a guessed secret."""
        with socket.socket(socket.AF_UNIX) as impostor:
            impostor.bind("\0choreo-impostor")
            impostor.listen()

            def echo():
                peer, _ = impostor.accept()
                with peer:
                    heard = peer.recv(4096)
                    nonce = heard[-passing.NONCE_BYTES :]
                    # A real listener, given the same hello and nonce, answers with another proof.
                    with listening() as real, socket.socket(socket.AF_UNIX) as to_real:
                        to_real.connect(f"\0{real.name}")
                        to_real.sendall(heard)
                        answer = to_real.recv(4096)
                        forged = nonce + passing._proof(b"guess", b"listener", heard[4:-32], nonce, nonce)
                        peer.sendall(forged)
                        assert answer != forged
                        assert peer.recv(4096) == b""

            thread = threading.Thread(target=echo)
            thread.start()
            with pytest.raises(NotPassed):
                pass_channels("a", "b", "choreo-impostor", SECRET, WANTED)
            thread.join()

    @pytest.mark.parametrize(
        "words",
        [b"", b"\xff" * 4, struct.pack("<I", 2) + b"{}" + bytes(32) + bytes(32), os.urandom(5000)],
        ids=["nothing", "a large hello", "a false proof", "noise"],
    )
    def test_nonsense_does_not_stop_the_listener(self, words):
        with listening() as listener:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(f"\0{listener.name}")
                with contextlib.suppress(OSError):
                    stranger.sendall(words)
                    stranger.shutdown(socket.SHUT_WR)
                    stranger.recv(4096)
            for end in pass_channels("a", "b", listener.name, SECRET, WANTED).values():
                end.close()

    def test_a_stranger_that_says_nothing_only_costs_time(self):
        with listening(patience_s=0.5) as listener, socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{listener.name}")
            for end in pass_channels("a", "b", listener.name, SECRET, WANTED).values():
                end.close()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
    def test_another_account_is_refused_before_it_says_anything(self):
        code = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1]);"
            "print(s.recv(100))"
        )
        with listening() as listener:
            done = subprocess.run([sys.executable, "-c", code, listener.name], capture_output=True, timeout=30)
        assert done.stdout == b"b''\n", done

    @pytest.mark.parametrize(
        "change",
        [
            {"channels": [[*FORTH]], "sizes": [[64, 2]]},
            {"sizes": [[64, 2], [64_000, 3]]},
            {"from": "c"},
            {"channels": 7},
        ],
        ids=["a channel is missing", "another size", "another worker", "nonsense"],
    )
    def test_a_hello_that_does_not_fit_the_briefing_is_refused(self, change, monkeypatch):
        """The peer knows the secret, but does not follow the same plan."""
        dumps = json.dumps
        monkeypatch.setattr(passing.json, "dumps", lambda hello: dumps(hello | change))
        with listening() as listener:
            with pytest.raises(NotPassed):
                pass_channels("a", "b", listener.name, SECRET, WANTED)
            listener.close()
            assert listener.received == {}


def test_a_name_that_nobody_has_raises_an_error():
    with pytest.raises(OSError, match="refused"):
        pass_channels("a", "b", "choreo-nobody", SECRET, WANTED)
