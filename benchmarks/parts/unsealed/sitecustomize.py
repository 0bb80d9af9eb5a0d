"""If this folder is in PYTHONPATH, channels over TCP do not encrypt their frames. `encryption.py` measures the difference."""

import numpy as np
import zmq

from choreo.runtime.channels import sockets, tcp_ends


class Unsealed(tcp_ends.TcpConnection):
    """A connection without encryption. Without encryption, messages are copied less often."""

    def receive_first(self):
        try:
            frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self._connections.follow(sockets.fd_of(frame))
        return frame.bytes

    def open_into(self, array, sealed):
        array[...] = np.ndarray(array.shape, array.dtype, sealed.buffer)

    def send_small(self, frame, *, more=False):
        try:
            self.socket.send(frame, zmq.NOBLOCK | (zmq.SNDMORE if more else 0))
        except zmq.Again:
            return False
        return True

    def send_large(self, array, buffer, *, more):
        self.socket.send(np.ascontiguousarray(array).reshape(-1).view(np.uint8), zmq.SNDMORE if more else 0)


tcp_ends.TcpConnection = Unsealed
