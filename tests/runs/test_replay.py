"""`choreo replay` repeats a run bit for bit, whatever the timing of its workers was."""

from pathlib import Path

import pytest

import choreo
from choreo.cli.main import main
from choreo.runs.training import load

TINY = f"{Path(__file__).parents[1] / 'tiny.py'}:Tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "x"
    layout = choreo.coarse(workers=2, max_lag=3, merge="any")
    run = choreo.train(TINY, "jax:CartPole-v1", steps=1280, num_envs=8, layout=layout, out=path)
    assert all(0 <= row["lag_max"] <= 3 for row in run.rows)
    return path


@pytest.mark.long  # in CI, the code in docs/law.md tests the same
def test_replay_gives_the_same_parameters(folder, capsys):
    assert main(["replay", str(folder), "--quiet"]) == 0
    digest = load(folder).training_summary["params_hash"]
    assert capsys.readouterr().out == f"The same parameters, bit for bit: {digest}\n"


def test_a_changed_log_gives_different_parameters_and_so_an_error(folder, capsys, tmp_path):
    lines = (folder / "reads.jsonl").read_text().splitlines()
    assert len(lines) == 2 * len(load(folder).rows)
    (folder / "reads.jsonl").write_text("\n".join(line.replace("actor-0", "actor-1") for line in lines) + "\n")
    try:
        assert main(["replay", str(folder), "--quiet"]) == 1
        assert f"RunError: The parameters are not those of {folder}: " in capsys.readouterr().err
    finally:
        (folder / "reads.jsonl").write_text("\n".join(lines) + "\n")


def test_a_run_without_its_log_cannot_be_replayed(folder, capsys):
    (folder / "reads.jsonl").rename(folder / "elsewhere")
    try:
        assert main(["replay", str(folder)]) == 1
        assert "has no reads.jsonl, the log of the versions that were read." in capsys.readouterr().err
    finally:
        (folder / "elsewhere").rename(folder / "reads.jsonl")
