"""Tiny Gymnasium environments whose results are known in advance."""

import json

import gymnasium
import numpy as np
from gymnasium import spaces

from choreo.host.make_batch import MakeBatch
from choreo.host.probe import probe
from choreo.host.sources import Source
from choreo.host.states import decode, encode


def batch(factory, envs=range(2), *, info_keys=(), wide=False, **kwargs):
    """A batch of environments with the numbers `envs`.

    `factory` is a Gymnasium id, or a function that makes one environment or a vector environment.
    """
    source = Source.of_id(factory, kwargs) if isinstance(factory, str) else Source.of_factory(factory, kwargs)
    return MakeBatch(source=source, form=probe(source), info_keys=tuple(info_keys), wide=wide)(envs)


def seeds(*values):
    return np.array(values, np.uint32)


def assert_continues(factory, before, *, after=12, **options):
    """Load the state of a batch after `before` steps into a new batch. From then on, both must give the same results."""
    block, other = batch(factory, range(3), **options), batch(factory, range(3), **options)
    action = np.ones(3, np.int32)
    token, *_ = block.reset(seeds(4, 5, 6))
    for _ in range(before):
        token, *_ = block.step(token, action)
    tree, arrays = encode(block.state(), "the batch")
    other.load(decode(json.loads(json.dumps(tree)), arrays))
    token_of_other = token.copy()
    for _ in range(after):
        token, *results = block.step(token, action)
        token_of_other, *results_of_other = other.step(token_of_other, action)
        for one, two in zip([token, *results], [token_of_other, *results_of_other], strict=True):
            assert (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes())
    block.close()
    other.close()


def play(block, count, *action, seed=0):
    """Reset the batch and take `count` steps; return their results without tokens.

    `action` has one array per leaf of the action space. By default, every environment takes the action 1.
    """
    action = action or (np.ones(len(block.envs), np.int32),)
    token, *_ = block.reset(np.arange(seed, seed + len(block.envs), dtype=np.uint32))
    rows = []
    for _ in range(count):
        token, *results = block.step(token, *action)
        rows.append(results)
    return rows


class Count(gymnasium.Env):
    """The observation is the number of steps so far, and a digit drawn with the seed. The reward is the action."""

    observation_space = spaces.Box(-1000, 1000, (2,), np.float32)
    action_space = spaces.Discrete(5)

    def __init__(self, length=3, truncates=False):
        self.length, self.truncates, self.closed = length, truncates, False

    def observe(self):
        return np.array([self.time, self.start], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.start = 0, int(self.np_random.integers(10))
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        ended = self.time >= self.length
        info = {"time": self.time, "late": 1} if self.time > 1 else {"time": self.time}
        return self.observe(), action, ended and not self.truncates, ended and self.truncates, info

    def close(self):
        self.closed = True


class Faulty(Count):
    """A `Count` that makes the error `fault` in its second episode: in `reset`, or in step 2.

    Only an environment that was first reset with `seed` is faulty. If `seed` is None, every environment is faulty.
    """

    def __init__(self, fault="nothing", seed=None):
        super().__init__(length=3)
        self.fault, self.seed, self.is_faulty, self.episode = fault, seed, False, 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.is_faulty, self.episode = self.seed in (None, seed), 0
        self.episode += 1
        if self.fault == "raise in reset" and self.is_faulty and self.episode == 2:
            raise ZeroDivisionError("no more episodes")
        return super().reset(seed=seed)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if not (self.is_faulty and self.episode == 2 and self.time == 2):
            return obs, reward, terminated, truncated, info
        if self.fault == "raise":
            raise ValueError("the motor is on fire")
        return {
            "nothing": (obs, reward, terminated, truncated, info),
            "shape": (obs[:1], reward, terminated, truncated, info),
            "dtype": (obs.astype(np.float64), reward, terminated, truncated, info),
            "list": (obs.tolist(), reward, terminated, truncated, info),
            "nan": (obs * np.float32(np.nan), reward, terminated, truncated, info),
            "nan reward": (obs, np.nan, terminated, truncated, info),
            "array reward": (obs, np.ones(1), terminated, truncated, info),
            "no reward": (obs, None, terminated, truncated, info),
            "four": (obs, reward, terminated, info),
            "none": None,
            "raise in reset": (obs, reward, terminated, truncated, info),
        }[self.fault]


class Nested(gymnasium.Env):
    """Observations and actions are trees; the reward is the sum of the action."""

    observation_space = spaces.Dict(
        {
            "z": spaces.Box(-1, 1, (2, 2), np.float64),
            "a": spaces.Tuple([spaces.Discrete(7, start=-3), spaces.MultiBinary(3)]),
            "m": spaces.MultiDiscrete([3, 4]),
            "image": spaces.Box(0, 255, (4, 4, 1), np.uint8),
        }
    )
    action_space = spaces.Dict({"push": spaces.Box(-1, 1, (2,), np.float32), "jump": spaces.Discrete(3, start=1)})

    def observe(self):
        return {
            "image": np.full((4, 4, 1), self.time, np.uint8),
            "a": (self.time - 3, np.array([1, 0, 1], np.int8)),
            "z": np.full((2, 2), 0.25),
            "m": np.array([1, 3]),
        }

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        assert set(action) == {"push", "jump"} and action["push"].dtype == np.float32
        return self.observe(), float(action["push"].sum() + action["jump"]), self.time == 4, False, {}


class Masked(Count):
    """A `Count` whose `info` holds a mask of the possible actions."""

    def mask(self):
        return np.arange(5) <= self.time

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed)
        return obs, {"action_mask": self.mask()}

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, info | {"action_mask": self.mask()}


class Wander(gymnasium.Env):
    """A random walk with episodes of random lengths. The observation is the position.

    The state of the walk, with its random generator, can be stored. This state contains many kinds of plain data.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.random = np.random.Generator(np.random.PCG64(seed))
        self.position, self.path = np.zeros(2, np.float32), []
        return self.position.copy(), {}

    def step(self, action):
        self.position += self.random.normal(size=2).astype(np.float32) * (1 + action)
        self.path.append(float(self.position[0]))
        ended = bool(self.random.random() < 0.1)
        info = {} if len(self.path) % 3 else {"steps": len(self.path)}  # only every third step has this number
        return self.position.copy(), float(self.position.sum()), ended, False, info

    def state(self):
        return {"random": self.random.bit_generator.state, "position": self.position, "path": self.path, "note": None}

    def load(self, state):
        self.random.bit_generator.state = state["random"]
        self.position, self.path = state["position"], state["path"]


class WanderTogether(gymnasium.vector.SyncVectorEnv):
    """Several `Wander`s as one vector environment."""

    def __init__(self, num_envs=1, mode="NextStep"):
        super().__init__([Wander] * num_envs, autoreset_mode=gymnasium.vector.AutoresetMode(mode))

    def state(self):
        return [env.unwrapped.state() for env in self.envs]

    def load(self, states):
        for env, state in zip(self.envs, states, strict=True):
            env.unwrapped.load(state)
