"""Files in a folder that somebody else may have packed: never through a link, never a pipe, whole or not at all.

A run folder can come from anywhere. A symbolic link in the place of `metrics.jsonl` would send what is written to another
file, a second hard link would change a file elsewhere, and opening a pipe (FIFO) would wait for ever. Each is refused with
the name of the file. The path up to the folder is the user's own word, and may lead through links.
"""

import errno
import os
import stat
from pathlib import Path

from choreo.errors import RunError


def write_atomic(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Whoever opens `path` finds all of the old content or all of the new. A link at `path` is replaced, not followed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.unlink(missing_ok=True)  # of a process that ended too early and had the same number
        descriptor = open_to_write(beside, os.O_EXCL, mode=mode)
    except IsADirectoryError as error:
        raise _refused(beside, "it is a folder") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except IsADirectoryError as error:
        raise _refused(path, "it is a folder") from error
    finally:
        beside.unlink(missing_ok=True)


def open_to_write(path: Path, flags: int = 0, *, mode: int = 0o666) -> int:
    """A descriptor to write to `path`, which is made if it is missing; `flags` as of `os.open`."""
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, mode)


def open_to_read(path: Path) -> int:
    """A descriptor to read `path` itself, not what a link there leads to."""
    return _open(path, os.O_RDONLY | os.O_NOFOLLOW, 0)


def read_bytes(path: Path) -> bytes:
    """The content of a file; raises OSError if there is none. Links are followed: nothing is changed by reading."""
    with os.fdopen(_open(path, os.O_RDONLY, 0), "rb") as file:
        data: bytes | None = file.read()
    if data is None:  # a file of the kernel's, at which one would have to wait
        raise _refused(path, "it is no regular file")
    return data


def _open(path: Path, flags: int, mode: int) -> int:
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody at its other end.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path, "it is a symbolic link") from error
        if error.errno in (errno.EISDIR, errno.ENXIO):  # a folder; a pipe or socket without anybody at its other end
            raise _refused(path, "it is no regular file") from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise _refused(path, "it is no regular file")
    if found.st_nlink > 1 and flags & os.O_NOFOLLOW:
        os.close(descriptor)
        raise _refused(path, "the same file has another name elsewhere (a hard link)")
    return descriptor


def _refused(path: Path, why: str) -> RunError:
    return RunError(f"{path} is not touched: {why}.", fix="Remove it, if you do not know what it is for.")
