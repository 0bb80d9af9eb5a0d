"""Checks that no test of faults leaves processes, files, shared memory or ports behind."""

import gc
import time
import uuid

import pytest


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """An environment variable that every process of the test inherits; after the test, no such process may be left."""
    # Imported here, because `pytest tests/faults` imports this file before it sets XLA's flags, and `scenes` starts JAX.
    from faults.scenes import traces

    mark = uuid.uuid4().hex
    monkeypatch.setenv("FAULTS_MARK", mark)
    gc.freeze()  # so that `gc.collect` in `traces` looks only at objects of this test
    before = traces(mark)
    yield mark
    deadline = time.monotonic() + 20.0  # shared memory of a test that runs at the same time disappears with that test
    while (left := traces(mark) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    gc.unfreeze()
    assert not left
