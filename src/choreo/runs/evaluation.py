"""Evaluate parameters: play complete episodes from fresh resets, exactly as many as asked for.

The number of episodes that each environment plays is fixed beforehand. Otherwise short episodes would be counted too often,
because they end first.

    200 episodes on 128 environments:   environments 0..71 play two, environments 72..127 play one
"""

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from choreo import static_key
from choreo.envs.gymnasium import HostEnv, seeds
from choreo.errors import AlgorithmError, RunError
from choreo.types import Key, PyTree

MAX_ENVS = 128
"""The largest number of environments that play in parallel. With more episodes, an environment plays several of them."""
MAX_HOST_ENVS = 16
"""The largest number of Python environments that play in parallel. Each can take a second to make, and a gigabyte of memory."""
STEPS_PER_CALL = 1024
"""Steps per compiled call. Ctrl-C takes effect between two calls."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Returns and lengths of the episodes; float(evaluation) is the mean return."""

    returns: np.ndarray
    """Undiscounted return of each episode."""
    lengths: np.ndarray
    """Steps of each episode."""

    @property
    def mean(self) -> float:
        return float(self.returns.mean(dtype=np.float64))

    @property
    def std(self) -> float:
        return float(self.returns.std(dtype=np.float64))

    def __float__(self) -> float:
        return self.mean

    def __str__(self) -> str:
        length = float(self.lengths.mean(dtype=np.float64))
        return f"return {self.mean:.1f} ± {self.std:.1f} over {len(self.returns)} episodes of {length:.0f} steps"


def evaluate(
    algo: Any,
    env: Any,
    params: PyTree,
    *,
    key: Key,
    episodes: int = 100,
    greedy: bool = True,
    max_episode_steps: int = 100_000,
) -> Evaluation:
    """Play `episodes` complete episodes from fresh resets.

    The number of environments in `env` does not matter. Raises RunError if episodes are longer than `max_episode_steps` on
    average. Without this limit, an environment whose episodes never end would block this function for ever.
    """
    if episodes < 1:
        raise RunError(f"evaluate(episodes={episodes}) needs at least one episode.", fix="Give --episodes 100.")
    check_act(algo)
    on_host = isinstance(env, HostEnv)
    num_envs = min(episodes, MAX_HOST_ENVS if on_host else MAX_ENVS)
    env = env.with_num_envs(num_envs)
    quota = episodes // num_envs + (np.arange(num_envs) < episodes % num_envs)
    most = int(quota.max())
    if on_host:
        return _play_on_host(algo, env, params, key, quota, greedy, most * max_episode_steps)

    game = _reset(algo, env, params, key, most)
    for _ in range(-(-most * max_episode_steps // STEPS_PER_CALL)):
        game = _advance(algo, env, params, game, jnp.asarray(quota, jnp.int32), greedy)
        if (np.asarray(game.ended) >= quota).all():
            played = np.arange(most) < quota[:, None]
            return Evaluation(returns=np.asarray(game.returns)[played], lengths=np.asarray(game.lengths)[played])
    raise _too_long(env, max_episode_steps)


def _too_long(env: Any, max_episode_steps: int) -> RunError:
    return RunError(
        f"Evaluation of {env.name} gave up: episodes are longer than {max_episode_steps:,} steps.",
        fix="Give the environment a time limit, or evaluate with a larger max_episode_steps.",
    )


def check_act(algo: Any) -> None:
    """Refuse an algorithm that cannot be evaluated. Called before training: an error after training would lose the result."""
    if "greedy" not in inspect.signature(type(algo).act).parameters:
        raise AlgorithmError(
            f"`{type(algo).__name__}.act` takes no `greedy`, so it cannot be evaluated.",
            fix="Write it as `act(self, params, obs, key, *, greedy=False)`; greedy=True asks for its best action.",
        )


def initial_state(algo: Any, params: PyTree) -> PyTree:
    """The recurrent state of one environment at the start of an episode; None for algorithms without one."""
    first = getattr(algo, "initial_state", None)  # optional
    return None if first is None else first(params)


def act(algo: Any, params: PyTree, obs: PyTree, key: Key, state: PyTree, *, greedy: bool) -> tuple[PyTree, PyTree]:
    """The action for one environment, and the recurrent state after this action."""
    if state is None:
        action, _ = algo.act(params, obs, key, greedy=greedy)
        return action, None
    action, _, state = algo.act(params, obs, key, state, greedy=greedy)
    return action, state


class Game(NamedTuple):
    """The state of an evaluation: all environments, each in the middle of an episode."""

    env_state: PyTree
    obs: PyTree
    state: PyTree
    """Recurrent state of the algorithm in each environment."""
    key: Key
    ended: jax.Array
    """Number of episodes that have ended, per environment."""
    returns: jax.Array
    """Returns of the ended episodes: a row for each environment, a column for each of its episodes."""
    lengths: jax.Array
    """Lengths of the ended episodes, in the same order as `returns`."""


@static_key.jit
def _reset(algo: Any, env: Any, params: PyTree, key: Key, most: int) -> Game:
    key, key_env = jax.random.split(key)
    env_state, obs = env.reset(env.keys(key_env))
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (env.num_envs, *x.shape)), initial_state(algo, params))
    returns = jnp.zeros((env.num_envs, most), jnp.float32)
    ended = jnp.zeros(env.num_envs, jnp.int32)
    return Game(env_state, obs, state, key, ended, returns, returns.astype(jnp.int32))


