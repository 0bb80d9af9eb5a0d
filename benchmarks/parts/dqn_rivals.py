"""Others' DQN, each in an environment of its own: Stable-Baselines3 in `.venv-bench`, RLlib in `.venv-rllib`."""

import subprocess
import sys
from pathlib import Path

from parts import rival

PARTS = Path(__file__).parent
RLLIB = PARTS.parents[1] / ".venv-rllib" / "bin" / "python"
SETUP = (
    "RLlib is not there, so nothing is compared with it. To set it up:\n"
    "  python -m venv .venv-rllib && .venv-rllib/bin/pip install 'ray[rllib]' torch"
)


def installed() -> dict[str, tuple[Path, str]]:
    """Interpreter and script of each that is there, by name; says how to install what is not."""
    found = {}
    if rival.is_installed():
        found["sb3"] = (rival.PYTHON, "sb3_dqn.py")
    if RLLIB.exists() and not subprocess.run([RLLIB, "-c", "import ray, torch"], check=False).returncode:
        found["rllib"] = (RLLIB, "rllib_dqn.py")
    else:
        print(SETUP, file=sys.stderr)
    return found


class Process(rival.StableBaselines):
    """A process that trains DQN with so many updates per iteration, some iterations at a time."""

    def __init__(self, python: Path, script: str, updates: int):
        command = [python, "-W", "ignore", PARTS / script, str(updates)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while self._line() != "ready\n":
            pass
