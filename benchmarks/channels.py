"""How long does a round trip of a message take through shared memory and TCP, and is it shorter if a waiting end spins first?

A round trip sends an array from one process, the driver, to a second process, the echo, which sends the array back. Shared
memory is measured in three ways:
- `sleep`: the default, in which an end that waits goes to sleep at once;
- `spin`: an end that waits spins (checks for a message again and again) for 50 us before it sleeps;
- `bell`: like `sleep`, but each message also sends a byte through the doorbell, even if the other end is awake. By default, an end
  reads a flag, and sends this byte only if the other end sleeps. So `bell` shows how much time the flag saves.
TCP is measured in one way, `tcp`. In `sleep` and `spin`, the measurement is repeated with two pairs of processes at the same time.
All cases are measured in turns. The result of a case is the median time of a round trip over the turns, in microseconds. The ratio
is the time of `sleep` divided by the time of `spin`, for one pair and 128 bytes: above 1, spinning is faster.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import numpy as np

from choreo.runtime.channels.base import ChannelError, EndOfChannel
from choreo.runtime.channels.keys import KeyPair
from choreo.runtime.channels.shm import ShmReceiver, ShmSender, make_shm_channel
from choreo.runtime.channels.tcp import TcpListener, connect

SIZES = {"128B": 128, "4KB": 4096, "1MB": 1 << 20}
DRIVER, ECHO = (KeyPair.from_token(b"a benchmark has no secrets", label) for label in ("driver", "echo"))
CASES = [
    *((way, size, pairs) for way in ("sleep", "spin") for size in SIZES for pairs in (1, 2)),
    *(("bell", size, 1) for size in ("128B", "4KB")),
    *(("tcp", size, 1) for size in SIZES),
]


def main() -> None:
    # Imported here, because `harness` imports JAX, which drivers and echoes must not import.
    from harness import write_result

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure only for a moment, to test that this script runs")
    quick = parser.parse_args().quick
    repeats, seconds = (1, 0.02) if quick else (7, 0.4)
    cases = [case for case in CASES if case[1] == "128B"] if quick else CASES
    micros = {case: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            micros[case].append(round_trip(*case, seconds))
    ratios = [sleep / spin for sleep, spin in zip(micros["sleep", "128B", 1], micros["spin", "128B", 1], strict=True)]
    write_result(
        "channels",
        quick=quick,
        question="round trip of 128 bytes through shared memory, sleeping at once as a ratio to 50 us of spinning first",
        ratio=statistics.median(ratios),
        ratios=ratios,
        **{f"{way}_{size}_x{pairs}_us": statistics.median(us) for (way, size, pairs), us in micros.items()},
        **{f"{way}_{size}_x{pairs}_best_us": min(us) for (way, size, pairs), us in micros.items()},
        repeats=repeats,
    )


def round_trip(way: str, size: str, pairs: int, seconds: float) -> float:
    """Run `pairs` pairs of processes for `seconds` seconds. Returns microseconds per round trip, as the mean over the pairs."""
    drivers, echoes = zip(*[start_pair(way, SIZES[size], seconds) for _ in range(pairs)], strict=True)
    for driver in drivers:
        driver.stdin.write("go\n")
        driver.stdin.flush()
    micros = [float(driver.communicate()[0]) for driver in drivers]
    assert not any(process.wait() for process in (*drivers, *echoes)), "a process failed; see its output above"
    return statistics.mean(micros)


def start_pair(way: str, size: int, seconds: float) -> tuple[subprocess.Popen, subprocess.Popen]:
    """Start a driver and an echo. Returns both when they are ready."""
    if way == "tcp":
        driver = start("drive", way=way, size=size, seconds=seconds)
        address = driver.stdout.readline().strip()
        echo = start("echo", way=way, size=size, address=address)
    else:
        (out, out_there), (back_there, back) = make_shm_channel(size), make_shm_channel(size)
        driver = start("drive", way=way, size=size, seconds=seconds, ends=[out, back])
        echo = start("echo", way=way, size=size, ends=[back_there, out_there])
    driver.stdout.readline()  # the driver prints a line after its first round trip
    return driver, echo


def start(job: str, *, ends=(), **options) -> subprocess.Popen:
    options["ends"] = [[*end.fds, end.slot_bytes, end.slots] for end in ends]
    process = subprocess.Popen(
        [sys.executable, __file__, "--job", json.dumps({"job": job, **options})],
        pass_fds=[fd for end in ends for fd in end.fds],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for end in ends:
        end.close()
    return process


def work(*, job, way, size, ends, seconds=0.0, address=None) -> None:
    sender, receiver = open_shm(way, ends) if way != "tcp" else open_tcp(address)
    message = [np.zeros(size, np.uint8)]
    if job == "echo":
        with sender, receiver:
            echo(sender, receiver, message)
        return
    with sender, receiver:
        sender.send(message)
        receiver.receive(message)
        print("ready", flush=True)
        sys.stdin.readline()
        print(drive(sender, receiver, message, seconds))


def open_shm(way, ends):
    kinds = (BellSender, BellReceiver) if way == "bell" else (ShmSender, ShmReceiver)
    spin_us = 50.0 if way == "spin" else 0.0
    return [kind.open(*end, peer="peer", spin_us=spin_us) for kind, end in zip(kinds, ends, strict=True)]


def open_tcp(address):
    if address:
        known = {"keys": ECHO, "peer": "driver", "peer_key": DRIVER.public}
        receiver = connect(address, "out", end="receiver", **known)
        return connect(address, "back", **known), receiver
    with TcpListener.open("127.0.0.1", keys=DRIVER) as listener:
        listener.admit({ECHO.public: "echo"})
        print(listener.address, flush=True)
        sender = listener.accept_channel("out", end="sender", peer="echo")
        return sender, listener.accept_channel("back", peer="echo")


def echo(sender, receiver, message) -> None:
    try:
        while True:
            receiver.receive(message)
            sender.send(message)
    except EndOfChannel:
        return


def drive(sender, receiver, message, seconds) -> float:
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(10):
            sender.send(message)
            receiver.receive(message)
        count += 10
    return 1e6 * elapsed / count


class BellSender(ShmSender):
    """Rings the doorbell for every message."""

    def _hand_over(self, counter, their_flag, payload):
        return super()._hand_over(counter, their_flag, payload) and (self._words[their_flag] or self._wake_peer())


class BellReceiver(ShmReceiver):
    """Rings the doorbell for every message that it has read."""

    def _hand_over(self, counter, their_flag, payload):
        return super()._hand_over(counter, their_flag, payload) and (self._words[their_flag] or self._wake_peer())


if __name__ == "__main__":
    if "--job" in sys.argv:
        try:
            work(**json.loads(sys.argv[-1]))
        except ChannelError as error:
            sys.exit(str(error))
    else:
        main()
