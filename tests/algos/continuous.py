"""Tasks with continuous actions whose values are known by thought, and what the tests of DDPG, TD3 and SAC share."""

import functools
from dataclasses import dataclass

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from algos.one_gradient import iterate_often, learn
from algos.one_step import OneStep
from algos.toys import batch, box, number, one_of
from choreo.algos import replayed_control
from choreo.algos.replayed_control import Network
from choreo.buffers import StoredStep
from choreo.buffers.sharded import Batches
from choreo.envs import EnvStep
from choreo.networks import Bounds, bounds_of
from choreo.roles import SHARD_AXIS

GAMMA = 0.8
WIDE = gymnasium.spaces.Box(-1.0, 3.0, (1,), np.float32)


def within_one(action):
    """From WIDE to [-1, 1]."""
    return (action - 1) / 2


@dataclass(frozen=True)
class Shoot:
    """One step: aim at 1 more than what you see. The value of an action is how far off it is, squared, below 0."""

    name: str = "toy:Shoot"
    time_limit: int | None = None
    observation_space = property(lambda self: box(1))
    action_space = property(lambda self: WIDE)

    def reset(self, key):
        target = jax.random.uniform(key, (1,), minval=-1.0, maxval=1.0)
        return target, target

    def step(self, target, action, key):
        return target, EnvStep(target, -((action[0] - self.best(target)) ** 2), jnp.ones((), bool))

    @staticmethod
    def best(obs):
        return 1 + obs[0]


@dataclass(frozen=True)
class Walk:
    """Two steps: go somewhere, and then say where you are; 0.5 is the place to be. Actions are taken `within_one`.

    The second action is worth 1 - (action - place)^2 - (place - 0.5)^2, the first one GAMMA * (1 - (action - 0.5)^2).
    """

    name: str = "toy:Walk"
    time_limit: int | None = None
    observation_space = property(lambda self: box(2))
    action_space = property(lambda self: WIDE)

    def reset(self, key):
        return jnp.zeros(2, jnp.result_type(float)), jnp.zeros(2, jnp.result_type(float))

    def step(self, state, action, key):
        moved, place = state
        action = within_one(action[0]).astype(place.dtype)
        paid = 1 - (action - place) ** 2 - (place - 0.5) ** 2
        after = jnp.stack([jnp.ones_like(place), action])
        return after, EnvStep(after, jnp.where(moved > 0, paid, 0.0), moved > 0)


@dataclass(frozen=True)
class Rest:
    """Each step pays 1 - action^2, `within_one`; no end but the time limit. The best value is 1 / (1 - GAMMA) = 5."""

    name: str = "toy:Rest"
    time_limit: int | None = 4
    observation_space = property(lambda self: box(1))
    action_space = property(lambda self: WIDE)

    def reset(self, key):
        return jnp.int32(0), jnp.ones(1, jnp.result_type(float))

    def step(self, state, action, key):
        return state, EnvStep(
            jnp.ones(1, jnp.result_type(float)), 1 - number(within_one(action[0])) ** 2, jnp.zeros((), bool)
        )


@dataclass(frozen=True)
class Parts:
    """Observations in parts, actions in a matrix, each element with bounds of its own: one step."""

    observation_space = property(
        lambda self: spaces.Dict(sign=spaces.Discrete(2), level=spaces.Box(0, 255, (2,), np.uint8))
    )
    action_space = property(
        lambda self: spaces.Box(np.array([[0], [-2]], np.float32), np.array([[1], [6]], np.float32))
    )

    def see(self, key):
        return {"sign": jax.random.randint(key, (), 0, 2), "level": jnp.array([0, 255], jnp.uint8)}

    def pay(self, obs, action):
        return -jnp.sum((action - jnp.stack([jnp.ones(1), 2 * number(obs["sign"])[None]])) ** 2)


def shoot(num_envs: int = 8):
    return batch(Shoot(), num_envs)


def parts(num_envs: int = 8):
    return OneStep(Parts(), num_envs)


