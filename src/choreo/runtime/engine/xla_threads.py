"""Chooses how many threads XLA uses on a CPU: one if every matrix product of the plan is small, otherwise one for each core.

XLA divides operations over a pool of threads. With the small networks of most RL algorithms, handing work to a thread costs
more time than it saves. We measured on two cores how much longer an iteration takes with two threads than with one. DQN
(batches of 64, two layers of 128 units) takes 1.24 times as long. PPO (minibatches of 256) takes 1.25, 1.27 and 1.15 times as
long with two layers of 64, 128 and 256 units. With two layers of 512 units, PPO takes as long with two threads as with one.
"""

import os

import jax

from choreo import _compat
from choreo.plans.plan import Plan

SMALL_PRODUCT = 2**25
"""Matrix products with fewer multiplications than this are small. One core computes a product of this
size, such as 256 x 256 x 512, in about a millisecond."""
XLA_THREADS = ("NPROC", "PJRT_NPROC")
"""XLA reads its number of threads from these environment variables when JAX initialises a backend (PJRT client)."""


def useful_threads(plan: Plan, cores: int) -> int:
    """The number of threads with which this plan runs fastest. `cores` is the number of cores of the machine."""
    return cores if plan.costs().largest_product >= SMALL_PRODUCT else 1


def start_jax(plan: Plan) -> None:
    """Initialise JAX's backends (PJRT clients), with the number of threads that is best for this plan.

    Do nothing if the backends are already initialised, or if the user has set the number of threads.
    """
    if _compat.clients_exist() or any(name in os.environ for name in XLA_THREADS):
        return
    threads = useful_threads(plan, os.cpu_count() or 1)
    os.environ.update(dict.fromkeys(XLA_THREADS, str(threads)))
    try:
        jax.devices()
    finally:
        for name in XLA_THREADS:  # child processes must not inherit these settings
            del os.environ[name]
