"""Random trajectories for the tests of returns."""

import numpy as np


def random_steps(time: int, env: int, gamma: float) -> tuple[np.ndarray, ...]:
    """Return reward, discount, last, value_tm1 and value_t, each [time, env]. About a third of the ends are time limits."""
    rng = np.random.default_rng(0)
    last = rng.random((time, env)) < 0.15
    terminated = last & (rng.random((time, env)) < 0.66)
    assert (last & ~terminated).any() and terminated.any()
    reward, value_tm1, value_t = rng.normal(size=(3, time, env)).astype(np.float32)
    return reward, (gamma * ~terminated).astype(np.float32), last, value_tm1, value_t
