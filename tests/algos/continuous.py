"""Tasks with continuous actions whose values can be computed by hand, and shared code for the tests of DDPG, TD3 and SAC."""

import functools
from dataclasses import dataclass

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from algos.one_gradient import iterate_often
from algos.one_step import OneStep
from algos.toys import as_float, batch, box, one_of
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
    """Map an action linearly from WIDE to [-1, 1]."""
    return (action - 1) / 2


@dataclass(frozen=True)
class Shoot:
    """Episodes of one step. The best action is the observation plus 1; the reward is -(action - best action)^2."""

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
    """Episodes of two steps. The first action chooses a place; the best place is 0.5. The best second action equals the place.

    In these formulas, `within_one` has mapped all actions to [-1, 1], and the place is the first action. The value of a second
    action is 1 - (action - place)^2 - (place - 0.5)^2. If the best second action follows, the value of a first action is
    GAMMA * (1 - (action - 0.5)^2).
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
    """The reward is 1 - `within_one(action)`^2. Only the time limit ends an episode. The best value is 1 / (1 - GAMMA) = 5."""

    name: str = "toy:Rest"
    time_limit: int | None = 4
    observation_space = property(lambda self: box(1))
    action_space = property(lambda self: WIDE)

    def reset(self, key):
        return jnp.int32(0), jnp.ones(1, jnp.result_type(float))

    def step(self, state, action, key):
        return state, EnvStep(
            jnp.ones(1, jnp.result_type(float)), 1 - as_float(within_one(action[0])) ** 2, jnp.zeros((), bool)
        )


@dataclass(frozen=True)
class Parts:
    """Episodes of one step. Observations are dicts. Actions are matrices, and each element has different bounds."""

    observation_space = property(
        lambda self: spaces.Dict(sign=spaces.Discrete(2), level=spaces.Box(0, 255, (2,), np.uint8))
    )
    action_space = property(
        lambda self: spaces.Box(np.array([[0], [-2]], np.float32), np.array([[1], [6]], np.float32))
    )

    def see(self, key):
        return {"sign": jax.random.randint(key, (), 0, 2), "level": jnp.array([0, 255], jnp.uint8)}

    def pay(self, obs, action):
        return -jnp.sum((action - jnp.stack([jnp.ones(1), 2 * as_float(obs["sign"])[None]])) ** 2)


def toy(algo, **options):
    """An algorithm of class `algo` that learns these tasks within 1,200 iterations."""
    return algo(
        learning_rate=3e-3, updates_per_step=1 / 8, tau=0.05, gamma=GAMMA, batch_size=64, min_size=256, capacity=20_000, **options
    )  # fmt: skip


def shoot(num_envs: int = 8):
    return batch(Shoot(), num_envs)


def parts(num_envs: int = 8):
    return OneStep(Parts(), num_envs)


def values(network, obs, action) -> np.ndarray:
    """The smallest of the critics' values, for n observations with one action each. `obs`: [n, ...]; `action` and result: [n]."""
    smallest = jax.vmap(lambda obs, action: jnp.min(replayed_control.values(network.critics, obs, action[None])))
    return np.asarray(smallest(jnp.asarray(obs), jnp.asarray(action)))


def actions(algo, train, obs) -> np.ndarray:
    """The greedy actions for n observations: [n]."""
    params = algo.policy(train)
    act = functools.partial(algo.act, greedy=True)
    return np.asarray(jax.vmap(lambda o: act(params, o, jax.random.key(0))[0])(jnp.asarray(obs)))[:, 0]


TASKS = {"shoot": Shoot(), "walk": Walk(), "rest": Rest()}


def learn_task(algo, task, iterations):
    """The train state after learning in 8 environments. One compiled program serves all tasks."""
    return _learn_task(algo, iterations, jnp.int32(list(TASKS).index(task)))[0].train


@functools.partial(jax.jit, static_argnums=(0, 1))
def _learn_task(algo, iterations, which):
    return iterate_often(algo, one_of(TASKS, which, 8), iterations, 0)


class Line(eqx.Module):
    """A critic whose value is slope * action + obs."""

    slope: jax.Array

    def __call__(self, obs, action):
        return self.slope * action[0] + obs[0]


class Always(eqx.Module):
    """A policy that always takes the same action."""

    action: jax.Array
    bounds: Bounds

    def __call__(self, obs):
        return self.action


def lines(*slopes: float) -> tuple[Line, ...]:
    return tuple(Line(jnp.float32(slope)) for slope in slopes)


def by_hand(action: float, slopes: list[float]) -> Network:
    """A network whose losses can be computed by hand. Its policy always takes `action`, and it has a critic for each slope."""
    return Network(Always(jnp.array([action]), bounds_of(box(1))), lines(*slopes))


def window(*, discount: float = 1.0, last: bool = False) -> StoredStep:
    """An item of two steps: action -0.5 led from observation 0.1 to 0.2, with reward 1."""
    return StoredStep(
        obs=jnp.array([[0.1], [0.2]]),
        action=jnp.array([[-0.5], [0.0]]),
        reward=jnp.array([1.0, 9.0]),
        discount=jnp.array([discount, 1.0]),
        last=jnp.array([last, False]),
    )


def some_batches(*, updates: int, items: int) -> Batches:
    """Items of random numbers in the spaces of Shoot. Arrays are [update, item, step, ...]."""
    keys = iter(jax.random.split(jax.random.key(5), 4))
    uniform = lambda *shape: jax.random.uniform(next(keys), (updates, items, 2, *shape), minval=-1.0)  # noqa: E731
    ones = jnp.ones((updates, items, 2))
    steps = StoredStep(uniform(1), 1 + uniform(1), uniform(), ones, jnp.zeros((updates, items, 2), bool))
    return Batches(steps, ones[..., 0], jnp.bool(True))


def on_two_shards(algo):
    """The train states after `learn` on two shards, each with half of every batch. Every array has a leading axis of 2."""
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
    """The train state after `learn` on one shard, with the same batches undivided."""
    return jax.jit(algo.learn)(*_to_learn_from(algo), jax.random.key(1))[0]


def _to_learn_from(algo):
    train = jax.jit(algo.init, static_argnums=0)(shoot(), jax.random.key(0)).train
    return train, some_batches(updates=2, items=8)
