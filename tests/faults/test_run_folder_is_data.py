"""Opening a run folder runs no code that its author chose, and writes nothing outside of the folder. `opening.py` has the cases."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from faults import opening


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    opening.make_folders(folder)
    return folder


def opened(scratch: Any, *commands: str) -> dict[str, Any]:
    """Open changed copies of the folders in a new process; return the number of cases and the findings."""
    environ = os.environ | {"CHOREO_CACHE": "off", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, opening.__file__, str(scratch), *commands]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_load_is_safe_for_every_payload_and_other_commands_for_a_sample(scratch):
    """All commands except `compare` read run.toml in the same way as `load`. So `load` gets every case, the others get samples."""
    rest = ["graph:61", "evaluate:83", "resume:89", "replay:97", "train:101"]
    found = opened(scratch, "load:1", "compare:17", *rest)
    assert found["wrong"] == []
    assert found["count"] > 1800


@pytest.mark.long
@pytest.mark.parametrize("command", opening.COMMANDS)
def test_every_command_is_safe_for_every_payload(scratch, command):
    found = opened(scratch, f"{command}:1")
    assert found["wrong"] == []
    assert found["count"] > 1800
