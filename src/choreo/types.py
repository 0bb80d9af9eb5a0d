"""Shared names for types; no logic."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

Role: TypeAlias = str
"""What a fragment does: "env", "actor", "learner", or any word of the user's."""

GroupName: TypeAlias = str
"""Roles that live together, joined by "+": "env+actor"."""

Key: TypeAlias = jax.Array
"""A typed JAX random key."""

PyTree: TypeAlias = Any
"""Nested containers with arrays at the leaves."""

Network: TypeAlias = Callable[..., Any]
"""`(observation_space, action_space, key) -> module`."""
