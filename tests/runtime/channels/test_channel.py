"""Both carriers keep the laws of channels (`check_channel`). Other tests kill or suspend peers, and connect as strangers."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import pytest
import zmq

from choreo.runtime.channels import keys, tcp
from choreo.runtime.channels.base import (
    ChannelError,
    ChannelTimeout,
    EndOfChannel,
    FrameForged,
    HelloRefused,
    MessageMismatch,
    PeerLost,
    ReceiverClosed,
    message_bytes,
    peer_lost,
)
from choreo.runtime.channels.keys import KeyPair
from choreo.runtime.channels.shm import ShmReceiver, ShmSender, make_shm_channel
from choreo.runtime.channels.tcp import TcpListener, connect
from choreo.testing import check_channel

PEER = Path(__file__).parent / "channel_peer.py"
HERE_KEYS, WORKER_KEYS = KeyPair.new(), KeyPair.new()
"""The keys of the listening site of these tests, and of `worker-0`, which connects to it."""
CARRIERS = ("shm", "tcp")


def make_shm(slot_bytes, *, slots=2, timeout_s=None, spin_us=0.0):
    sender, receiver = make_shm_channel(slot_bytes, slots)
    options = {"timeout_s": timeout_s, "spin_us": spin_us}
    return sender.open(peer="receiver-0", **options), receiver.open(peer="sender-0", **options)


@contextmanager
def listening():
    with TcpListener.open("127.0.0.1", keys=HERE_KEYS) as listener:
        listener.admit({WORKER_KEYS.public: "worker-0"})
        yield listener


def call(address, name, *, keys=WORKER_KEYS, peer_key=HERE_KEYS.public, **options):
    return connect(address, name, keys=keys, peer="learner-0", peer_key=peer_key, **options)


def make_tcp(slot_bytes, *, slots=2, timeout_s=None, accepts="receiver"):
    """A channel over loopback; `accepts` is the end that listens."""
    connects = "sender" if accepts == "receiver" else "receiver"
    options = {"slot_bytes": slot_bytes, "slots": slots, "timeout_s": timeout_s, "hello_timeout_s": 20.0}
    with TcpListener.open("127.0.0.1", keys=HERE_KEYS) as listener:
        listener.admit({WORKER_KEYS.public: f"{connects}-0"})
        accept = partial(listener.accept_channel, "a", end=accepts, peer=f"{connects}-0", **options)
        connecting = partial(connect, listener.address, "a", keys=WORKER_KEYS, peer_key=HERE_KEYS.public)
        accepted, connected = at_once(accept, partial(connecting, end=connects, peer=f"{accepts}-0", **options))
    return (connected, accepted) if accepts == "receiver" else (accepted, connected)


def at_once(here, there):
    results = []
    thread = threading.Thread(target=lambda: results.append(there()))
    thread.start()
    result = here()
    thread.join()
    return result, results[0]


@pytest.mark.parametrize(
    "make",
    [
        make_shm,
        partial(make_shm, spin_us=50.0),
        make_tcp,
        partial(make_tcp, accepts="sender"),
    ],
    ids=["shm", "shm-spinning", "tcp", "tcp-sender-listens"],
)
def test_channels_keep_the_laws(make):
    check_channel(make)


@contextmanager
def peer_process(carrier, does, ends, **options):
    """Start a peer process that has the given `ends`.

    Yields the opposite ends, which are in the process of the test, in the same order, and then the peer process.
    """
    with listening() as listener:
        mine, theirs, inherited = [], [], []
        for i, end in enumerate(ends):
            if carrier == "shm":
                sender, receiver = make_shm_channel(8 * options.get("size", 1))
                their_end, my_end = (sender, receiver) if end == "sender" else (receiver, sender)
                mine.append(partial(my_end.open, peer="worker-0", timeout_s=20.0))
                theirs.append({"end": end, "where": [*their_end.fds, their_end.slot_bytes, their_end.slots]})
                inherited.append(their_end)
            else:
                my_end = "receiver" if end == "sender" else "sender"
                timeouts = {"silence_s": options.pop("silence_s", 5.0), "timeout_s": 20.0}
                mine.append(partial(listener.accept_channel, f"c{i}", peer="worker-0", end=my_end, **timeouts))
                theirs.append(
                    {
                        "end": end,
                        "where": [
                            listener.address,
                            f"c{i}",
                            *(key.decode() for key in (*WORKER_KEYS, HERE_KEYS.public)),
                        ],
                    }
                )
        brief = {"carrier": carrier, "does": does, "ends": theirs, **options}
        process = subprocess.Popen(
            [sys.executable, PEER, json.dumps(brief)],
            pass_fds=[fd for end in inherited for fd in end.fds],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for end in inherited:
            end.close()
        try:
            yield *[open_mine() for open_mine in mine], process
        finally:
            process.kill()
            process.communicate()


def receive(receiver, size=1):
    array = np.full(size, -1, np.int64)
    receiver.receive([array])
    assert (array == array[0]).all()
    return int(array[0])


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_killed_sender_is_named(carrier):
    with peer_process(carrier, "send_and_hang", ["sender"], count=2) as (receiver, process):
        process.stdout.readline()
        time.sleep(0.1)  # so that its messages arrive
        process.kill()
        process.wait()
        with receiver:
            assert [receive(receiver), receive(receiver)] == [0, 1]  # messages sent before the kill are not lost
            for _ in range(2):
                with pytest.raises(PeerLost, match="`worker-0` was lost after 2 messages") as caught:
                    receive(receiver)
            assert caught.value.peer == "worker-0"


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_waiting_receiver_wakes_when_the_sender_is_killed(carrier):
    with peer_process(carrier, "send_and_hang", ["sender"], count=0) as (receiver, process), receiver:
        process.stdout.readline()
        threading.Timer(0.2, process.kill).start()
        with pytest.raises(PeerLost, match="`worker-0`"):  # not ChannelTimeout, which would be raised after 20 s
            receive(receiver)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_waiting_sender_wakes_when_the_receiver_is_killed(carrier):
    with peer_process(carrier, "receive_and_hang", ["receiver"], count=1) as (sender, process), sender:
        for _ in range(3):
            sender.send([np.zeros(1, np.int64)])
        process.stdout.readline()
        threading.Timer(0.2, process.kill).start()
        with pytest.raises(PeerLost, match="`worker-0` was lost after 3 messages"):
            sender.send([np.zeros(1, np.int64)])


def test_the_death_of_a_peer_is_noticed_although_its_forked_child_lives():
    with peer_process("shm", "fork_send_and_hang", ["sender"], count=1) as (receiver, process), receiver:
        process.stdout.readline()
        process.kill()
        assert receive(receiver) == 0
        with pytest.raises(PeerLost):
            receive(receiver)
        # The forked process keeps the other end of both pipes open, so `communicate` would wait until that process ends.
        process.stdout.close()
        process.stderr.close()
        process.stdout = process.stderr = None


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_process_that_fails_is_lost_not_finished(carrier):
    with peer_process(carrier, "send_and_fail", ["sender"], count=1) as (receiver, _), receiver:
        assert receive(receiver) == 0
        with pytest.raises(PeerLost):
            receive(receiver)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_process_that_exits_loses_no_message(carrier):
    size = 1 << 20
    with peer_process(carrier, "send_and_exit", ["sender"], count=4, size=size) as (receiver, _), receiver:
        assert [receive(receiver, size) for _ in range(2)] == [0, 1]
        time.sleep(0.3)  # until the other messages are sent, the sender is closed, and its process is about to end
        assert [receive(receiver, size) for _ in range(2)] == [2, 3]
        with pytest.raises(EndOfChannel, match="its 4 messages have all been read"):
            receive(receiver)


@pytest.mark.parametrize(("carrier", "spin_us"), [("shm", 0.0), ("shm", 50.0), ("tcp", 0.0)])
def test_no_wake_up_is_lost(carrier, spin_us):
    """In many of these round trips, one end is about to sleep when the other hands over a slot.

    If a wake-up were lost, the sleeping end would time out.
    """
    count = 3_000 if carrier == "shm" else 500
    rng, message = np.random.default_rng(0), np.zeros(1, np.int64)
    with peer_process(carrier, "echo", ["receiver", "sender"], count=count, spin_us=spin_us) as (sender, receiver, _):
        with sender, receiver:
            for i in range(count):
                message[...] = i
                sender.send([message])
                for _ in range(rng.integers(20)):
                    time.perf_counter()
                assert receive(receiver) == i


def test_a_peer_that_falls_silent_is_lost():
    with peer_process("tcp", "send_and_hang", ["sender"], count=1, silence_s=0.5) as (receiver, process), receiver:
        process.stdout.readline()
        assert receive(receiver) == 0
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerLost):
            receive(receiver)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_peer_that_pauses_is_not_lost(carrier):
    with (
        peer_process(carrier, "echo", ["receiver", "sender"], count=2) as (sender, receiver, process),
        sender,
        receiver,
    ):
        for i in range(2):
            process.send_signal(signal.SIGSTOP)
            threading.Timer(0.5, process.send_signal, [signal.SIGCONT]).start()
            sender.send([np.full(1, i, np.int64)])
            assert receive(receiver) == i


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("make", [make_shm, make_tcp], ids=CARRIERS)
def test_closed_channels_leave_no_files_open(make):
    def use():
        sender, receiver = make(64)
        sender.send([np.zeros(1, np.int64)])
        receive(receiver)
        receiver.close()
        sender.close()

    use()  # the first call opens some files that stay open in this process
    files, shared = len(open_files()), os.listdir("/dev/shm")
    for _ in range(200):
        use()
    deadline = time.monotonic() + 5
    while len(open_files()) > files + 8 and time.monotonic() < deadline:
        time.sleep(0.05)  # ZeroMQ closes files in a thread of its own
    assert len(open_files()) <= files + 8
    assert os.listdir("/dev/shm") == shared


@pytest.mark.parametrize("make", [make_shm, make_tcp], ids=CARRIERS)
def test_types_outside_of_numpy_arrive_unchanged(make):
    array = np.arange(100_000).astype(ml_dtypes.bfloat16)
    sender, receiver = make(message_bytes([array, array[:7]]), timeout_s=20.0)
    into = [np.zeros_like(array), np.zeros_like(array[:7])]
    with sender, receiver:
        sender.send([array, array[:7]])
        receiver.receive(into)
    assert (into[0] == array).all() and (into[1] == array[:7]).all()


@pytest.mark.parametrize("make", [make_shm, make_tcp], ids=CARRIERS)
def test_arrays_of_python_objects_are_refused(make):
    sender, receiver = make(64)
    with sender, receiver, pytest.raises(ChannelError, match="references to Python objects"):
        sender.send([np.array([object()])])


def test_a_message_must_fit_its_slot():
    sender, receiver = make_shm(64)
    with sender, receiver, pytest.raises(ChannelError, match="of 128 bytes does not fit a slot of 64 bytes") as caught:
        sender.send([np.zeros(9)])  # 72 bytes; an array takes a multiple of 64 bytes
    assert caught.value.peer == "receiver-0"


@pytest.mark.parametrize("make", [make_shm, make_tcp], ids=CARRIERS)
def test_a_message_with_another_number_of_arrays_is_refused(make):
    sender, receiver = make(1024, timeout_s=20.0)
    with sender, receiver:
        sender.send([np.zeros(4, np.float32)])
        with pytest.raises(
            MessageMismatch, match="`sender-0` sent message 0 with 16 bytes, but message 0 with 20 bytes was"
        ):
            receiver.receive([np.zeros(4, np.float32), np.zeros(1, np.float32)])


def test_options_are_checked():
    with pytest.raises(ChannelError, match="0 slots can hold no message"):
        make_shm_channel(8, 0)
    with pytest.raises(ChannelError, match="spin_us=1000 is not between 0 and 50"):
        ShmSender.open(-1, -1, 8, 2, peer="p", spin_us=1000.0)
    with listening() as listener:
        port = int(listener.address.rpartition(":")[2])
        with pytest.raises(ChannelError, match="Cannot listen at 127.0.0.1:.*in use"):
            TcpListener.open("127.0.0.1", port, keys=HERE_KEYS)
    with pytest.raises(ChannelError, match="Cannot listen at no-such-host.invalid"):
        TcpListener.open("no-such-host.invalid", keys=HERE_KEYS)


def test_ends_can_be_opened_from_descriptors_and_sizes():
    sender_end, receiver_end = make_shm_channel(8, 3)
    with (
        ShmSender.open(*sender_end.fds, sender_end.slot_bytes, 3, peer="b") as sender,
        ShmReceiver.open(
            *pickle.loads(pickle.dumps(receiver_end)).fds, receiver_end.slot_bytes, 3, peer="a"
        ) as receiver,
    ):
        sender.send([np.full(1, 7, np.int64)])
        assert receive(receiver) == 7


def test_errors_can_be_pickled():
    error = pickle.loads(pickle.dumps(peer_lost("learner-0", 3, "it ended.")))
    assert isinstance(error, PeerLost) and error.peer == "learner-0"
    assert str(error).splitlines()[:2] == ["`learner-0` was lost after 3 messages: it ended.", "  peer  learner-0"]


def test_a_site_without_a_key_of_this_run_is_refused():
    """The stranger's call raises HelloRefused. The listener still accepts a site with a key.

    If no such site calls, the listener raises HelloRefused too.
    """
    stranger = KeyPair.new()
    with listening() as listener:

        def call_twice():
            with pytest.raises(
                HelloRefused, match=f"The process at {listener.address} is not `learner-0`, or does not know"
            ):
                call(listener.address, "a", keys=stranger)
            return call(listener.address, "a")

        receiver, sender = at_once(partial(listener.accept_channel, "a", peer="worker-0"), call_twice)
        with sender, receiver:
            sender.send([np.full(1, 7, np.int64)])
            assert receive(receiver) == 7

        def call_once():
            with pytest.raises(HelloRefused):
                call(listener.address, "b", keys=stranger)

        def accept():
            with pytest.raises(HelloRefused, match=r"127\.0\.0\.1 did, but without a key of this run"):
                listener.accept_channel("b", peer="worker-0", hello_timeout_s=1.0)

        at_once(accept, call_once)


def test_a_process_without_the_peers_key_at_the_peers_address_is_refused():
    """A process that listens at the peer's address, but does not have the peer's secret key, is refused by the caller."""
    with listening() as listener:

        def accept():
            with pytest.raises(ChannelError):
                listener.accept_channel("a", peer="worker-0", hello_timeout_s=1.0)

        def call_once():
            with pytest.raises(HelloRefused, match="is not `learner-0`"):
                call(listener.address, "a", peer_key=KeyPair.new().public)

        at_once(accept, call_once)


def test_a_site_of_this_run_cannot_take_the_channel_of_another():
    """The name of a site follows from its key, not from its hello."""
    other = KeyPair.new()
    with listening() as listener:
        listener.admit({other.public: "worker-1"})

        def call_as_another():
            with pytest.raises(ChannelTimeout):
                call(listener.address, "a", keys=other, hello_timeout_s=1.0)
            return call(listener.address, "a")

        receiver, sender = at_once(partial(listener.accept_channel, "a", peer="worker-0"), call_as_another)
        with sender, receiver:
            sender.send([np.full(1, 7, np.int64)])
            assert receive(receiver) == 7


def test_strangers_do_no_harm():
    """Strangers connect before the expected site does, and send nonsense, too much, or nothing at all."""
    with listening() as listener, zmq.Context() as context, ExitStack() as stack:
        bother(stack, context, listener.address)

        def call_late():
            time.sleep(0.2)
            return call(listener.address, "a")

        receiver, sender = at_once(partial(listener.accept_channel, "a", peer="worker-0"), call_late)
        with sender, receiver:
            sender.send([np.full(1, 7, np.int64)])
            assert receive(receiver) == 7


def test_strangers_at_the_port_of_a_channel_do_no_harm(monkeypatch):
    """After the hello, the channel has a port of its own, to which strangers may connect before the peer does."""
    original = tcp.show_ticket

    with listening() as listener, zmq.Context() as context, ExitStack() as stack:

        def show_ticket(sock, ticket):
            ports = {c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
            for port in ports:
                bother(stack, context, f"127.0.0.1:{port}", ticket=b"not the ticket")
            time.sleep(0.2)
            original(sock, ticket)

        monkeypatch.setattr(tcp, "show_ticket", show_ticket)
        receiver, sender = at_once(
            partial(listener.accept_channel, "a", peer="worker-0"), lambda: call(listener.address, "a")
        )
        with sender, receiver:
            sender.send([np.full(1, 7, np.int64)])
            assert receive(receiver) == 7


def test_a_peer_that_says_hello_but_does_not_connect_is_named(monkeypatch):
    def leave(sock, ticket):
        raise PeerLost("the peer leaves", peer="learner-0")

    monkeypatch.setattr(tcp, "show_ticket", leave)
    with listening() as listener:

        def call_and_leave():
            with pytest.raises(PeerLost, match="the peer leaves"):
                call(listener.address, "a")

        def accept():
            with pytest.raises(
                PeerLost, match=r"after 0 messages: it said hello from 127\.0\.0\.1, but did not connect to the channel"
            ):
                listener.accept_channel("a", peer="worker-0", hello_timeout_s=1.0)

        at_once(accept, call_and_leave)


def bother(stack, context, address, ticket=None):
    """Connect strangers of all kinds to an address, until the stack is closed."""
    host, port = address.split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    too_much = greeting + b"\x06" + (2**63 - 1).to_bytes(8, "big") + b"x" * 4096
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(300), greeting, too_much, *[b""] * 50):
        stranger = stack.enter_context(socket.create_connection((host, int(port))))
        stranger.sendall(said)
    for kind in (zmq.DEALER, zmq.PAIR):
        other = stack.enter_context(context.socket(kind))
        other.set(zmq.LINGER, 0)
        if ticket is not None:
            keys.show_ticket(other, ticket)
        other.connect(f"tcp://{address}")
        with suppress(zmq.Again):  # a PAIR socket whose connection is refused already would wait forever
            other.send_multipart([b"a", b"sender"], zmq.NOBLOCK)


class Between:
    """A man in the middle: relays the bytes of every connection to a port, and may change them."""

    def __init__(self, port, change=lambda number, data: data):
        self.change, self.seen, self.to = change, bytearray(), port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.open = [self.listener]
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self):
        while True:
            try:
                near = self.listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.to))
            self.open += [near, far]
            for ends in ((near, far), (far, near)):
                self.threads.append(threading.Thread(target=self._relay, args=ends))
                self.threads[-1].start()

    def _relay(self, source, target):
        number = 0
        with suppress(OSError):
            while data := source.recv(1 << 20):
                self.seen += data
                target.sendall(self.change(number, data))
                number += 1
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self.threads:
            thread.join()


@contextmanager
def through_a_man_in_the_middle(monkeypatch, change=lambda number, data: data):
    """A sender and a receiver whose connection passes through a `Between`, except for the hello."""
    with ExitStack() as stack, listening() as listener:

        def detour(sock, host, port):
            if sock.type == zmq.PAIR:
                between.append(stack.enter_context(Between(port, change)))
                port = between[0].port
            straight(sock, host, port)

        between, straight = [], tcp.connect_socket
        monkeypatch.setattr(tcp, "connect_socket", detour)
        accept = partial(listener.accept_channel, "a", peer="worker-0", timeout_s=5.0)
        receiver, sender = at_once(accept, lambda: call(listener.address, "a", timeout_s=5.0))
        with sender, receiver:
            yield sender, receiver, between[0]


def test_a_man_in_the_middle_sees_nothing(monkeypatch):
    canary = np.frombuffer(b"a canary in a coal mine " * 4096, np.uint8)
    with through_a_man_in_the_middle(monkeypatch) as (sender, receiver, between):
        for sent in (canary[:240], canary):
            sender.send([sent])
            read = np.zeros_like(sent)
            receiver.receive([read])
            assert (read == sent).all()
        assert len(between.seen) > canary.nbytes and b"canary" not in between.seen


@pytest.mark.parametrize("size", [8, 1 << 18], ids=["small", "large"])
def test_a_man_in_the_middle_who_changes_a_frame_is_noticed(monkeypatch, size):
    changing = threading.Event()

    def flip(number, data):
        return data[:-1] + bytes([data[-1] ^ 1]) if changing.is_set() else data

    with through_a_man_in_the_middle(monkeypatch, flip) as (sender, receiver, _):
        sender.send([np.zeros(size, np.uint8)])
        receiver.receive([np.ones(size, np.uint8)])
        changing.set()
        sender.send([np.zeros(size, np.uint8)])
        with pytest.raises(FrameForged, match="`worker-0` was not sealed by `worker-0`") as caught:
            receiver.receive([np.ones(size, np.uint8)])
        assert caught.value.peer == "worker-0"


def test_a_man_in_the_middle_who_repeats_a_frame_is_noticed(monkeypatch):
    """The copy is sealed with the right key, but its nonce is that of an earlier frame."""
    repeating = threading.Event()

    def repeat(number, data):
        return data + data if repeating.is_set() and len(data) > 200 else data

    with through_a_man_in_the_middle(monkeypatch, repeat) as (sender, receiver, _):
        repeating.set()
        sender.send([np.zeros(200, np.uint8)])
        receiver.receive([np.ones(200, np.uint8)])
        with pytest.raises(FrameForged):
            receiver.receive([np.ones(200, np.uint8)])


def test_channels_may_be_accepted_in_another_order_than_they_connect():
    with listening() as listener:
        senders = {}

        def connect_to(name):
            senders[name] = call(listener.address, name)

        threads = [threading.Thread(target=connect_to, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        receivers = {name: listener.accept_channel(name, peer="worker-0", timeout_s=20.0) for name in "cab"}
        for thread in threads:
            thread.join()
        for i, name in enumerate("abc"):
            senders[name].send([np.full(1, i, np.int64)])
        assert [receive(receivers[name]) for name in "abc"] == [0, 1, 2]
        for end in (*senders.values(), *receivers.values()):
            end.close()


def test_a_channel_with_two_senders_is_refused():
    with listening() as listener:

        def call_once():
            with pytest.raises(HelloRefused, match="refused channel `a`"):
                call(listener.address, "a")

        def accept():
            with pytest.raises(HelloRefused, match="to be the sender of channel `a`, but this site is the sender"):
                listener.accept_channel("a", end="sender", peer="worker-0")

        at_once(accept, call_once)


def test_opening_a_channel_times_out():
    with listening() as listener:
        with pytest.raises(ChannelTimeout, match=r"`worker-0` did not connect to channel `a` at .* within 0\.1 s"):
            listener.accept_channel("a", peer="worker-0", hello_timeout_s=0.1)
        with pytest.raises(ChannelTimeout, match=r"`learner-0` at .* did not accept channel `a` in time"):
            call(listener.address, "a", hello_timeout_s=0.1)


@pytest.mark.parametrize("accepts", ["sender", "receiver"])
def test_messages_sent_before_the_connection_closed_can_still_be_read(accepts):
    """A receiver first reads all messages that were sent, and only then sees that the sender has closed.

    It does not matter which side listened.
    """
    for _ in range(20):
        sender, receiver = make_tcp(8, slots=3, accepts=accepts, timeout_s=20.0)
        with receiver:
            for i in range(3):
                sender.send([np.full(1, i, np.int64)])
            sender.close()
            time.sleep(0.01)
            assert [receive(receiver) for _ in range(3)] == [0, 1, 2]
            with pytest.raises(EndOfChannel):
                receive(receiver)
        sender, receiver = make_tcp(8, slots=3, accepts=accepts, timeout_s=20.0)
        with sender:
            receiver.close()
            time.sleep(0.01)
            with pytest.raises(ReceiverClosed):
                for _ in range(4):
                    sender.send([np.zeros(1, np.int64)])


def test_carriers_do_not_import_jax():
    code = "import sys, choreo.runtime.channels.shm, choreo.runtime.channels.tcp; print([m for m in ('jax', 'gymnasium') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
