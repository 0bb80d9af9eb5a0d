"""Limits for algorithm files: the share of lines that two files have in common, and the number of files that a reader must open
to understand one algorithm."""

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOLS / script, *arguments], capture_output=True, text=True, timeout=300)


def test_no_two_algorithm_files_share_more_than_40_percent_of_their_lines():
    done = run("shared_lines.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_reader_needs_at_most_four_files_to_understand_ppo_or_sac():
    done = run("files_to_read.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "algos/ppo.py" in done.stdout and "algos/sac.py" in done.stdout


def test_both_scripts_fail_above_the_limit():
    assert "share" in run("shared_lines.py", "--limit", "1").stdout.splitlines()[-1]
    assert run("shared_lines.py", "--limit", "1").returncode == 1
    assert run("files_to_read.py", "sac", "--limit", "1").returncode == 1
