"""`check_env`: test whether an environment keeps the contract in `choreo.envs.base`.

from choreo.testing import check_env
check_env(MyEnv(num_envs=4))        # returns None, or raises an EnvError that says how the environment breaks the contract
"""

import contextlib
import functools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from choreo.envs.base import Env, TimeStep
from choreo.envs.gymnasium import HostEnv, seeds
from choreo.errors import EnvError
from choreo.host import spaces
from choreo.types import Key, PyTree

PARTS = ("name", "num_envs", "observation_space", "action_space", "keys", "reset", "step", "with_num_envs")


def check_env(env: Any, *, steps: int = 300, seed: int = 0) -> None:
    """Step `env` with random actions, and raise EnvError if a result breaks the contract.

    Use enough steps for some episodes to end, and at least 3 environments: the test of independence exchanges the keys and
    actions of all environments except the first. The steps are run several times.
    """
    check_parts(env)
    key_reset, key_action = jax.random.split(jax.random.key(seed))
    keys = env.keys(key_reset)
    _require(keys.shape == (env.num_envs,), env, f"`keys` gives {keys.shape}, not one key per environment.")
    actions = sample_actions(env.action_space, key_action, (steps, env.num_envs))
    obs, steps_taken = play(env, keys, actions)
    _check_obs(env, "reset", obs)
    check_types(env, steps_taken)
    check_episodes(env, steps_taken)
    check_determinism(env, keys, actions, steps_taken)
    check_independence(env, keys, actions, steps_taken)


def check_parts(env: Any) -> None:
    """Check that every part exists, that spaces are Gymnasium spaces, that `env` is hashable, and that `with_num_envs` works."""
    missing = [part for part in PARTS if not hasattr(env, part)]
    if missing:
        raise EnvError(
            f"`{type(env).__name__}` lacks {', '.join(f'`{part}`' for part in missing)}.",
            fix="See choreo.envs.base.Env for the meaning of each part.",
        )
    for part in ("observation_space", "action_space"):
        _require(isinstance(getattr(env, part), gymnasium.Space), env, f"`{part}` is not a Gymnasium space.")
    try:
        hash(env)
    except TypeError as error:
        raise EnvError(
            f"`{env.name}` cannot be hashed.", fix="Make it a frozen dataclass of hashable fields."
        ) from error
    other = env.with_num_envs(env.num_envs + 1)
    _require(other.num_envs == env.num_envs + 1, env, "`with_num_envs(n)` does not have n environments.")
    _require(env.with_num_envs(env.num_envs) == env, env, "`with_num_envs(num_envs)` is not equal to the environment.")


def sample_actions(space: gymnasium.Space, key: Key, shape: tuple[int, ...]) -> PyTree:
    """Random actions [*shape, ...] of an action space."""
    if isinstance(space, gymnasium.spaces.Dict):
        names = sorted(space)
        keys = jax.random.split(key, len(names))
        return {name: sample_actions(space[name], k, shape) for name, k in zip(names, keys, strict=True)}
    if isinstance(space, gymnasium.spaces.Tuple):
        keys = jax.random.split(key, len(space))
        return tuple(sample_actions(part, k, shape) for part, k in zip(space, keys, strict=True))
    if isinstance(space, gymnasium.spaces.Discrete):
        return space.start.item() + jax.random.randint(key, shape, 0, int(space.n), jnp.int32)
    unit = jax.random.uniform(key, (*shape, *(space.shape or ())))
    if isinstance(space, gymnasium.spaces.MultiDiscrete | gymnasium.spaces.MultiBinary):
        nvec = space.nvec if isinstance(space, gymnasium.spaces.MultiDiscrete) else np.full(space.shape, 2)
        start = space.start if isinstance(space, gymnasium.spaces.MultiDiscrete) else np.zeros(space.shape)
        return jnp.asarray(start + np.floor(np.asarray(unit) * nvec), jnp.int32)
    if isinstance(space, gymnasium.spaces.Box):
        low, high = (jnp.asarray(np.clip(x, -1e3, 1e3), jnp.result_type(float)) for x in (space.low, space.high))
        return jax.vmap(lambda u: low + u * (high - low))(unit.reshape(-1, *space.shape)).reshape(unit.shape)
    raise EnvError(f"check_env cannot sample actions of {space}.")


