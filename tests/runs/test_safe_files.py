"""`open_to_write` and `open_to_read` refuse a link, a pipe or a folder in place of a file, and the error names its path.

`write_atomic` replaces links and pipes, and refuses folders. `read_bytes` follows links, and refuses pipes.
"""

import os

import pytest

from choreo.errors import RunError
from choreo.runs import safe_files


def plant(kind, place, victim):
    """Put a link to `victim`, a pipe or a folder at the path `place`, as an attacker would."""
    victim.write_text("precious")
    if kind == "link":
        place.symlink_to(victim)
    elif kind == "dangling link":
        place.symlink_to(victim.with_name("gone"))
    elif kind == "hard link":
        os.link(victim, place)
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()


KINDS = {
    "link": "it is a symbolic link",
    "dangling link": "it is a symbolic link",
    "hard link": r"the same file has another name elsewhere \(a hard link\)",
    "pipe": "it is not a regular file",
    "folder": "it is not a regular file",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("open_file", [safe_files.open_to_write, safe_files.open_to_read])
def test_links_pipes_and_folders_are_not_opened(tmp_path, kind, open_file):
    place, victim = tmp_path / "metrics.jsonl", tmp_path / "victim"
    plant(kind, place, victim)
    with pytest.raises(RunError, match=f"Refused to open .*metrics.jsonl: {KINDS[kind]}.\nRemove it"):
        os.close(open_file(place))
    assert victim.read_text() == "precious" and not (tmp_path / "gone").exists()


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe"])
@pytest.mark.parametrize("name", ["x", f".x.{os.getpid()}.part"], ids=["file", "part"])
def test_write_atomic_replaces_a_link_or_pipe_and_never_writes_through_it(tmp_path, kind, name):
    plant(kind, tmp_path / name, tmp_path / "victim")
    safe_files.write_atomic(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new" and not (tmp_path / "x").is_symlink()
    assert (tmp_path / "victim").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["victim", "x"]


@pytest.mark.parametrize("name", ["x", f".x.{os.getpid()}.part"], ids=["file", "part"])
def test_write_atomic_refuses_a_folder_in_place_of_the_file(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(RunError, match=f"Refused to open .*{name}: it is a folder"):
        safe_files.write_atomic(tmp_path / "x", b"new")


def test_reading_follows_links_and_refuses_pipes(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert safe_files.read_bytes(tmp_path / "link") == b"text"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match="Refused to open .*pipe: it is not a regular file"):
        safe_files.read_bytes(tmp_path / "pipe")
