"""MuJoCo is optional: benchmarks that use it leave it out if it is not installed."""

import importlib.util


def without_mujoco_if_missing(cases: list[str], mujoco: str) -> list[str]:
    """If MuJoCo is not installed, prints how to install it, and returns the cases without the case `mujoco`."""
    if mujoco not in cases or importlib.util.find_spec("mujoco") is not None:
        return cases
    print("MuJoCo is not installed; pip install 'gymnasium[mujoco]' to measure Hopper-v5.")
    return [case for case in cases if case != mujoco]
