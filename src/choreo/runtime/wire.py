"""Frames between the coordinator and a worker: a small header as JSON, and numpy arrays as they are.

    │ bytes of the header │ header: {"kind": "ran", ..., "arrays": [[shape, name of type], ...]} │ array │ array │ ...

A worker is told what to run by cloudpickle, which it opens by itself; nothing that comes back is ever unpickled.
"""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from choreo.dtypes import dtype_named, name_of

Frame = tuple[dict[str, Any], list[np.ndarray]]


def send_frame(sock: socket.socket, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
    """Send one frame."""
    arrays = [np.asarray(a, a.dtype.newbyteorder("="), order="C") for a in arrays]
    text = json.dumps(header | {"arrays": [[list(a.shape), name_of(a.dtype)] for a in arrays]}).encode()
    sock.sendall(struct.pack("!Q", len(text)) + text)
    for array in arrays:
        if array.nbytes:
            sock.sendall(array.reshape(-1).view(np.uint8).data)


def receive_frame(sock: socket.socket) -> Frame | None:
    """The next frame; None if the other end is gone."""
    size = _receive(sock, 8)
    if size is None:
        return None
    text = _receive(sock, struct.unpack("!Q", size)[0])
    if text is None:
        return None
    header = json.loads(bytes(text))
    arrays = []
    for shape, name in header.pop("arrays"):
        array = np.empty(shape, dtype_named(name))
        if array.nbytes and not _receive_into(sock, array.reshape(-1).view(np.uint8).data):
            return None
        arrays.append(array)
    return header, arrays


def _receive(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    return data if _receive_into(sock, memoryview(data)) else None


def _receive_into(sock: socket.socket, view: memoryview) -> bool:
    done = 0
    while done < len(view):
        try:
            got = sock.recv_into(view[done:])
        except ConnectionResetError:
            return False
        if got == 0:
            return False
        done += got
    return True
