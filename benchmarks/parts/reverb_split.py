"""Measure Reverb: a server, an inserting and a sampling client, with the sizes of `replay_numbers.py`.

`line_process.py` drives this program.

    python reverb_split.py uniform|prioritized

The program prints the process ids of the server and of the inserting client. Then it reads numbers of iterations from stdin. For
each number, it runs that many iterations and prints the seconds that they took.

    inserting client       server                       sampling client (this process)
    StructuredWriter --gRPC--> table, rate limiter --gRPC--> TrajectoryDataset, batches of 64; if prioritized, update_priorities

This program follows the advice of Reverb's documentation. It uses a dataset instead of `Client.sample`, with a worker for each core
and three batches in flight per worker, a signature, and a rate limiter that keeps 16 samples per insert. The other choices were the
fastest of those that we tried:
- an item is one step with the observations before and after it (a fifth faster than an item of two steps, which shares its steps
  with the items before and after it);
- a StructuredWriter, which makes items in C++ (twice as fast as the TrajectoryWriter);
- batches of 64 items, not 512;
- one update of priorities per iteration.
"""

import os
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # otherwise TensorFlow logs messages about GPUs

import numpy as np
import replay_numbers as same  # pyright: ignore[reportMissingImports]
import reverb  # pyright: ignore[reportMissingImports]
import tensorflow as tf  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

TABLE = "items"
STEP = {
    "obs": np.ones(4, np.float32), "action": np.int32(1), "reward": np.float32(1), "discount": np.float32(1),
    "last": np.bool_(False), "next_obs": np.ones(4, np.float32),
}  # fmt: skip
PENDING = 16
"""How many new items may still be on the way to the server when the next iteration begins. With more than 50, Reverb warns."""


def main() -> None:
    job = sys.argv[1]
    if job == "serve":
        serve(sys.argv[2])
    elif job == "insert":
        insert(sys.argv[2])
    else:
        measure(job)


def measure(sampler: str) -> None:
    server = _start("serve", sampler)
    address = f"localhost:{_line(server)}"
    inserter = _start("insert", address)
    _line(inserter)  # wait until the table is filled
    batches = iter(_dataset(address))
    client = reverb.TFClient(address)
    print(server.pid, inserter.pid, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        print(line.strip(), file=inserter.stdin, flush=True)
        for _ in range(int(line)):
            draw(batches, client, prioritized=sampler == "prioritized")
        _line(inserter)
        print(time.perf_counter() - began, flush=True)
    del batches
    for process in (inserter, server):
        process.communicate()  # closes the stdin of the process, so that the process ends


def draw(batches, client, *, prioritized: bool) -> float:
    """Draw the batches of one iteration. If `prioritized`, also set the priorities of all items in one call.

    Returns the sum of all drawn numbers.
    """
    total, keys, priorities = 0.0, [], []
    for _ in range(same.BATCHES):
        sample = next(batches)
        data = {name: column.numpy() for name, column in sample.data.items()}
        total += sum(float(np.sum(column, dtype=np.float32)) for column in data.values())
        keys.append(sample.info.key.numpy())
        priorities.append(np.abs(data["obs"][:, 0]) + data["reward"])
    if prioritized:
        client.update_priorities(TABLE, np.concatenate(keys), np.concatenate(priorities).astype(np.float64))
    return total


def _dataset(address: str):
    dataset = reverb.TrajectoryDataset.from_table_signature(
        address,
        TABLE,
        max_in_flight_samples_per_worker=3 * same.BATCH_SIZE,
        num_workers_per_iterator=os.cpu_count() or 1,
    )
    return dataset.batch(same.BATCH_SIZE, drop_remainder=True).prefetch(same.BATCHES)


def serve(sampler: str) -> None:
    """Run the server until stdin ends."""
    by_priority, uniform = reverb.selectors.Prioritized(same.EXPONENT), reverb.selectors.Uniform()
    # As in `cpprb_split.py`, inserting may be ahead of sampling by at most `AHEAD` iterations.
    limiter = reverb.rate_limiters.SampleToInsertRatio(
        same.ITEMS / same.STEPS, min_size_to_sample=same.FILLED, error_buffer=float(same.AHEAD * same.ITEMS)
    )
    table = reverb.Table(
        name=TABLE,
        sampler=by_priority if sampler == "prioritized" else uniform,
        remover=reverb.selectors.Fifo(),
        max_size=same.CAPACITY,
        rate_limiter=limiter,
        signature={name: tf.TensorSpec(x.shape, x.dtype) for name, x in STEP.items()},
    )
    with tempfile.TemporaryDirectory() as folder:  # otherwise Reverb makes a folder that remains
        server = reverb.Server([table], port=None, checkpointer=reverb.checkpointers.DefaultCheckpointer(folder))
        print(server.port, flush=True)
        sys.stdin.read()
        server.stop()


def insert(address: str) -> None:
    client = reverb.Client(address)
    structured = reverb.structured_writer
    pattern = structured.pattern_from_transform(STEP, lambda step: {name: x[-1] for name, x in step.items()})
    writer = client.structured_writer([structured.create_config(pattern, TABLE, conditions=[])])
    _add(writer, same.FILLED // same.STEPS)
    print("filled", flush=True)
    for line in sys.stdin:
        _add(writer, int(line))
        print("done", flush=True)


def _add(writer, iterations: int) -> None:
    for _ in range(iterations):
        for _ in range(same.STEPS):
            writer.append(STEP)
        writer.flush(block_until_num_items=PENDING)
    writer.flush()


def _start(*args: str) -> subprocess.Popen:
    command = [sys.executable, "-W", "ignore", __file__, *args]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "the server or the inserting client ended; see its error above"
    return line


if __name__ == "__main__":
    main()
