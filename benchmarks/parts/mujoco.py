"""MuJoCo is optional: without MuJoCo, benchmarks leave out the cases that need it."""

import importlib.util


def without_mujoco_if_missing(cases: list[str], mujoco: str) -> list[str]:
    """Return `cases`. If MuJoCo is not installed, leave out the case named `mujoco`, and print how to install MuJoCo."""
    if mujoco not in cases or importlib.util.find_spec("mujoco") is not None:
        return cases
    print("MuJoCo is not installed; pip install 'gymnasium[mujoco]' to measure Hopper-v5.")
    return [case for case in cases if case != mujoco]
