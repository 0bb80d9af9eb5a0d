"""Measure cpprb's buffer for several processes, with the sizes of `replay_numbers.py`. `line_process.py` drives this program.

    python cpprb_split.py uniform|prioritized

The program prints the process id of the explorer. Then it reads numbers of iterations from stdin. For each number, it runs that
many iterations and prints the seconds that they took.

    explorer                 learner (this process)
    add 32 rows  --> shared memory --> sample 512 rows, sum them; if prioritized, update their priorities

There is no separate process for the buffer: both processes use the same memory, with cpprb's own locks. Two semaphores limit how
far adding can be ahead of drawing, and ensure that drawing is never ahead of adding; cpprb itself sets no limits. A row is a
transition with the observations before and after it.
"""

import multiprocessing
import sys
import time

import numpy as np
import replay_numbers as same  # pyright: ignore[reportMissingImports]

ROW = {
    "obs": {"shape": 4}, "action": {"dtype": np.int32}, "reward": {}, "discount": {}, "last": {"dtype": np.bool_},
    "next_obs": {"shape": 4},
}  # fmt: skip


def main() -> None:
    import cpprb

    prioritized = sys.argv[1] == "prioritized"
    context = multiprocessing.get_context("spawn")
    if prioritized:
        buffer = cpprb.MPPrioritizedReplayBuffer(same.CAPACITY, ROW, alpha=same.EXPONENT, ctx=context)
    else:
        buffer = cpprb.MPReplayBuffer(same.CAPACITY, ROW, ctx=context)
    room, stored, (orders, explorer_end) = context.Semaphore(same.AHEAD), context.Semaphore(0), context.Pipe()
    explorer = context.Process(target=explore, args=(buffer, room, stored, explorer_end))
    explorer.start()
    orders.recv()  # wait until the buffer is filled
    print(explorer.pid, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        orders.send(int(line))
        for _ in range(int(line)):
            stored.acquire()
            draw(buffer, prioritized)
            room.release()
        orders.recv()
        print(time.perf_counter() - began, flush=True)
    orders.send(0)
    explorer.join()


def draw(buffer, prioritized: bool) -> float:
    """Draw the items of one iteration in one call, as Choreo does; returns the sum of all numbers in them."""
    rows = buffer.sample(same.ITEMS)
    total = sum(float(np.sum(rows[name], dtype=np.float32)) for name in ROW)
    if prioritized:
        buffer.update_priorities(rows["indexes"], np.abs(rows["obs"][:, 0]) + rows["reward"][:, 0])
    return total


def explore(buffer, room, stored, orders) -> None:
    new = _rows(same.STEPS)
    for _ in range(same.FILLED // same.STEPS):
        buffer.add(**new)
    orders.send("filled")
    while iterations := orders.recv():
        for _ in range(iterations):
            room.acquire()
            buffer.add(**new)
            stored.release()
        orders.send("done")


def _rows(num: int) -> dict[str, np.ndarray]:
    # The rows are made once, in advance, so that this side does not step environments.
    rng = np.random.default_rng(0)
    return {
        "obs": rng.normal(size=(num, 4)).astype(np.float32),
        "action": np.ones(num, np.int32),
        "reward": np.ones(num, np.float32),
        "discount": np.ones(num, np.float32),
        "last": np.zeros(num, np.bool_),
        "next_obs": rng.normal(size=(num, 4)).astype(np.float32),
    }


if __name__ == "__main__":
    main()
