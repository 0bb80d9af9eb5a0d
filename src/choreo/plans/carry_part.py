"""One part of a carry, such as `train`: everything below one field of a NamedTuple, or below one key of a dictionary.

Carry(train=Train(params, updates), replay=..., position=...)      part_of(carry, "train")  ->  Train(params, updates), range(0, 2)
"""

from typing import Any

import jax

from choreo.errors import unknown_name
from choreo.types import PyTree


def part_of(carry: PyTree, name: str) -> tuple[PyTree, range]:
    """The part of a carry, or of its form, and the positions of the leaves of this part among the leaves of the carry.

    Raises UnknownNameError if the carry has no part of this name.
    """
    first, parts = 0, {}
    for path, child in jax.tree_util.tree_leaves_with_path(carry, is_leaf=lambda x: x is not carry):
        stop = first + len(jax.tree.leaves(child))
        if path:  # a carry that is a single array has no parts
            parts[_name(path[0])] = child, range(first, stop)
        first = stop
    if name not in parts:
        raise unknown_name("part of the carry", name, parts)
    return parts[name]


def _name(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))
