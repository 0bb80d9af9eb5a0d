"""How many threads XLA uses on a CPU: one, if every matrix product of the plan is small.

XLA divides operations over a pool of threads. With the small networks of most RL algorithms, handing work to a thread costs
more than it saves. On two cores, an iteration of DQN (batches of 64, two layers of 128) takes 1.24 times as long with two
threads as with one. PPO (minibatches of 256) takes 1.25, 1.27 and 1.15 times as long with two layers of 64, 128 and 256, and
the same time with two layers of 512.
"""

import os

import jax

from choreo import _compat
from choreo.plans.plan import Plan

SMALL_PRODUCT = 2**25
"""Matrix products with fewer multiplications than this are small: one core computes 256 x 256 x 512 in about a millisecond."""
XLA_THREADS = ("NPROC", "PJRT_NPROC")
"""The variables from which XLA reads its number of threads when its client is made."""


def useful_threads(plan: Plan, cores: int) -> int:
    """The number of threads that makes this plan fastest on a machine with `cores` cores."""
    return cores if plan.largest_product >= SMALL_PRODUCT else 1


def start_jax(plan: Plan) -> None:
    """Make JAX's clients with as many threads as this plan can use.

    Does nothing if the clients exist already, or if the user has set the number of threads.
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
