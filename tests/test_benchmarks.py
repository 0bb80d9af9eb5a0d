"""Every benchmark runs: `--quick` asks only whether it works, never how fast."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(p.name for p in FOLDER.glob("*.py") if p.name not in ("harness.py", "table.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_quick(script):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, FOLDER / script, "--quick"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["quick"] and result["ratio"] > 0 and result["jax"]


def test_results_are_of_full_runs():
    for file in (FOLDER / "results").glob("*.json"):
        assert json.loads(file.read_text())["quick"] is False, file


def test_the_table_in_the_readme_is_that_of_the_results():
    spec = importlib.util.spec_from_file_location("table", FOLDER / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = module.README.read_text()
    assert module.updated(readme) == readme, "run `python benchmarks/table.py`"
