"""Checks that no test of faults leaves processes, files, shared memory or ports behind."""

import gc
import time
import uuid

import pytest


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """The value of an environment variable that every process of a test inherits. All these processes must end with the test."""
    # `pytest tests/faults` imports this file before tests/conftest.py sets XLA's flags, and importing `scenes` starts JAX.
    from faults.scenes import leftovers

    mark = uuid.uuid4().hex
    monkeypatch.setenv("FAULTS_MARK", mark)
    gc.freeze()  # so that `gc.collect` in `leftovers` looks only at objects of this test
    before = leftovers(mark)
    yield mark
    deadline = time.monotonic() + 20.0  # another test that runs at the same time may hold shared memory
    while (left := leftovers(mark) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    gc.unfreeze()
    assert not left