def play(env: Env, keys: Key, actions: PyTree) -> tuple[PyTree, TimeStep]:
    """Reset, then take all steps; returns the first observations, and a TimeStep [time, env, ...]."""
    if isinstance(env, HostEnv):
        return _play_on_host(env, keys, actions)
    state, obs = env.reset(keys)
    try:
        return obs, _play(env, state, actions)
    except TypeError as error:
        raise EnvError(
            f"`{env.name}` does not return the same type of state that it was given, so `lax.scan` cannot step it.",
            fix=str(error).split("\n\n")[0],
        ) from error


@functools.partial(jax.jit, static_argnums=0)
def _play(env: Env, state: PyTree, actions: PyTree) -> TimeStep:
    return jax.lax.scan(env.step, state, actions)[1]


def _play_on_host(env: HostEnv, keys: Key, actions: PyTree) -> tuple[PyTree, TimeStep]:
    """As `play`, but in Python and not under `jit`, so that exceptions of the environments are raised unchanged."""
    leaves, taken = [np.asarray(leaf) for leaf in jax.tree.leaves(actions)], []
    with contextlib.closing(env.batch_maker()(range(env.num_envs))) as batch:
        token, *first = batch.reset(np.asarray(seeds(keys)))
        for t in range(len(leaves[0])):
            token, *results = batch.step(token, *(leaf[t] for leaf in leaves))
            taken.append(env.timestep(results))
    return env.observation(first), jax.tree.map(lambda *x: np.stack(x), *taken)


def first_obs(env: Env, keys: Key) -> PyTree:
    """The first observations after a reset."""
    if not isinstance(env, HostEnv):
        return env.reset(keys)[1]
    with contextlib.closing(env.batch_maker()(range(env.num_envs))) as batch:
        return env.observation(batch.reset(np.asarray(seeds(keys)))[1:])


def check_types(env: Env, ts: TimeStep) -> None:
    """Check the shapes and types in a TimeStep, and that observations are within their space."""
    _require(isinstance(ts, tuple) and ts._fields == TimeStep._fields, env, "`step` does not return a TimeStep.")
    shape, floating = ts.last.shape, jnp.result_type(float)
    _check_obs(env, "step", ts.obs, time=True)
    _check_obs(env, "step", ts.next_obs, time=True)
    for name, dtype in (("reward", floating), ("discount", floating), ("last", np.dtype(bool))):
        leaf = getattr(ts, name)
        ok = leaf.shape == shape and leaf.dtype == dtype
        _require(ok, env, f"`{name}` is {leaf.dtype}{list(leaf.shape[1:])}, not {dtype}[{env.num_envs}].")
    for name, dtype in (("episode_return", floating), ("episode_length", np.dtype(np.int32))):
        _require(name in ts.info, env, f"`info` lacks `{name}`.")
        ok = ts.info[name].shape == shape and ts.info[name].dtype == dtype
        _require(ok, env, f"`info[{name!r}]` is {ts.info[name].dtype}, not {dtype}[{env.num_envs}].")


def check_episodes(env: Env, ts: TimeStep) -> None:
    """Check that `next_obs`, `discount`, `last` and the episode totals agree with each other."""
    ts = jax.tree.map(np.asarray, ts)
    pairs = zip(jax.tree.leaves(ts.obs), jax.tree.leaves(ts.next_obs), strict=True)
    same = np.all([(x == y).reshape(*ts.last.shape, -1).all(-1) for x, y in pairs], axis=0)
    _require(bool((same | ts.last).all()), env, "`next_obs` differs from `obs` in a step that is not `last`.")
    _require(bool(np.isin(ts.discount, (0, 1)).all()), env, "`discount` is neither 0 nor 1.")
    _require(bool(((ts.discount == 1) | ts.last).all()), env, "`discount` is 0 in a step that is not `last`.")
    total, length = np.zeros(env.num_envs, ts.reward.dtype), np.zeros(env.num_envs, np.int32)
    for t in range(len(ts.last)):
        # Some vector environments need an extra step between two episodes: an episode of length 0 (choreo.host.vector).
        paused = ts.last[t] & (ts.info["episode_length"][t] == 0) & (ts.last[t - 1] if t else False)
        total, length = total + ts.reward[t], length + ~paused
        ok = np.allclose(ts.info["episode_return"][t], total, rtol=1e-4, atol=1e-4)
        _require(ok, env, f"`episode_return` is not the sum of rewards of the episode (step {t}).")
        ok = (ts.info["episode_length"][t] == length).all()
        _require(bool(ok), env, f"`episode_length` does not count the steps of the episode (step {t}).")
        total, length = np.where(ts.last[t], 0, total), np.where(ts.last[t], 0, length)


