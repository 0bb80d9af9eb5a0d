"""The list of run.toml files that this account wrote and that refer to Python code. They are opened without `--trust`.

    ~/.local/state/choreo/runs                       (in $XDG_STATE_HOME/choreo, if this variable is set)
    <SHA-256 of run.toml>  /data/runs/x/run.toml     one line per run, in the format of `sha256sum`

A run.toml is this account's own if the list has its path with the hash of its content: a file that was changed, moved or
copied is not its own. The list is ignored if other accounts can write to it or to its folder. Runs without code need no entry.
"""

import fcntl
import hashlib
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from choreo.errors import ChoreoWarning, RunError, printable
from choreo.runs import safe_files


def is_own(file: Path, text: bytes) -> bool:
    """Whether this account wrote `text` to the run.toml at `file`."""
    folder = _folder()
    listed = {} if folder is None else _read(folder / "runs")
    return listed.get(str(file.resolve())) == hashlib.sha256(text).hexdigest()


def remember(file: Path, text: bytes) -> None:
    """Add the run.toml at `file`, whose content is `text`, to the list. If this fails, give a warning only: the run can go on."""
    path, folder = str(file.resolve()), _folder()
    if not path.isprintable():
        _warn("its path has characters that are not printable", file)
        return
    if folder is None:
        _warn("this account has no home folder", file)
        return
    try:
        with _locked(folder):
            listed = _read(folder / "runs") | {path: hashlib.sha256(text).hexdigest()}
            lines = [f"{digest}  {path}\n" for path, digest in listed.items() if os.path.lexists(path)]
            safe_files.write_atomic(folder / "runs", "".join(lines).encode(), mode=0o600)
    except (OSError, RunError) as error:
        _warn(str(error).rstrip("."), file)


def _folder() -> Path | None:
    """The state folder of Choreo. A relative $XDG_STATE_HOME is ignored, as the XDG specification demands."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path(os.path.expanduser("~")) / ".local" / "state"
    return state / "choreo" if state.is_absolute() else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder if it is missing, and hold the lock of the list, so that no other process changes the list."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder.stat()):
        raise RunError(f"other accounts can write to {folder}")
    lock = safe_files.open_to_write(folder / "runs.lock", mode=0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _read(file: Path) -> dict[str, str]:
    """The hashes by path; empty if there is no list, or if other accounts can write to it."""
    try:
        descriptor = safe_files.open_to_read(file)
    except FileNotFoundError:
        return {}
    except (OSError, RunError) as error:
        warnings.warn(f"The list of your own runs cannot be read: {printable(str(error))}", ChoreoWarning, stacklevel=4)
        return {}
    with os.fdopen(descriptor, "rb") as opened:
        if not (_is_private(os.fstat(descriptor)) and _is_private(file.parent.stat())):
            warnings.warn(
                f"{file} is ignored, because other accounts can write to it. Remove it, and protect its folder: "
                f"chmod 700 {file.parent}",
                ChoreoWarning,
                stacklevel=4,
            )
            return {}
        lines = opened.read().decode(errors="replace").split("\n")
    return {path: digest for digest, _, path in (line.partition("  ") for line in lines) if path}


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _warn(why: str, file: Path) -> None:
    text = f"{file} cannot be added to the list of your own runs: {why}. To open it later, give --trust (trust=True)."
    warnings.warn(printable(text), ChoreoWarning, stacklevel=4)
