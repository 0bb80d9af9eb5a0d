"""CI runs one benchmark with `--quick` and imports the others. `make test-long` runs the others with `--quick`.

The tests check that a benchmark runs, not how fast Choreo is. They also check the stored results, and the table in the README.
"""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(p.name for p in FOLDER.glob("*.py") if p.name not in ("harness.py", "table.py"))
CI = ("gymnasium_ppo.py",)
"""The cheapest benchmark. CI runs it with `--quick`."""


@pytest.fixture
def as_a_script(monkeypatch):
    """Let a script run in this process, in which JAX is already imported. The strict settings of the tests are off."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("NPROC", "1")  # some scripts set NPROC; monkeypatch restores it after the test
    dispatch = jax.config.read("jax_cpu_enable_async_dispatch")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_cpu_enable_async_dispatch", dispatch)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a script may leave files open until it ends
@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=[] if script in CI else [pytest.mark.long]) for script in SCRIPTS]
)
def test_a_quick_run_prints_its_result(script, as_a_script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--quick"])
    runpy.run_path(str(FOLDER / script), run_name="__main__")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["quick"] and result["ratio"] > 0 and result["jax"]


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in CI])
def test_a_script_can_be_imported(script, as_a_script):
    assert runpy.run_path(str(FOLDER / script), run_name="imported")["__doc__"]


def test_results_come_from_full_runs():
    for file in (FOLDER / "results").glob("*.json"):
        assert json.loads(file.read_text())["quick"] is False, file


def test_the_table_in_the_readme_shows_the_results():
    spec = importlib.util.spec_from_file_location("table", FOLDER / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = module.README.read_text()
    assert module.updated(readme) == readme, "run `python benchmarks/table.py`"
