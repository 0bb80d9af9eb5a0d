"""A model of a replay, made of Python lists. Every step has a number; an item is a tuple of the numbers of its steps."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from choreo.buffers import StoredStep

ONE_STEP = StoredStep(jnp.zeros((2,)), jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(()), jnp.zeros((), bool))


def steps(first: int | jax.Array, unroll: int, num_envs: int) -> StoredStep:
    """The steps from `first` to `first + unroll - 1` of each environment, [time, env].

    Step t of environment e has the number 1000 t + e. `numbers` reads this number from the fields of the step.
    """
    number = jnp.add.outer(1000 * (first + jnp.arange(unroll)), jnp.arange(num_envs)).astype(jnp.int32)
    real = number.astype(jnp.float32)
    return StoredStep(jnp.stack([real, real + 0.5], axis=-1), number, real, jnp.ones_like(real), number % 7 == 0)


@dataclass
class Model:
    """The numbers of all stored steps, for each environment."""

    num_envs: int
    ring: int
    stored: list[list[int]] = field(default_factory=list)

    def __post_init__(self):
        self.stored = [[] for _ in range(self.num_envs)]

    def add(self, first: int, unroll: int) -> None:
        for env, row in enumerate(self.stored):
            row.extend(1000 * t + env for t in range(first, first + unroll))
            del row[: max(len(row) - self.ring, 0)]

    def items(self, length: int) -> list[tuple[int, ...]]:
        """All items, oldest first; items of the same age are ordered by environment."""
        rows = [[tuple(row[i : i + length]) for i in range(len(row) - length + 1)] for row in self.stored]
        return [item for together in zip(*rows, strict=True) for item in together]


def numbers(drawn: StoredStep) -> list[tuple[int, ...]]:
    """Return the numbers of the steps of each drawn item, and check that all fields of a step agree."""
    action = np.asarray(drawn.action)
    np.testing.assert_array_equal(np.asarray(drawn.obs)[..., 0], action)
    np.testing.assert_array_equal(np.asarray(drawn.obs)[..., 1], action + 0.5)
    np.testing.assert_array_equal(np.asarray(drawn.reward), action)
    np.testing.assert_array_equal(np.asarray(drawn.last), action % 7 == 0)
    return [tuple(row) for row in action.tolist()]
