"""DQN of two other libraries in separate Python environments: Stable-Baselines3 in `.venv-bench`, RLlib in `.venv-rllib`."""

import subprocess
import sys
from pathlib import Path

from parts import rival

PARTS = Path(__file__).parent
RLLIB = PARTS.parents[1] / ".venv-rllib" / "bin" / "python"
SETUP = (
    "RLlib is not installed, so nothing is compared with it. To set it up:\n"
    "  python -m venv .venv-rllib && .venv-rllib/bin/pip install 'ray[rllib]' torch"
)


def installed() -> dict[str, tuple[Path, str]]:
    """Return the interpreter and the script of each installed rival, by name. Print how to install the others."""
    found = {}
    if rival.is_installed():
        found["sb3"] = (rival.PYTHON, "sb3_dqn.py")
    if RLLIB.exists() and not subprocess.run([RLLIB, "-c", "import ray, torch"], check=False).returncode:
        found["rllib"] = (RLLIB, "rllib_dqn.py")
    else:
        print(SETUP, file=sys.stderr)
    return found


class Process(rival.TrainingProcess):
    """The process of a rival, which trains DQN with `updates` updates per iteration."""

    def __init__(self, python: Path, script: str, updates: int):
        super().__init__(python, PARTS / script, str(updates))