def values(network, obs, action) -> np.ndarray:
    """What the critics say, the smallest of them: obs [n, ...], action [n]."""
    smallest = jax.vmap(lambda obs, action: jnp.min(replayed_control.values(network.critics, obs, action[None])))
    return np.asarray(smallest(jnp.asarray(obs), jnp.asarray(action)))


def actions(algo, train, obs) -> np.ndarray:
    """The greedy ones: [n]."""
    params = algo.policy(train)
    act = functools.partial(algo.act, greedy=True)
    return np.asarray(jax.vmap(lambda o: act(params, o, jax.random.key(0))[0])(jnp.asarray(obs)))[:, 0]


TASKS = {"shoot": Shoot(), "walk": Walk(), "rest": Rest()}


def learn_task(algo, task, iterations):
    """In 8 environments; compiled once for all tasks."""
    return _learn_task(algo, iterations, jnp.int32(list(TASKS).index(task)))[0].train


@functools.partial(jax.jit, static_argnums=(0, 1))
def _learn_task(algo, iterations, which):
    return iterate_often(algo, one_of(TASKS, which, 8), iterations, 0)


def check_one_step(algo, iterations):
    """Shoot: the action, its value, and that of actions beside it."""
    train = learn_task(algo, "shoot", iterations)
    seen = np.linspace(-0.9, 0.9, 7, dtype=np.float32)
    obs, best = np.stack([seen, np.zeros(7, np.float32)], axis=1), 1 + seen
    np.testing.assert_allclose(actions(algo, train, obs), best, atol=0.15)
    for beside in (0.0, 0.4, -0.4):
        found = values(train.learned, obs, best + np.float32(beside))
        np.testing.assert_allclose(found, -(beside**2), atol=0.1)


def check_two_steps(algo, iterations):
    """Walk: what the second step pays reaches the first, discounted."""
    train = learn_task(algo, "walk", iterations)
    start, there = np.zeros((1, 2), np.float32), np.array([[1.0, 0.5]], np.float32)
    network, best = train.learned, np.full(1, 2.0, np.float32)
    found = within_one(actions(algo, train, np.concatenate([start, there])))
    np.testing.assert_allclose(found, 0.5, atol=0.15)
    np.testing.assert_allclose(values(network, there, best), 1.0, atol=0.1)
    np.testing.assert_allclose(values(network, start, best), GAMMA, atol=0.1)
    np.testing.assert_allclose(values(network, start, best - np.float32(1.2)), GAMMA * (1 - 0.36), atol=0.1)


def check_discounting(algo, iterations):
    """Rest: a time limit is no end, values go on behind it."""
    train = learn_task(algo, "rest", iterations)
    obs = np.array([[1.0, 0.0]], np.float32)
    np.testing.assert_allclose(within_one(actions(algo, train, obs)), 0.0, atol=0.15)
    found = values(train.learned, obs, np.full(1, 1.0, np.float32))
    np.testing.assert_allclose(found, 1 / (1 - GAMMA), atol=0.1)


def check_beginning(algo):
    """Shoot: before the first update actions are uniform, and nothing is learned; greedy ones are the policy's."""
    env, iterate = shoot(16), jax.jit(algo.iterate, static_argnums=0)
    first = carry = jax.jit(algo.init, static_argnums=0)(env, jax.random.key(0))
    num = -(-algo.min_size // (16 * algo.unroll))
    for i in range(num):
        carry, metrics = iterate(env, carry, jax.random.key(i))
        assert metrics["learned"] == 0
    assert carry.train.iterations == num
    before = first.train._replace(iterations=jnp.int32(num))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(carry.train), strict=True):
        np.testing.assert_array_equal(old, new)
    taken = np.asarray(carry.replay.steps.action)[:, : num * algo.unroll].ravel()
    assert taken.min() < -0.8 and taken.max() > 2.8 and (-1 <= taken).all() and (taken <= 3).all()
    np.testing.assert_allclose([taken.mean(), taken.std()], [1.0, 4 / 12**0.5], atol=0.2)
    assert abs(actions(algo, carry.train, np.zeros((1, 1), np.float32))[0] - 1) < 0.1  # the middle of the space
    carry, metrics = iterate(env, carry, jax.random.key(num))
    assert metrics["learned"] == 1 and int(carry.train.updates) == algo.updates_per_step * algo.unroll * 16


