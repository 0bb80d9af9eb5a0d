"""Shared names for types. This module imports JAX only when `Key` is used."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import jax

    Key: TypeAlias = jax.Array
    """A typed JAX random key."""

Role: TypeAlias = str
"""The role of a fragment: "env", "actor", "learner", or any word that the user chooses."""

AxisName: TypeAlias = str
"""The name of an axis that replicas divide: "env", "agent", or the `axis_name` of any other `jax.vmap`."""

GroupName: TypeAlias = str
"""The name of a group: its roles, joined by "+", as in "env+actor"."""

PyTree: TypeAlias = Any
"""Nested containers with arrays at the leaves."""


def __getattr__(name: str) -> Any:
    if name == "Key":
        import jax

        return jax.Array
    raise AttributeError(f"module `choreo.types` has no attribute `{name}`")
