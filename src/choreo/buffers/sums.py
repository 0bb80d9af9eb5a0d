"""Weights of items, and their sums over groups, over groups of those, and so on: one array [env, group, member].

    first groups    the weights; 0 where there is no item
    then            each member is the sum of one of the groups before
    last group      the only one of its kind

To draw an item is to go up once, from the last group, each time into one of its members: a handful of small vector operations,
however many items there are. (Groups of the square root of a million have a thousand members, and a CPU looks at each.) When a
weight changes, the sums of it are taken anew, so errors do not add up: a sum is 0 if and only if there is no item below. One
array, because a carry has as many for any number of environments.
"""

import jax
import jax.numpy as jnp

from choreo.types import Key


def no_weights(num_envs: int, num_items: int, drawn: int) -> jax.Array:
    """All 0, for that many items of each environment, of which so many are drawn at a time."""
    # Of few, what takes time is to go up a level; of many, to look at the members. Measured: benchmarks/replay.py.
    members = 16 if drawn <= 64 else 8
    return jnp.zeros((num_envs, sum(_levels(-(-num_items // members), members)), members), jnp.float32)


def put_in_all(weights: jax.Array, item: jax.Array, new: jax.Array) -> jax.Array:
    """In every environment, the weights [env, item] of items that follow one another, and at the end begin again."""
    members = weights.shape[-1]
    for first, num_groups in _groups(weights):
        weights = weights.at[:, first + item // members, item % members].set(new)
        # The groups they lie in, one after another: at most this many, and one more where they begin again.
        most = min(len(item) // members + 3, num_groups)
        item = (item[0] // members + jnp.arange(most, dtype=item.dtype)) % num_groups
        new = jnp.sum(weights[:, first + item], axis=-1)
    return weights


def put(weights: jax.Array, env: jax.Array, item: jax.Array, new: jax.Array) -> jax.Array:
    """The weights [n] of any items [n]; of an item that is there twice, either."""
    members = weights.shape[-1]
    for first, _ in _groups(weights):
        group = item // members
        weights = weights.at[env, first + group, item % members].set(new)
        item, new = group, jnp.sum(weights[env, first + group], axis=-1)
    return weights


def get(weights: jax.Array, env: jax.Array, item: jax.Array) -> jax.Array:
    members = weights.shape[-1]
    return weights[env, item // members, item % members]


def total(weights: jax.Array) -> jax.Array:
    """Of all environments."""
    return jnp.sum(weights[:, -1])


def draw(weights: jax.Array, key: Key, num: int, *, evenly: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One item from each of `num` equal parts of the total: its environment, its place, and its probability.

    `evenly`: from the same place of every part, so that an item of less weight than a part comes at most once.
    """
    inside = jnp.broadcast_to(jax.random.uniform(key, () if evenly else (num,), jnp.float32), (num,))
    return at(weights, inside)


def at(weights: jax.Array, inside: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The items at these places [n], from 0 to 1, of n equal parts of the total."""
    num, every = len(inside), total(weights)
    rest = (jnp.arange(num, dtype=jnp.float32) + inside) / num * every
    env = item = jnp.zeros((num,), jnp.int32)
    weight = rest
    for level in reversed(_over_envs(jnp.sum(weights[:, -1], axis=-1), weights.shape[-1])):
        env, rest, weight = _go_into(level[env], env, rest)
    for first, _ in reversed(_groups(weights)):
        item, rest, weight = _go_into(weights[env, first + item], item, rest)
    return env, item, weight / jnp.maximum(every, 1e-30)


def _levels(num_groups: int, members: int) -> list[int]:
    """How many groups there are of each kind, if there are so many of weights."""
    found = [num_groups]
    while found[-1] > 1:
        found.append(-(-found[-1] // members))
    return found


def _groups(weights: jax.Array) -> list[tuple[int, int]]:
    """The first of each kind, and how many."""
    _, count, members = weights.shape
    least = max(count * (members - 1) // members - count.bit_length(), 1)  # a few less than there are of weights
    levels = next(found for n in range(least, count + 1) if sum(found := _levels(n, members)) == count)
    return [(sum(levels[:i]), num) for i, num in enumerate(levels)]


def _over_envs(sums: jax.Array, members: int) -> list[jax.Array]:
    """The levels over the sums of environments: [group, member]."""
    levels = []
    while len(sums) > 1:
        groups = jnp.pad(sums, (0, -len(sums) % members)).reshape(-1, members)
        levels.append(groups)
        sums = jnp.sum(groups, axis=-1)
    return levels


def _go_into(members: jax.Array, group: jax.Array, rest: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """From groups [n] to that of their members [n, member] in which `rest` lies; never to one of weight 0."""
    # Not cumsum, which is slow on a CPU; nor a second reduction, where reading one number of each row is enough.
    size = members.shape[-1]
    before = jnp.dot(members, jnp.triu(jnp.ones((size, size), members.dtype), k=1), precision="highest")
    number = jnp.broadcast_to(jnp.arange(size, dtype=group.dtype), members.shape)
    # By rounding, the rest may be more than the group has: then its last member.
    chosen = jnp.max(jnp.where((before <= rest[:, None]) & (members > 0), number, 0), axis=-1)

    def of_chosen(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, chosen[:, None], axis=1, mode="promise_in_bounds")[:, 0]

    return group * size + chosen, jnp.maximum(rest - of_chosen(before), 0), of_chosen(members)
