"""A segment's function as it travels: serialised StableHLO. A worker imports this, and none of the compiler."""

import functools
from dataclasses import dataclass
from typing import Any

from jax import export


@dataclass(frozen=True)
class ExportedFn:
    """A segment's function, back from serialised StableHLO."""

    serialized: bytes

    @functools.cached_property
    def call(self) -> Any:
        return export.deserialize(bytearray(self.serialized)).call

    def __call__(self, *args: Any) -> list[Any]:
        return self.call(*args)

    def __getstate__(self) -> dict[str, bytes]:
        return {"serialized": self.serialized}