def check_first_actions(algo):
    """Before the first update, acting alone: uniform, or the middle of the space if greedy."""
    train = jax.jit(algo.init, static_argnums=0)(shoot(), jax.random.key(0)).train
    obs, keys = jnp.zeros(1), jax.random.split(jax.random.key(1), 500)
    taken = np.asarray(jax.jit(jax.vmap(lambda key: algo.act(algo.policy(train), obs, key)[0]))(keys))
    assert taken.min() < -0.8 and taken.max() > 2.8 and (-1 <= taken).all() and (taken <= 3).all()
    np.testing.assert_allclose([taken.mean(), taken.std()], [1.0, 4 / 12**0.5], atol=0.2)
    assert abs(actions(algo, train, np.zeros((1, 1), np.float32))[0] - 1) < 0.1


def check_precision(algo, x64):
    with jax.enable_x64(x64):
        carry, metrics = jax.eval_shape(functools.partial(learn, algo, shoot(), 2), 0)
        out = carry.train, carry.replay.steps, metrics["critic_loss"], metrics["q"]
        leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert {x.dtype.name for x in leaves} == {"float64" if x64 else "float32"}


class Line(eqx.Module):
    """A critic: slope * action + obs."""

    slope: jax.Array

    def __call__(self, obs, action):
        return self.slope * action[0] + obs[0]


class Always(eqx.Module):
    """A policy: always the same action."""

    action: jax.Array
    bounds: Bounds

    def __call__(self, obs):
        return self.action


def lines(*slopes: float) -> tuple[Line, ...]:
    return tuple(Line(jnp.float32(slope)) for slope in slopes)


def by_hand(action: float, slopes: list[float]) -> Network:
    """A network whose numbers one can compute with by hand."""
    return Network(Always(jnp.array([action]), bounds_of(box(1))), lines(*slopes))


def window(*, discount: float = 1.0, last: bool = False) -> StoredStep:
    """Two steps: from 0.1, -0.5 led to 0.2, and paid 1."""
    return StoredStep(
        obs=jnp.array([[0.1], [0.2]]),
        action=jnp.array([[-0.5], [0.0]]),
        reward=jnp.array([1.0, 9.0]),
        discount=jnp.array([discount, 1.0]),
        last=jnp.array([last, False]),
    )


def some_batches(*, updates: int, items: int) -> Batches:
    """Windows of random numbers in the spaces of Shoot: [update, item, step, ...]."""
    keys = iter(jax.random.split(jax.random.key(5), 4))
    uniform = lambda *shape: jax.random.uniform(next(keys), (updates, items, 2, *shape), minval=-1.0)  # noqa: E731
    ones = jnp.ones((updates, items, 2))
    steps = StoredStep(uniform(1), 1 + uniform(1), uniform(), ones, jnp.zeros((updates, items, 2), bool))
    return Batches(steps, ones[..., 0], jnp.bool(True))


def on_two_shards(algo):
    """`learn` on halves of some batches, on two shards: everything twice."""
    train, whole = _to_learn_from(algo)
    updates, items = whole.probability.shape
    halves = whole._replace(
        steps=jax.tree.map(lambda x: jnp.moveaxis(x.reshape(updates, 2, items // 2, *x.shape[2:]), 1, 0), whole.steps),
        probability=whole.probability.reshape(2, updates, items // 2),
    )
    axes = whole._replace(steps=0, probability=0, ready=None)
    keys = jax.random.split(jax.random.key(1), 2)
    return jax.jit(jax.vmap(algo.learn, (None, axes, 0), axis_name=SHARD_AXIS))(train, halves, keys)[0]


def on_one_shard(algo):
    """`learn` on the same batches, whole."""
    return jax.jit(algo.learn)(*_to_learn_from(algo), jax.random.key(1))[0]


def _to_learn_from(algo):
    train = jax.jit(algo.init, static_argnums=0)(shoot(), jax.random.key(0)).train
    return train, some_batches(updates=2, items=8)
