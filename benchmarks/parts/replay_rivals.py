"""Others' replay, between processes: cpprb from Choreo's own environment (`[bench]`), Reverb from `.venv-reverb`."""

import importlib.util
import subprocess
import sys
from pathlib import Path

PARTS = Path(__file__).parent
REVERB = PARTS.parents[1] / ".venv-reverb" / "bin" / "python"
SETUP = {
    "cpprb": "cpprb is not there, so nothing is compared with it. To set it up:\n  pip install -e .[bench]",
    "reverb": "Reverb is not there, so nothing is compared with it. To set it up:\n"
    "  python3.11 -m venv .venv-reverb && .venv-reverb/bin/pip install 'dm-reverb[tensorflow]'",
}


def installed() -> dict[str, tuple[Path, str]]:
    """Interpreter and script of each that is there, by name; says how to install what is not."""
    found = {}
    if importlib.util.find_spec("cpprb") is not None:
        found["cpprb"] = (Path(sys.executable), "cpprb_split.py")
    # As found, not imported: that takes TensorFlow half a minute on a busy machine.
    if REVERB.exists() and list(REVERB.parents[1].glob("lib/*/site-packages/reverb")):
        found["reverb"] = (REVERB, "reverb_split.py")
    for name in SETUP.keys() - found.keys():
        print(SETUP[name], file=sys.stderr)
    return found


class Process:
    """A rival's drawing process, which starts its others; does some iterations at a time."""

    def __init__(self, command: tuple[Path, str], sampler: str):
        python, script = command
        options = [python, "-W", "ignore", PARTS / script, sampler]
        self.process = subprocess.Popen(options, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pids = [self.process.pid, *map(int, self._line().split())]

    def seconds(self, iterations: int) -> float:
        """Until so many are added and drawn."""
        assert self.process.stdin is not None
        print(iterations, file=self.process.stdin, flush=True)
        return float(self._line())

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "A rival ended; its error stands above"
        return line
