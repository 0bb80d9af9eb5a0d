"""Replays of other libraries, shared by several processes: cpprb in Choreo's Python environment, Reverb in `.venv-reverb`."""

import importlib.util
import sys
from pathlib import Path

from parts.line_process import LineProcess

PARTS = Path(__file__).parent
REVERB = PARTS.parents[1] / ".venv-reverb" / "bin" / "python"
SETUP = {
    "cpprb": "cpprb is not installed, so nothing is compared with it. To set it up:\n  pip install -e .[bench]",
    "reverb": "Reverb is not installed, so nothing is compared with it. To set it up:\n"
    "  python3.11 -m venv .venv-reverb && .venv-reverb/bin/pip install 'dm-reverb[tensorflow]'",
}


def installed() -> dict[str, tuple[Path, str]]:
    """Return the interpreter and the script of each installed rival, by name. Print how to install the others."""
    found = {}
    if importlib.util.find_spec("cpprb") is not None:
        found["cpprb"] = (Path(sys.executable), "cpprb_split.py")
    # Look for the folder instead of importing Reverb: importing TensorFlow takes half a minute on a busy machine.
    if REVERB.exists() and list(REVERB.parents[1].glob("lib/*/site-packages/reverb")):
        found["reverb"] = (REVERB, "reverb_split.py")
    for name in SETUP.keys() - found.keys():
        print(SETUP[name], file=sys.stderr)
    return found


class Process(LineProcess):
    """The process in which a rival draws items. It starts the rival's other processes, and first prints their process ids."""

    def __init__(self, command: tuple[Path, str], sampler: str):
        python, script = command
        super().__init__(python, PARTS / script, sampler)
        self.pids = [self.process.pid, *map(int, self.line().split())]

    def seconds(self, iterations: int) -> float:
        """Let the rival run `iterations` iterations; returns their wall time."""
        (wall,) = self.ask(iterations)
        return wall