@static_key.jit
def _advance(algo: Any, env: Any, params: PyTree, game: Game, quota: jax.Array, greedy: bool) -> Game:
    first = initial_state(algo, params)

    def unfinished(loop: tuple[jax.Array, Game]) -> jax.Array:
        return (loop[0] < STEPS_PER_CALL) & jnp.any(loop[1].ended < quota)

    def step(loop: tuple[jax.Array, Game]) -> tuple[jax.Array, Game]:
        time, game = loop
        key, key_act = jax.random.split(game.key)
        action, state = jax.vmap(lambda obs, key, state: act(algo, params, obs, key, state, greedy=greedy))(
            game.obs, env.keys(key_act), game.state
        )
        env_state, ts = env.step(game.env_state, action)
        # An environment that has filled its row of `returns` keeps playing until all environments have finished. Its later episodes
        # match no column, so they are not stored.
        ends = ts.last[:, None] & (jnp.arange(game.returns.shape[1])[None] == game.ended[:, None])
        returns = jnp.where(ends, ts.info["episode_return"].astype(jnp.float32)[:, None], game.returns)
        lengths = jnp.where(ends, ts.info["episode_length"].astype(jnp.int32)[:, None], game.lengths)
        state = jax.tree.map(lambda x, x0: jnp.where(_like(ts.last, x), x0[None], x), state, first)
        ended = game.ended + ts.last.astype(jnp.int32)
        return time + 1, Game(env_state, ts.obs, state, key, ended, returns, lengths)

    return jax.lax.while_loop(unfinished, step, (jnp.int32(0), game))[1]


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (x.ndim - 1))


def _play_on_host(
    algo: Any, env: HostEnv, params: PyTree, key: Key, quota: np.ndarray, greedy: bool, max_steps: int
) -> Evaluation:
    """Evaluate with new Python environments. This function steps them in a Python loop; only acting is compiled."""
    players = _players(algo, env, params, key)
    returns, lengths = np.zeros((2, env.num_envs, quota.max()))
    ended = np.zeros(env.num_envs, np.int64)
    batch = env.batch_maker()(range(env.num_envs))
    try:
        token, *obs = batch.reset(np.asarray(players.seeds))
        last = np.zeros(env.num_envs, np.bool_)
        for _ in range(max_steps):
            action, players = _act_all(algo, env, params, players, env.observation(obs), last, greedy)
            token, *results = batch.step(token, *(np.asarray(leaf) for leaf in jax.tree.leaves(action)))
            ts = env.timestep(results)
            obs, last = jax.tree.leaves(ts.obs), np.asarray(ts.last)
            # An episode of length 0 is the pause between two episodes (choreo.host.vector).
            (ends,) = np.nonzero(last & (ts.info["episode_length"] > 0) & (ended < quota))
            returns[ends, ended[ends]] = ts.info["episode_return"][ends]
            lengths[ends, ended[ends]] = ts.info["episode_length"][ends]
            ended[ends] += 1
            if (ended >= quota).all():
                played = np.arange(quota.max()) < quota[:, None]
                return Evaluation(returns=returns[played].astype(np.float32), lengths=lengths[played].astype(np.int32))
    finally:
        batch.close()
    raise _too_long(env, max_steps // int(quota.max()))


class Players(NamedTuple):
    """The state that JAX computes during an evaluation in Python environments."""

    state: PyTree
    """Recurrent state of the algorithm in each environment."""
    key: Key
    seeds: jax.Array
    """Seeds that the environments are reset with."""


@static_key.jit
def _players(algo: Any, env: HostEnv, params: PyTree, key: Key) -> Players:
    key, key_env = jax.random.split(key)
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (env.num_envs, *x.shape)), initial_state(algo, params))
    return Players(state, key, seeds(env.keys(key_env)))


@static_key.jit
def _act_all(
    algo: Any, env: HostEnv, params: PyTree, players: Players, obs: PyTree, last: np.ndarray | jax.Array, greedy: bool
) -> tuple[PyTree, Players]:
    """An action for every environment; the recurrent state is reset where the last step ended an episode."""
    key, key_act = jax.random.split(players.key)
    state = jax.tree.map(
        lambda x, x0: jnp.where(_like(jnp.asarray(last), x), x0[None], x), players.state, initial_state(algo, params)
    )
    action, state = jax.vmap(lambda obs, key, state: act(algo, params, obs, key, state, greedy=greedy))(
        obs, env.keys(key_act), state
    )
    return action, Players(state, key, players.seeds)
