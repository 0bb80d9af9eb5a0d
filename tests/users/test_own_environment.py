"""A user trains on an environment of their own with several workers: from a script, a notebook, and the command line.

`User.run` starts a new process, as a user would, in a folder without our files. When the new process has ended, all its workers
must have ended too. `User.processes` finds workers by a mark in their environment variables, which child processes inherit.
"""

import json
import os
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path

import nbformat
import psutil
import pytest

import choreo
from tiny import Tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_environment.py"
TIMEOUT_S = 240


class User:
    """A user at a shell prompt in `folder`."""

    def __init__(self, folder: Path):
        self.folder, self.mark = folder, uuid.uuid4().hex

    def run(self, *args: str | Path) -> str:
        """Run Python with these arguments, and return its output. Python must succeed, and leave no process behind."""
        # Without these variables, Jupyter would write its files into the home folder.
        jupyter = {name: str(self.folder) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
        done = subprocess.run(
            [sys.executable, *args],
            cwd=self.folder,
            env=os.environ | jupyter | {"CHOREO_TEST_MARK": self.mark, "NO_COLOR": "1", "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not self.processes()
        return done.stdout

    def processes(self) -> list[str]:
        """The command lines of the processes that `run` started and that still run."""
        return [" ".join(p.cmdline()) for p in psutil.process_iter() if self._started(p)]

    def _started(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("CHOREO_TEST_MARK") == self.mark
        except psutil.Error:
            return False  # the process has ended, or belongs to another user


@pytest.fixture
def user(tmp_path):
    return User(tmp_path)


def test_a_script_needs_no_main_guard_to_train_with_workers(user):
    assert "__main__" not in EXAMPLE.read_text().split('"""', 2)[2]
    assert user.run(EXAMPLE) == "Share of the largest return: 1.00\n"
    run = user.folder / "runs" / "safe"
    assert list((run / "tensorboard").iterdir())
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 32


def test_a_logger_that_is_given_by_name_makes_train_create_a_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    choreo.train(Tiny(unroll=4), "jax:CartPole-v1", num_envs=2, steps=16, loggers=["tensorboard"], progress=False)
    (events,) = tmp_path.glob("runs/*/tensorboard/*")
    assert events.stat().st_size


def test_a_notebook_trains_with_workers(user):
    """The layout is `fine`, because its workers start fast: they only step environments."""
    texts = [text.replace("choreo.coarse(", "choreo.fine(") for text in cells_of(EXAMPLE)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
    nbformat.write(notebook, user.folder / "own.ipynb")
    user.run("-c", "from nbclient.cli import main; main()", "own.ipynb", "--inplace", "--kernel_name", "python3")
    done = nbformat.read(user.folder / "own.ipynb", as_version=4)
    assert printed(done.cells[-1]) == "Share of the largest return: 1.00\n"
    assert (user.folder / "runs" / "safe" / "tensorboard").is_dir()


def cells_of(script: Path) -> list[str]:
    """The cells of a script. Each cell begins after a line `# %%`; the text before the first such line is left out."""
    return script.read_text().split("# %%\n")[1:]


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


MAKE_ENV = """

from scales import heavier  # a module in the same folder


def make_env(difficulty: int = 1):
    return gymnasium.wrappers.TransformReward(MyEnv(difficulty), heavier)
"""


def test_the_command_line_trains_and_evaluates_with_arguments_of_the_environment(user):
    """The arguments reach the factory in every worker, and run.toml records them for `choreo evaluate`."""
    (user.folder / "my_env.py").write_text(cells_of(EXAMPLE)[0] + MAKE_ENV)
    (user.folder / "scales.py").write_text("def heavier(reward):\n    return 3 * reward\n")
    options = "--layout fine --workers 2 --num-envs 8 --unroll 32 --steps 8192 --seed 1 --out runs/x --quiet"
    user.run("-m", "choreo", "train", "ppo", "my_env.py:make_env", "--env.difficulty=3", *options.split())
    kept = tomllib.loads((user.folder / "runs" / "x" / "run.toml").read_text())
    assert kept["environment"]["kwargs"] == {"difficulty": 3}
    found = json.loads(user.run("-m", "choreo", "evaluate", "runs/x", "--episodes", "8", "--json"))
    assert (found["return"], found["length"]) == (30, 10)  # 10 steps, each with a reward of 3
