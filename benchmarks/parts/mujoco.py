"""MuJoCo is optional: benchmarks that use it leave it out if it is not installed."""

import importlib.util


def without_mujoco_if_missing(cases: list[str], mujoco: str) -> list[str]:
    """The cases, without the one called `mujoco` if MuJoCo is not installed; then prints how to install it."""
    if mujoco not in cases or importlib.util.find_spec("mujoco") is not None:
        return cases
    print("MuJoCo is not installed; pip install 'gymnasium[mujoco]' to measure Hopper-v5.")
    return [case for case in cases if case != mujoco]
