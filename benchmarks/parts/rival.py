"""Stable-Baselines3 lives in an environment of its own, so that Choreo's needs no PyTorch."""

import subprocess
import sys
from pathlib import Path

PYTHON = Path(__file__).parents[2] / ".venv-bench" / "bin" / "python"
SETUP = (
    "Stable-Baselines3 is not there, so nothing is compared with it. To set it up:\n"
    "  python -m venv .venv-bench && .venv-bench/bin/pip install stable-baselines3 'gymnasium[mujoco]'"
)


def is_installed() -> bool:
    """Says how to install it, if it is not."""
    there = PYTHON.exists() and not subprocess.run([PYTHON, "-c", "import stable_baselines3"], check=False).returncode
    if not there:
        print(SETUP, file=sys.stderr)
    return there


class StableBaselines:
    """A process that trains PPO, some iterations at a time."""

    def __init__(self, env: str, num_envs: int):
        script = Path(__file__).parent / "sb3.py"
        self.process = subprocess.Popen(
            [PYTHON, "-W", "ignore", script, env, str(num_envs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while self._line() != "ready\n":
            pass

    def seconds(self, iterations: int) -> tuple[float, float]:
        """Wall and CPU time of so many iterations."""
        assert self.process.stdin is not None
        print(iterations, file=self.process.stdin, flush=True)
        wall, cpu = map(float, self._line().split())
        return wall, cpu

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "Stable-Baselines3 ended; its error stands above"
        return line
