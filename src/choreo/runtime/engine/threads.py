"""How many threads XLA computes with on a CPU: one, where every product of matrices is small.

XLA hands the operations of a program to a pool of threads. With networks as small as those of most RL algorithms that takes
longer than it saves. On two cores, an iteration of DQN (batches of 64, 2 x 128) takes 1.24 times as long with two threads as
with one, and PPO's (minibatches of 256) 1.25, 1.27 and 1.15 times with 2 x 64, 128 and 256; with 2 x 512 they are even.
"""

import os

import jax

from choreo import _compat
from choreo.plans.plan import Plan

FEW = 2**25
"""So many multiplications one core does in about a millisecond: 256 x 256 x 512."""
XLA_THREADS = ("NPROC", "PJRT_NPROC")
"""XLA reads these when its client is made."""


def useful_threads(plan: Plan, cores: int) -> int:
    """How many of so many cores can help with one operation."""
    return cores if plan.largest_product >= FEW else 1


def start_jax(plan: Plan) -> None:
    """Make JAX's clients, with as many threads as this plan can use; not where they exist already, or the user has said."""
    if _compat.clients_exist() or any(name in os.environ for name in XLA_THREADS):
        return
    threads = useful_threads(plan, os.cpu_count() or 1)
    os.environ.update(dict.fromkeys(XLA_THREADS, str(threads)))
    try:
        jax.devices()
    finally:
        for name in XLA_THREADS:  # what this process starts decides for itself
            del os.environ[name]
