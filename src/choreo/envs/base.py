"""The interface of environments: a batch of `num_envs` independent copies, stepped together.

    reset(keys[E]) -> state, obs[E, ...]         step(state, action[E, ...]) -> state, TimeStep         E: `num_envs`

An environment resets itself within the step that ends an episode. So a step gives two observations: `obs`, on which the
actor acts next, and `next_obs`, the true successor. They differ only where `last` is True. A prime (o0')
marks the next episode.

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
    """The result of one step of every environment; each leaf has the env axis first."""

    obs: PyTree
    """Observation on which to act next; where `last` is True, the first observation of a new episode."""
    reward: jax.Array
    """Reward of this step."""
    discount: jax.Array
    """0 where the episode terminated, else 1: also 1 where a time limit truncated the episode, so that learners bootstrap."""
    last: jax.Array
    """True where the episode ended, by termination or truncation."""
    next_obs: PyTree
    """True successor of the observation before the step; differs from `obs` only where `last` is True."""
    info: dict[str, jax.Array]
    """`episode_return` and `episode_length`: totals of the episode up to and including this step. Other numbers may follow."""


@runtime_checkable
class Env(Protocol):
    """A batch of environments. Implementations are frozen, hashable values; `choreo.testing.check_env` checks them.

    The environment clips an action to its `Box` action space, as Gymnasium's `ClipAction` does; the learner sees the
    sampled action, before the clipping.
    """

    @property
    def name(self) -> str:
        """The name that `choreo.envs.make` takes: "jax:CartPole-v1"."""
        ...

    @property
    def num_envs(self) -> int:
        """How many environments step together."""
        ...

    @property
    def observation_space(self) -> gymnasium.Space:
        """The space of one environment's observations."""
        ...

    @property
    def action_space(self) -> gymnasium.Space:
        """The space of one environment's actions."""
        ...

    def keys(self, key: Key) -> Key:
        """One key for each environment."""
        ...

    def reset(self, keys: Key) -> tuple[PyTree, PyTree]:
        """Begin an episode in every environment; returns (state, observations)."""
        ...

    def step(self, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        """Take one step in every environment."""
        ...

    def with_num_envs(self, num_envs: int) -> "Env":
        """The same environment with a different `num_envs`."""
        ...


def check_num_envs(name: str, num_envs: int) -> None:
    """Raise EnvError if `num_envs` is less than 1."""
    if num_envs < 1:
        raise EnvError(
            f"`{name}` needs at least one environment, not num_envs={num_envs}.", fix="Pass num_envs=1 or more."
        )


def check_kind(space: gymnasium.Space, action: jax.Array, name: str) -> None:
    """Raise EnvError for float actions in a space of integers: rounding would hide the mistake, and nothing would be learned."""
    whole = isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete | gymnasium.spaces.MultiBinary)
    if whole and not (action.dtype == bool or jnp.issubdtype(action.dtype, jnp.integer)):
        raise EnvError(
            f"`{name}` was given actions of type {action.dtype}, but its actions are {space}.",
            fix="Give it whole numbers: an index (jnp.argmax, jax.random.categorical), or action.astype(jnp.int32).",
        )
