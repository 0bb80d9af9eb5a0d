import json
import math
import struct
import sys
from pathlib import Path

import pytest

from choreo.errors import RunError, UnknownNameError
from choreo.runs import resolve
from choreo.runs.folder import to_json
from choreo.runs.loggers import check_loggers
from choreo.runs.training import train

Tiny = resolve.algorithm_class(f"{Path(__file__).parents[1] / 'tiny.py'}:Tiny")


class Recorder:
    def __init__(self):
        self.rows, self.closed = [], 0

    def log(self, row):
        self.rows.append(dict(row))

    def close(self):
        self.closed += 1


def test_a_logger_object_sees_every_iteration():
    mine = Recorder()
    run = train(Tiny(), "jax:CartPole-v1", steps=3 * 128, loggers=[mine])
    assert [row["iteration"] for row in mine.rows] == [0, 1, 2]
    assert [row["loss"] for row in mine.rows] == run.metrics["loss"].tolist()
    assert mine.closed == 1


def test_loggers_are_closed_when_the_run_fails():
    mine = Recorder()
    with pytest.raises(RunError, match="diverged"):
        train(Tiny(nan_at=1), "jax:CartPole-v1", steps=3 * 128, loggers=[mine])
    assert mine.closed == 1


def test_every_line_of_metrics_is_json(tmp_path):
    train(Tiny(unroll=1), "jax:CartPole-v1", steps=3 * 8, out=tmp_path / "x")
    lines = (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # JSON has no NaN
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert rows[0]["episode_return"] is None
    assert to_json({"a": math.inf, "b": 0.1}) == '{"a": null, "b": 0.1}'


def test_tensorboard_gets_the_numbers_of_the_metrics(tmp_path):
    pytest.importorskip("tensorboardX", reason="the extra choreo[tensorboard] is not installed")
    run = train(Tiny(), "jax:CartPole-v1", steps=3 * 128, out=tmp_path / "x", loggers=["tensorboard"])
    (file,) = (tmp_path / "x" / "tensorboard").iterdir()
    losses = [(step, value) for step, tag, value in read_events(file) if tag == "loss"]
    assert losses == list(zip(run.metrics["env_steps"].tolist(), run.metrics["loss"].tolist(), strict=True))


def read_events(file: Path):
    """Yield (step, tag, value) for each scalar of an event file.

    The file is a sequence of records: length (8 bytes), its checksum (4), data, checksum of the data (4). The data is an `Event`.
    """
    from tensorboardX.proto.event_pb2 import Event

    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        yield from ((event.step, value.tag, value.simple_value) for value in event.summary.value)
        data = data[16 + length :]


def test_unusable_loggers_are_refused(monkeypatch, tmp_path):
    with pytest.raises(UnknownNameError, match="There is no logger `tensorbored`.\nDid you mean `tensorboard`?"):
        check_loggers(["tensorbored"], tmp_path)
    with pytest.raises(RunError, match="needs a run folder to write into"):
        check_loggers(["tensorboard"], None)
    with pytest.raises(RunError, match="`object` is not a logger: it has no `log`"):
        check_loggers([object()], None)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "tensorboard").symlink_to(tmp_path)
    with pytest.raises(RunError, match="Refused to use .*x/tensorboard: it is a symbolic link"):
        check_loggers(["tensorboard"], tmp_path / "x")
    (tmp_path / "x" / "tensorboard").unlink()
    (tmp_path / "x" / "tensorboard").touch()
    with pytest.raises(RunError, match="Refused to use .*x/tensorboard: it is not a folder"):
        check_loggers(["tensorboard"], tmp_path / "x")
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # as if tensorboardX were not installed
    with pytest.raises(RunError, match="needs the package tensorboardX") as error:
        check_loggers(["tensorboard"], tmp_path)
    assert "pip install 'choreo[tensorboard]'" in str(error.value)