def check_determinism(env: Env, keys: Key, actions: PyTree, ts: TimeStep) -> None:
    """Check that equal keys and actions give equal episodes, and that environments with different keys do not all begin alike."""
    _require(_equal(ts, play(env, keys, actions)[1]), env, "the same keys and actions give different results.")
    # It is very unlikely that 16 or 64 environments all begin equally by chance, even with only two possible first observations.
    many = env.with_num_envs(16 if isinstance(env, HostEnv) else 64)
    one, two = (first_obs(many, many.keys(jax.random.key(seed))) for seed in (1, 2))
    alike = all(len(np.unique(np.asarray(x).reshape(len(x), -1), axis=0)) == 1 for x in jax.tree.leaves(one))
    _require(not alike or _equal(one, two), env, "all environments begin alike although their keys differ.")


def check_independence(env: Env, keys: Key, actions: PyTree, ts: TimeStep) -> None:
    """Check that the steps of an environment depend neither on the other environments nor on the number of environments."""
    # Environment 0 keeps its key and its actions; the other environments exchange their keys and actions.
    order = np.r_[0, np.roll(np.arange(1, env.num_envs), 1)]
    _, rolled = play(env, keys[order], jax.tree.map(lambda x: x[:, order], actions))
    ok = _close(rolled, jax.tree.map(lambda x: x[:, order], ts))
    _require(ok, env, "an environment's steps depend on the other environments.")
    one = env.with_num_envs(1)
    _, alone = play(one, keys[:1], jax.tree.map(lambda x: x[:, :1], actions))
    ok = _close(alone, jax.tree.map(lambda x: x[:, :1], ts))
    _require(ok, env, "an environment's steps depend on the number of environments.")


def _check_obs(env: Env, part: str, obs: PyTree, *, time: bool = False) -> None:
    declared = spaces.leaves(env.observation_space, what=f"The observation of `{env.name}`")
    tree = jax.tree.structure(spaces.unflatten(env.observation_space, iter(range(len(declared)))))
    found = jax.tree.structure(obs)
    _require(found == tree, env, f"`{part}` gives observations of the form {found}, not {tree}.")
    for (path, space), leaf in zip(declared, jax.tree.leaves(obs), strict=True):
        _check_leaf(env, part, space, path, leaf.shape[1:] if time else leaf.shape, leaf)


def _check_leaf(
    env: Env, part: str, space: gymnasium.Space, path: str, shape: tuple[int, ...], leaf: np.ndarray | jax.Array
) -> None:
    expected, at = (env.num_envs, *(space.shape or ())), f" at {path}" if path else ""
    _require(shape == expected, env, f"`{part}` gives observations{at} {list(shape)}, not {list(expected)}.")
    # With jax_enable_x64, observations of a float32 space may be float64.
    wide = spaces.dtype_of(space, wide=jnp.result_type(float) == np.float64)
    ok = leaf.dtype in (space.dtype, wide)
    _require(ok, env, f"`{part}` gives observations{at} of type {leaf.dtype}, not {space.dtype}.")
    low, high = _bounds(space)
    tolerance = 1e-5 * (1 + np.abs(np.where(np.isfinite(high), high, 0))).astype(np.float64)
    inside = (np.asarray(leaf) >= low - tolerance) & (np.asarray(leaf) <= high + tolerance)
    _require(bool(inside.all()), env, f"`{part}` gives observations{at} outside {space}.")


def _bounds(space: Any) -> tuple[Any, Any]:
    if isinstance(space, gymnasium.spaces.Box):
        return space.low, space.high
    if isinstance(space, gymnasium.spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1


def _equal(a: PyTree, b: PyTree) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def _close(a: TimeStep, b: TimeStep, *, steps: int = 50) -> bool:
    """Whether the first `steps` steps are equal up to rounding, which depends on shapes. Later steps are not compared, because
    unstable dynamics amplify small differences."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(np.asarray(x[:steps]), np.asarray(y[:steps]), rtol=1e-3, atol=1e-3) for x, y in pairs)


def _require(ok: bool, env: Env, broken: str) -> None:
    if not ok:
        raise EnvError(f"`{env.name}` breaks its contract: {broken}", fix="See choreo.envs.base for the contract.")
