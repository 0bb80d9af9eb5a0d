"""Encrypts and authenticates the frames of a TCP channel."""

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TAG_BYTES = 16
"""The size of the authentication tag of AES-GCM. A sealed frame is longer than its content by this number of bytes."""


class FrameCipher:
    """Seals (encrypts and authenticates) or opens the frames of one direction with AES-GCM.

    The n-th sealed frame can only be opened as the n-th frame, so the receiver notices a repeated or missing frame.
    """

    def __init__(self, key: bytes):
        self._cipher, self._count = AESGCM(key), 0

    def _nonce(self) -> bytes:
        """Count one more frame, and return its number as a nonce. Both ends count frames, so the nonce need not be sent."""
        self._count += 1
        return self._count.to_bytes(12, "little")

    def seal(self, frame: "bytes | bytearray") -> bytes:
        return self._cipher.encrypt(self._nonce(), frame, None)

    def seal_into(self, sealed: np.ndarray, frame: np.ndarray) -> None:
        self._cipher.encrypt_into(self._nonce(), frame.data, None, sealed.data)

    def open(self, sealed: bytes) -> bytes:
        """Return the content of the next frame. Raises InvalidTag if `sealed` is not the next frame that the other end sealed."""
        return self._cipher.decrypt(self._nonce(), sealed, None)

    def open_into(self, frame: np.ndarray, sealed: memoryview) -> None:
        self._cipher.decrypt_into(self._nonce(), sealed, None, frame.data)
