"""Every test of faults ends with the machine as it found it."""

import gc
import time
import uuid

import pytest


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """A mark that every process of the test inherits; afterwards none of them is left, nor anything else."""
    # Here: `pytest tests/faults` imports this file before it sets XLA's flags, and scenes use JAX at once.
    from faults.scenes import traces

    mark = uuid.uuid4().hex
    monkeypatch.setenv("FAULTS_MARK", mark)
    gc.freeze()  # to look for what this test left, not for what all tests before it did
    before = traces(mark)
    yield mark
    deadline = time.monotonic() + 20.0  # shared memory may belong to a test beside this one, and go with it
    while (left := traces(mark) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    gc.unfreeze()
    assert not left
