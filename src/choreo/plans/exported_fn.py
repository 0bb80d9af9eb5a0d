"""The function of a segment as serialised StableHLO. A worker can import this file without importing the compiler."""

import functools
from dataclasses import dataclass
from typing import Any

from jax import export


@dataclass(frozen=True)
class ExportedFn:
    """A function that can be pickled. It is deserialised at its first call."""

    serialized: bytes
    """The bytes that `jax.export` made."""

    @functools.cached_property
    def call(self) -> Any:
        """The deserialised function."""
        return export.deserialize(bytearray(self.serialized)).call

    def __call__(self, *args: Any) -> list[Any]:
        return self.call(*args)

    def __getstate__(self) -> dict[str, bytes]:
        return {"serialized": self.serialized}
