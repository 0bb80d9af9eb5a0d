"""Sum trees with wide nodes: one tree for each environment, and all trees in one array [env, node, child].

    first level     the leaves: the weight of each item; 0 where there is no item
    next levels     each child is the sum over one node of the level below
    last level      one node, the root

A draw descends from the root to a leaf, with a few small vector operations in each level. (With only two levels, a tree of a
million items would need nodes of a thousand children, and a draw reads all children of a node.) When a weight changes, all sums
above this weight are computed again from their children, so rounding errors do not accumulate. A sum is 0 if and only if there is
no item below the sum. The number of levels depends on the number of environments, but the number of arrays in a carry must not
depend on the number of environments. So all levels are in one array.
"""

import jax
import jax.numpy as jnp

from choreo.types import Key


def empty(num_envs: int, num_items: int, batch: int) -> jax.Array:
    """Sum trees with all weights 0, for `num_items` items of each environment; `batch` is the number of items in one draw."""
    # The time of a draw depends mostly on the number of levels if the batch is small, and on `fan_out` if the batch is large
    # (benchmarks/replay.py).
    fan_out = 16 if batch <= 64 else 8
    return jnp.zeros((num_envs, sum(_nodes_per_level(-(-num_items // fan_out), fan_out)), fan_out), jnp.float32)


def set_consecutive(tree: jax.Array, item: jax.Array, weight: jax.Array) -> jax.Array:
    """Set the weights [env, item] of consecutive items.

    `item` [item] has the numbers of the items. They are the same for all environments, and can wrap around to 0.
    """
    fan_out = tree.shape[-1]
    for first, num_nodes in _levels(tree):
        tree = tree.at[:, first + item // fan_out, item % fan_out].set(weight)
        # n consecutive items lie in at most n // fan_out + 2 nodes, or in one more if they wrap around.
        most = min(len(item) // fan_out + 3, num_nodes)
        item = (item[0] // fan_out + jnp.arange(most, dtype=item.dtype)) % num_nodes
        weight = jnp.sum(tree[:, first + item], axis=-1)
    return tree


def set_weights(tree: jax.Array, env: jax.Array, item: jax.Array, weight: jax.Array) -> jax.Array:
    """Set the weights [n] of any items [n]; an item that occurs twice gets one of its two weights."""
    fan_out = tree.shape[-1]
    for first, _ in _levels(tree):
        node = item // fan_out
        tree = tree.at[env, first + node, item % fan_out].set(weight)
        item, weight = node, jnp.sum(tree[env, first + node], axis=-1)
    return tree


def get_weights(tree: jax.Array, env: jax.Array, item: jax.Array) -> jax.Array:
    """The weights [n] of items [n]."""
    fan_out = tree.shape[-1]
    return tree[env, item // fan_out, item % fan_out]


def total(tree: jax.Array) -> jax.Array:
    """The sum of all weights of all environments."""
    return jnp.sum(tree[:, -1])


def draw(tree: jax.Array, key: Key, num: int, *, systematic: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Stratified sampling: draw one item from each of `num` equal parts of the total weight; returns (env, item, probability).

    With `systematic`, the position within every part is the same, so an item that weighs less than a part is drawn at most once.
    """
    position = jnp.broadcast_to(jax.random.uniform(key, () if systematic else (num,), jnp.float32), (num,))
    return find(tree, position)


def find(tree: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Divide the total weight into n equal parts, and return the item (env, item, probability) at a position within each part.

    `position` [n] is between 0 and 1.
    """
    num, whole = len(position), total(tree)
    rest = (jnp.arange(num, dtype=jnp.float32) + position) / num * whole
    env = item = jnp.zeros((num,), jnp.int32)
    weight = rest
    for level in reversed(_levels_over_envs(jnp.sum(tree[:, -1], axis=-1), tree.shape[-1])):
        env, rest, weight = _descend(level[env], env, rest)
    for first, _ in reversed(_levels(tree)):
        item, rest, weight = _descend(tree[env, first + item], item, rest)
    return env, item, weight / jnp.maximum(whole, 1e-30)


def _nodes_per_level(num_leaf_nodes: int, fan_out: int) -> list[int]:
    """The number of nodes of each level, from the leaves to the root."""
    found = [num_leaf_nodes]
    while found[-1] > 1:
        found.append(-(-found[-1] // fan_out))
    return found


def _levels(tree: jax.Array) -> list[tuple[int, int]]:
    """The first node and the number of nodes of each level, from the leaves to the root."""
    _, num_nodes, fan_out = tree.shape
    # The number of all nodes determines the number of leaf nodes. Search for this number, beginning slightly below an estimate.
    least = max(num_nodes * (fan_out - 1) // fan_out - num_nodes.bit_length(), 1)
    sizes = next(found for n in range(least, num_nodes + 1) if sum(found := _nodes_per_level(n, fan_out)) == num_nodes)
    return [(sum(sizes[:i]), num) for i, num in enumerate(sizes)]


def _levels_over_envs(sums: jax.Array, fan_out: int) -> list[jax.Array]:
    """A sum tree over the totals of the environments: its levels, each an array [node, child]."""
    levels = []
    while len(sums) > 1:
        nodes = jnp.pad(sums, (0, -len(sums) % fan_out)).reshape(-1, fan_out)
        levels.append(nodes)
        sums = jnp.sum(nodes, axis=-1)
    return levels


def _descend(children: jax.Array, node: jax.Array, rest: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose, in each of n nodes, the child whose interval of cumulative weight contains `rest` [n]; `children` is [n, child].

    Returns the child's number in its level, the rest within the child, and the child's weight. A child of weight 0 is never
    chosen, unless all children have weight 0.
    """
    # `before` is an exclusive cumulative sum. It is computed as a matrix product, because `cumsum` is slow on a CPU.
    fan_out = children.shape[-1]
    before = jnp.dot(children, jnp.triu(jnp.ones((fan_out, fan_out), children.dtype), k=1), precision="highest")
    number = jnp.broadcast_to(jnp.arange(fan_out, dtype=node.dtype), children.shape)
    # Because of rounding, `rest` may exceed the sum of the children; then the last child with a weight is chosen.
    chosen = jnp.max(jnp.where((before <= rest[:, None]) & (children > 0), number, 0), axis=-1)

    def of_chosen(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, chosen[:, None], axis=1, mode="promise_in_bounds")[:, 0]

    return node * fan_out + chosen, jnp.maximum(rest - of_chosen(before), 0), of_chosen(children)
