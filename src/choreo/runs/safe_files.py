"""Read and write files in a folder that may come from a stranger.

If `metrics.jsonl` were a symbolic link, or had a second hard link, writing to it would change a file elsewhere; opening a
pipe (FIFO) would block for ever. So `open_to_write` and `open_to_read` refuse symbolic links, hard links and pipes, with an
error that names the file. `write_atomic` and `replacing` replace a link by a new file. `read_bytes` refuses pipes but follows
links, because reading changes nothing.

Only the last part of a path is checked: the user chose the folder, and the path of the folder may contain links.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path

from choreo.errors import RunError


def write_atomic(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace the content of `path`; a reader sees either the old content or the new. A link at `path` is replaced."""
    with replacing(path, mode=mode) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BufferedIOBase]:
    """Open a new file, which replaces `path` at the end of the `with` block. After an exception, `path` stays as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.unlink(missing_ok=True)  # left by a process that crashed and had the same id
        descriptor = open_to_write(beside, os.O_EXCL, mode=mode)
    except IsADirectoryError as error:
        raise _refused(beside, "it is a folder") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except IsADirectoryError as error:
        raise _refused(path, "it is a folder") from error
    finally:
        beside.unlink(missing_ok=True)


def open_to_write(path: Path, flags: int = 0, *, mode: int = 0o666) -> int:
    """Open `path` for writing, and return the descriptor. A missing file is made. `flags`: further flags for `os.open`."""
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, mode)


def open_to_read(path: Path) -> int:
    """Open `path` for reading, and return the descriptor. Links are refused."""
    return _open(path, os.O_RDONLY | os.O_NOFOLLOW, 0)


def read_bytes(path: Path) -> bytes:
    """The content of a file; raises OSError if it does not exist. Links are followed."""
    with os.fdopen(_open(path, os.O_RDONLY, 0), "rb") as file:
        data: bytes | None = file.read()
    if data is None:  # a file of the kernel, for which read() would block
        raise _refused(path, "it is not a regular file")
    return data


def _open(path: Path, flags: int, mode: int) -> int:
    try:
        # Without O_NONBLOCK, opening a pipe blocks until another process opens its other end.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path, "it is a symbolic link") from error
        if error.errno in (errno.EISDIR, errno.ENXIO):  # a folder; a pipe or socket whose other end is closed
            raise _refused(path, "it is not a regular file") from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise _refused(path, "it is not a regular file")
    if found.st_nlink > 1 and flags & os.O_NOFOLLOW:
        os.close(descriptor)
        raise _refused(path, "the same file has another name elsewhere (a hard link)")
    return descriptor


def _refused(path: Path, why: str) -> RunError:
    return RunError(f"Refused to open {path}: {why}.", fix="Remove it if you did not make it.")
