"""What an environment is: a batch of `num_envs` independent copies, stepped together.

    reset(keys[E]) -> state, obs[E, ...]         step(state, action[E, ...]) -> state, TimeStep

An environment resets itself within the step that ends an episode. So there are two observations after a step: `obs`, to
act on next, and `next_obs`, the true successor; they differ only where `last`.

    action  a0   a1   a2           a3
    obs    o0   o1   o2     |    o0'   o1'        the third step ends the episode: its TimeStep has
    next_obs    o1   o2   o3|          o1'        obs = o0', next_obs = o3, last = True
"""

from typing import NamedTuple, Protocol, runtime_checkable

import gymnasium
import jax
import jax.numpy as jnp

from choreo.errors import EnvError
from choreo.types import Key, PyTree


class TimeStep(NamedTuple):
    """What one step of every environment gave; each leaf has the env axis first."""

    obs: PyTree
    """What to act on next: of a new episode where `last`."""
    reward: jax.Array
    """Reward of this step."""
    discount: jax.Array
    """0 where the episode terminated, else 1: also 1 where a time limit cut it, so that learners bootstrap there."""
    last: jax.Array
    """True where the episode ended, for either reason."""
    next_obs: PyTree
    """The true successor of the observation acted on; differs from `obs` only where `last`."""
    info: dict[str, jax.Array]
    """`episode_return` and `episode_length`: totals of the episode up to and with this step."""


@runtime_checkable
class Env(Protocol):
    """A batch of environments. Implementations are frozen, hashable values; `choreo.testing.check_env` checks them.

    An action outside a `Box` action space is clipped to it by the environment, as Gymnasium's `ClipAction` does: a
    learner keeps the action as it was sampled.
    """

    @property
    def name(self) -> str:
        """The name `choreo.envs.make` knows it by: "jax:CartPole-v1"."""
        ...

    @property
    def num_envs(self) -> int:
        """How many environments step together."""
        ...

    @property
    def observation_space(self) -> gymnasium.Space:
        """Observations of one environment."""
        ...

    @property
    def action_space(self) -> gymnasium.Space:
        """Actions of one environment."""
        ...

    def keys(self, key: Key) -> Key:
        """One key for each environment."""
        ...

    def reset(self, keys: Key) -> tuple[PyTree, PyTree]:
        """Begin an episode in every environment: state and observations."""
        ...

    def step(self, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        """One step of every environment."""
        ...

    def with_num_envs(self, num_envs: int) -> "Env":
        """The same environment with another count."""
        ...


def check_kind(space: gymnasium.Space, action: jax.Array, name: str) -> None:
    """Refuse an action of another kind of numbers than its space has: cut to an integer, a float would train to nothing."""
    whole = isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete | gymnasium.spaces.MultiBinary)
    if whole and not (action.dtype == bool or jnp.issubdtype(action.dtype, jnp.integer)):
        raise EnvError(
            f"`{name}` was given actions of type {action.dtype}, but its actions are {space}.",
            fix="Give it whole numbers: an index (jnp.argmax, jax.random.categorical), or action.astype(jnp.int32).",
        )
