"""Frames between the coordinator and a worker. A frame is a header as JSON, and then the bytes of numpy arrays.

    │ size of the header │ header: {"kind": "ran", ..., "arrays": [[shape, name of dtype], ...]} │ array │ array │ ...

A worker unpickles the programs that the coordinator sends as an array. The coordinator never unpickles anything.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from choreo.dtypes import dtype_named, name_of
from choreo.errors import RunError

Frame = tuple[dict[str, Any], list[np.ndarray]]
"""Header and arrays."""
MAX_HEADER_BYTES = 2**26
"""The size of the largest header that is accepted. A larger header is refused before memory is allocated for it."""
PROGRESS = "progress"
"""The kind of the frame with which a worker reports that it begins an iteration. All other frames of a worker are replies to
commands, heartbeats or error reports."""
BEAT = "beat"
"""The kind of the frame with which the coordinator asks whether a worker is alive, and of the worker's answer."""


class WireError(RunError):
    """Bytes arrived that are not a frame."""


@runtime_checkable
class Stream(Protocol):
    """A stream of bytes: a socket, or a tunnel."""

    def send(self, data: Any, /) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...


@runtime_checkable
class Watch(Protocol):
    """Is told whether the bytes of a frame move while the frame is sent or received.

    If the stream has a time limit and there is no watch, `send_frame` and `receive_frame` raise TimeoutError at the limit.
    """

    def moved(self) -> None:
        """Some bytes were sent or received."""
        ...

    def stalled(self) -> None:
        """No bytes could be sent or received within the time limit of the stream."""
        ...


def send_frame(
    sock: Stream, header: dict[str, Any], arrays: Sequence[np.ndarray] = (), watch: Watch | None = None
) -> None:
    """Send one frame."""
    arrays = [np.asarray(a, a.dtype.newbyteorder("="), order="C") for a in arrays]
    text = json.dumps(header | {"arrays": [[list(a.shape), name_of(a.dtype)] for a in arrays]}).encode()
    _send(sock, memoryview(struct.pack("!Q", len(text)) + text), watch)
    for array in arrays:
        if array.nbytes:
            _send(sock, array.reshape(-1).view(np.uint8).data, watch)


def receive_frame(sock: Stream, watch: Watch | None = None) -> Frame | None:
    """Return the next frame, or None if the other end is gone. Raises WireError if the bytes are not a frame."""
    size = _receive(sock, 8, watch)
    if size is None:
        return None
    (header_bytes,) = struct.unpack("!Q", size)
    if header_bytes > MAX_HEADER_BYTES:
        raise WireError(f"A frame announces a header of {header_bytes:,} bytes.")
    text = _receive(sock, header_bytes, watch)
    if text is None:
        return None
    header, arrays = _parse(text)
    for array in arrays:
        if array.nbytes and not _receive_into(sock, array.reshape(-1).view(np.uint8).data, watch):
            return None
    return header, arrays


def _parse(text: bytearray) -> Frame:
    """Return the header, and uninitialised arrays of the shapes and dtypes that the header announces."""
    try:
        header = json.loads(bytes(text))
        arrays = [np.empty(shape, dtype_named(name)) for shape, name in header.pop("arrays")]
        if not isinstance(header["kind"], str):
            raise TypeError(f"its kind is a {type(header['kind']).__name__}, not a string")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        raise WireError(f"The header of a frame is not valid: {error!r}.") from error
    return header, arrays


def _send(sock: Stream, view: memoryview, watch: Watch | None) -> None:
    while view:
        try:
            size = sock.send(view)
        except TimeoutError:
            if watch is None:
                raise
            watch.stalled()
            continue
        view = view[size:]
        if watch is not None:
            watch.moved()


def _receive(sock: Stream, size: int, watch: Watch | None) -> bytearray | None:
    data = bytearray(size)
    return data if _receive_into(sock, memoryview(data), watch) else None


def _receive_into(sock: Stream, view: memoryview, watch: Watch | None) -> bool:
    done = 0
    while done < len(view):
        try:
            got = sock.recv_into(view[done:])
        except TimeoutError:
            if watch is None:
                raise
            watch.stalled()
            continue
        except ConnectionResetError:
            return False
        if got == 0:
            return False
        done += got
        if watch is not None:
            watch.moved()
    return True
