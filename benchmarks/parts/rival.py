"""Stable-Baselines3, in a separate Python environment, so that Choreo's Python environment does not need PyTorch."""

import subprocess
import sys
from pathlib import Path

from parts.line_process import LineProcess

PYTHON = Path(__file__).parents[2] / ".venv-bench" / "bin" / "python"
SETUP = (
    "Stable-Baselines3 is not installed, so nothing is compared with it. To set it up:\n"
    "  python -m venv .venv-bench && .venv-bench/bin/pip install stable-baselines3 'gymnasium[mujoco]'"
)


def is_installed() -> bool:
    """Return whether Stable-Baselines3 is installed. If it is missing, print how to install it."""
    found = PYTHON.exists() and not subprocess.run([PYTHON, "-c", "import stable_baselines3"], check=False).returncode
    if not found:
        print(SETUP, file=sys.stderr)
    return found


class TrainingProcess(LineProcess):
    """A process that trains, and measures wall and CPU time."""

    def __init__(self, python: Path, script: Path, *args: str):
        super().__init__(python, script, *args)
        while self.line() != "ready\n":
            pass

    def seconds(self, iterations: int) -> tuple[float, float]:
        """Let the process run `iterations` iterations; returns their wall and CPU time."""
        wall, cpu = self.ask(iterations)
        return wall, cpu


class StableBaselines(TrainingProcess):
    """The process in which Stable-Baselines3 trains PPO."""

    def __init__(self, env: str, num_envs: int):
        super().__init__(PYTHON, Path(__file__).parent / "sb3.py", env, str(num_envs))
