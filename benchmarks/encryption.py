"""How much does the encryption of channels over TCP cost?

Two sides are measured: `sealed` encrypts its frames, `unsealed` does not (`parts/unsealed`). There are two measurements:
- `coarse`: an iteration of PPO on CartPole with `coarse(workers=2)` over TCP. The CPU time is the sum over all workers.
- `4MB`: a message of 4 MiB from one process to another, and a short answer. The CPU time is the sum over both processes.
In each round both sides are measured once, and the CPU time of `sealed` is divided by the CPU time of `unsealed`. The result is the
median of this ratio over all rounds. `wall_ratio` is the same ratio for wall time.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from choreo.runtime.channels.base import ChannelError
from choreo.runtime.channels.keys import KeyPair
from choreo.runtime.channels.tcp import TcpListener, connect

UNSEALED = Path(__file__).parent / "parts" / "unsealed"
SIDES = ("sealed", "unsealed")
LARGE_BYTES = 4 << 20


def main() -> None:
    # Imported here, because `harness` imports JAX, which the processes of `4MB` must not import.
    from harness import write_result

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure only for a moment, to test that this script runs")
    quick = parser.parse_args().quick
    cases = {
        "coarse": (coarse, "CPU time of PPO on CartPole with two workers over TCP"),
        "4MB": (large_messages, "CPU time of messages of 4 MiB over TCP"),
    }
    for name, (measure, words) in cases.items():
        rounds = measure(quick)
        ratios = {
            kind: [each["sealed"][i] / each["unsealed"][i] for each in rounds] for i, kind in enumerate(("cpu", "wall"))
        }
        write_result(
            f"encryption_{name}",
            quick=quick,
            question=f"{words}, encrypted as a ratio to not encrypted",
            ratio=statistics.median(ratios["cpu"]),
            ratios=ratios["cpu"],
            wall_ratio=statistics.median(ratios["wall"]),
            **{f"{side}_cpu_ms": 1e3 * statistics.median(each[side][0] for each in rounds) for side in SIDES},
            **{f"{side}_wall_ms": 1e3 * statistics.median(each[side][1] for each in rounds) for side in SIDES},
            repeats=len(rounds),
        )


@contextlib.contextmanager
def side(name: str):
    """Processes that are started inside `with side(name):` belong to the side `name`."""
    before = os.environ.get("PYTHONPATH")
    if name == "unsealed":
        os.environ["PYTHONPATH"] = os.pathsep.join([str(UNSEALED), *filter(None, [before])])
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH", None)
        if before is not None:
            os.environ["PYTHONPATH"] = before


def coarse(quick: bool) -> list[dict[str, tuple[float, float]]]:
    """Run PPO on both sides. Returns, for each round, the CPU and wall seconds that each side needs for one iteration."""
    from parts.running import Running

    import choreo

    algo = choreo.PPO(unroll=8, epochs=1, minibatch_size=64) if quick else choreo.PPO(unroll=128)
    plan = choreo.plan(algo, "CartPole-v1", choreo.coarse(workers=2), num_envs=8)
    repeats, iterations = (1, 1) if quick else (41, 20)
    with contextlib.ExitStack() as stack:
        running = {}
        for name in SIDES:
            with side(name):
                running[name] = Running("local", plan, carrier="tcp", profile=False)
            stack.callback(running[name].close)
            running[name].seconds(2)  # compiles

        def measure_one(name: str) -> tuple[float, float]:
            before = cpu_seconds(running[name].pids)
            wall = running[name].seconds(iterations)
            return (cpu_seconds(running[name].pids) - before) / iterations, wall / iterations

        return [{name: measure_one(name) for name in order(i)} for i in range(repeats)]


def large_messages(quick: bool) -> list[dict[str, tuple[float, float]]]:
    """Send messages on both sides. Returns, for each round, the CPU and wall seconds of each side for a message and its answer."""
    repeats, count = (1, 3) if quick else (21, 100)
    with contextlib.ExitStack() as stack:
        pairs = {name: stack.enter_context(Pair(name)) for name in SIDES}
        for pair in pairs.values():
            pair.exchange(3)  # wait until both have started
        return [{name: pairs[name].exchange(count) for name in order(i)} for i in range(repeats)]


def order(round_number: int) -> tuple[str, ...]:
    """The order of the sides in a round. The order alternates, because the second side finds warmer caches."""
    return SIDES if round_number % 2 else SIDES[::-1]


def cpu_seconds(pids: list[int]) -> float:
    return sum(times.user + times.system for times in (psutil.Process(pid).cpu_times() for pid in pids))


class Pair:
    """A reading and a writing process of one side, with a channel in each direction."""

    def __init__(self, name: str):
        self.keys = KeyPair.new(), KeyPair.new()
        with side(name):
            self.reader = self._start("read")
            address = self.reader.stdout.readline().strip()
            self.writer = self._start("write", address)

    def _start(self, job: str, address: str = "") -> subprocess.Popen:
        keys = [key.decode() for pair in self.keys for key in pair]
        command = [sys.executable, __file__, "--job", json.dumps({"job": job, "address": address, "keys": keys})]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def exchange(self, count: int) -> tuple[float, float]:
        """Send `count` messages and their answers. Returns the mean CPU and wall seconds of a message and its answer."""
        pids = [self.reader.pid, self.writer.pid]
        before, began = cpu_seconds(pids), time.perf_counter()
        self.writer.stdin.write(f"{count}\n")
        self.writer.stdin.flush()
        self.writer.stdout.readline()
        return (cpu_seconds(pids) - before) / count, (time.perf_counter() - began) / count

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.writer, self.reader):
            process.communicate()


def work(*, job: str, address: str, keys: list[str]) -> None:
    reader_keys, writer_keys = (
        KeyPair(*(key.encode() for key in keys[:2])),
        KeyPair(*(key.encode() for key in keys[2:])),
    )
    message, answer = [np.zeros(LARGE_BYTES, np.uint8)], [np.zeros(1, np.int64)]
    if job == "read":
        with TcpListener.open("127.0.0.1", keys=reader_keys) as listener:
            listener.admit({writer_keys.public: "writer"})
            print(listener.address, flush=True)
            receiver = listener.accept_channel("out", peer="writer")
            sender = listener.accept_channel("back", end="sender", peer="writer")
        with receiver, sender:
            while True:
                receiver.receive(message)
                sender.send(answer)
    known = {"keys": writer_keys, "peer": "reader", "peer_key": reader_keys.public}
    sender = connect(address, "out", **known)
    receiver = connect(address, "back", end="receiver", **known)
    with sender, receiver:
        for line in sys.stdin:
            for _ in range(int(line)):
                sender.send(message)
                receiver.receive(answer)
            print("done", flush=True)


if __name__ == "__main__":
    if "--job" in sys.argv:
        with contextlib.suppress(ChannelError):  # the other process has finished
            work(**json.loads(sys.argv[-1]))
    else:
        main()
