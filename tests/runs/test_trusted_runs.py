"""The list of the run.toml files that this account wrote and that name code. Files on the list need no `--trust`."""

import hashlib
import os
import stat
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from choreo.errors import ChoreoWarning
from choreo.runs import trusted_runs


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "choreo"


def write(file: Path, text: bytes = b"[run]\n") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text)
    return file


def test_a_file_counts_as_own_if_its_path_and_its_bytes_are_on_the_list(tmp_path, state):
    file, other = write(tmp_path / "x" / "run.toml"), write(tmp_path / "y" / "run.toml")
    assert not trusted_runs.is_own(file, b"[run]\n")
    trusted_runs.remember(file, b"[run]\n")
    assert trusted_runs.is_own(file, b"[run]\n")
    assert not trusted_runs.is_own(file, b"[run] \n") and not trusted_runs.is_own(other, b"[run]\n")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert trusted_runs.is_own(tmp_path / "link" / "run.toml", b"[run]\n")
    assert (state / "runs").read_text() == f"{hashlib.sha256(b'[run]' + bytes([10])).hexdigest()}  {file}\n"
    assert stat.S_IMODE((state / "runs").stat().st_mode) == 0o600 and stat.S_IMODE(state.stat().st_mode) == 0o700


def test_the_list_drops_a_deleted_file_and_has_one_line_for_a_rewritten_file(tmp_path, state):
    first, second = write(tmp_path / "x" / "run.toml"), write(tmp_path / "y" / "run.toml")
    trusted_runs.remember(first, b"1")
    trusted_runs.remember(second, b"1")
    first.unlink()
    trusted_runs.remember(second, b"2")
    assert (state / "runs").read_text().splitlines() == [f"{hashlib.sha256(b'2').hexdigest()}  {second}"]


def test_runs_that_are_added_at_the_same_time_are_all_listed(tmp_path, state):
    files = [write(tmp_path / str(i) / "run.toml") for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda file: trusted_runs.remember(file, b"x"), files))
    assert all(trusted_runs.is_own(file, b"x") for file in files)


@pytest.mark.parametrize("what", ["runs", "."])
def test_a_list_that_others_can_write_to_is_ignored(tmp_path, state, what):
    file = write(tmp_path / "x" / "run.toml")
    trusted_runs.remember(file, b"x")
    (state / what).chmod(0o777)
    with pytest.warns(ChoreoWarning, match="runs is ignored, because other accounts can write to it"):
        assert not trusted_runs.is_own(file, b"x")


def test_entries_of_a_list_that_others_can_write_to_are_dropped(tmp_path, state):
    theirs, mine = write(tmp_path / "theirs" / "run.toml"), write(tmp_path / "mine" / "run.toml")
    trusted_runs.remember(theirs, b"x")
    (state / "runs").chmod(0o666)
    with pytest.warns(ChoreoWarning, match="is ignored"):
        trusted_runs.remember(mine, b"x")
    assert trusted_runs.is_own(mine, b"x") and not trusted_runs.is_own(theirs, b"x")


def test_a_link_in_place_of_the_list_is_ignored(tmp_path, state):
    file = write(tmp_path / "x" / "run.toml")
    trusted_runs.remember(file, b"x")
    (state / "runs").rename(tmp_path / "moved")
    (state / "runs").symlink_to(tmp_path / "moved")
    with pytest.warns(ChoreoWarning, match="cannot be read: Refused to open .*runs: it is a symbolic link"):
        assert not trusted_runs.is_own(file, b"x")


def test_a_list_that_cannot_be_written_gives_a_warning(tmp_path):
    (tmp_path / "state").write_text("a file where the folder should be")
    file = write(tmp_path / "x" / "run.toml")
    with pytest.warns(
        ChoreoWarning, match=r"cannot be added to the list of your own runs: .*give --trust \(trust=True\)"
    ):
        trusted_runs.remember(file, b"x")


def test_a_path_that_is_not_printable_is_never_listed(tmp_path, state):
    file = write(tmp_path / "a\nb" / "run.toml")
    with pytest.warns(ChoreoWarning, match="its path has characters that are not printable"):
        trusted_runs.remember(file, b"x")
    assert not state.exists()


def test_without_xdg_state_home_the_list_is_in_the_home_folder(tmp_path, monkeypatch):
    file = write(tmp_path / "x" / "run.toml")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        trusted_runs.remember(file, b"x")
        assert (tmp_path / "home" / ".local" / "state" / "choreo" / "runs").exists()
    monkeypatch.setenv("HOME", "~nobody-at-all")  # a relative path does not count as a home folder
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trusted_runs.remember(file, b"y")
    assert "no home folder" in str(caught[0].message) and not trusted_runs.is_own(file, b"y")
    assert not os.path.exists("~nobody-at-all")
