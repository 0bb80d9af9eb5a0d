"""`check_algorithm` accepts correct algorithms, and names what is wrong with each broken algorithm."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo import loops
from choreo.envs import EnvStep, VmapEnv
from choreo.errors import AlgorithmError
from choreo.testing import check_algorithm
from choreo.testing.algorithms import require_parts
from offline import Imitation


@dataclass(frozen=True)
class Nothing:
    """An environment that compiles quickly; the reward is the action."""

    name: str = "toy:Nothing"
    time_limit: int | None = 2
    observation_space = property(lambda self: gymnasium.spaces.Box(-1, 1, (1,), np.float32))
    action_space = property(lambda self: gymnasium.spaces.Discrete(2))

    def reset(self, key):
        return jnp.zeros(()), jnp.zeros(1)

    def step(self, state, action, key):
        return state, EnvStep(jnp.zeros(1), action.astype(jnp.float32), jnp.zeros((), bool))


ENV = VmapEnv(env=Nothing(), num_envs=2)


class Carry(NamedTuple):
    train: dict
    env_state: object
    obs: jax.Array


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """The smallest algorithm that passes: it adds up rewards and learns nothing."""

    unroll: int = 2

    def init(self, env, key):
        env_state, obs = env.reset(env.keys(key))
        return Carry({"total": jnp.zeros(())}, env_state, obs)

    def policy(self, train):
        return train

    @choreo.fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        coin = jax.random.bernoulli(key).astype(jnp.int32)
        return (jnp.int32(1) if greedy else coin), ()

    @choreo.fragment("learner")
    def learn(self, train, reward):
        return {"total": train["total"] + jnp.sum(reward)}

    def iterate(self, env, carry, key):
        start = loops.Position(carry.env_state, carry.obs)
        end, trajectory, metrics = loops.rollout(env, self.act, carry.train, start, key, self.unroll)
        return Carry(self.learn(carry.train, trajectory.reward), end.env_state, end.obs), metrics


class NoMarks(Tiny):
    def act(self, params, obs, key, *, greedy=False):
        return jnp.int32(1), ()

    def learn(self, train, reward):
        return train


class NoTrain(Tiny):
    def init(self, env, key):
        return super().init(env, key)._asdict()


class PythonInCarry(Tiny):
    """An algorithm whose carry has a function and a number that stay the same, and a number that changes."""

    def init(self, env, key):
        return super().init(env, key)._replace(train={"total": 0.0, "activation": jnp.tanh, "scale": 2})

    def policy(self, train):
        return train["scale"]

    @choreo.fragment("learner")
    def learn(self, train, reward):
        total = train["total"] + train["activation"](jnp.sum(reward) * train["scale"])
        return train | {"total": total}


class FunctionThatChanges(Tiny):
    def init(self, env, key):
        return super().init(env, key)._replace(train={"total": jnp.zeros(()), "activation": jnp.tanh})

    @choreo.fragment("learner")
    def learn(self, train, reward):
        return train | {"activation": jnp.sin}


class FloatAction(Tiny):
    @choreo.fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        return jnp.float32(1), ()


class ComplexMetric(Tiny):
    def iterate(self, env, carry, key):
        carry, metrics = super().iterate(env, carry, key)
        return carry, {**metrics, "phase": jnp.complex64(1j)}


class ReservedMetric(Tiny):
    def iterate(self, env, carry, key):
        carry, metrics = super().iterate(env, carry, key)
        return carry, {**metrics, "seconds": jnp.zeros(())}


class OtherType(Tiny):
    def learn(self, train, reward):
        return {"total": train["total"].astype(jnp.int32)}


class OtherStructure(Tiny):
    def learn(self, train, reward):
        return {**train, "more": train["total"]}


class NotFinite(Tiny):
    def learn(self, train, reward):
        return {"total": train["total"] / 0}


class HalfMetrics(Tiny):
    def iterate(self, env, carry, key):
        return super().iterate(env, carry, key)[0], {"episodes": jnp.zeros(())}


class NegativeSteps(Tiny):
    def steps_per_iteration(self, env):
        return -env.num_envs


class VectorMetric(Tiny):
    def iterate(self, env, carry, key):
        carry, metrics = super().iterate(env, carry, key)
        return carry, {**metrics, "loss": jnp.zeros(3)}


class OneResult(Tiny):
    def iterate(self, env, carry, key):
        return super().iterate(env, carry, key)[0].train


class BatchedAct(Tiny):
    """`policy` returns None, and with None as parameters `act` returns two actions. But `iterate` passes `train` to `act`, so the
    rollout works."""

    def policy(self, train):
        return None

    @choreo.fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        action, extras = super().act(params, obs, key, greedy=greedy)
        return (action if params is not None else jnp.zeros((2,), jnp.int32)), extras


class NoGreedy(Tiny):
    @choreo.fragment("actor")
    def act(self, params, obs, key):
        return jnp.int32(1), ()


class RandomGreedy(Tiny):
    @choreo.fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        return jax.random.bits(key, (), jnp.uint32).astype(jnp.int32), ()


BROKEN = {
    NoMarks: "No function called by `NoMarks.iterate` carries a role",
    NoTrain: r"`NoTrain.init` returns a dict without `train`",
    FunctionThatChanges: r"`carry.train\['activation'\]` goes in as the function tanh and comes back as the function sin",
    OtherType: r"`carry.train\['total'\]` goes in as float32\[\] and comes back as int32\[\]",
    OtherStructure: "must return a carry of the same structure",
    NotFinite: r"`carry.train\['total'\]` is not finite",
    HalfMetrics: "returns a metric `episodes`, but no metric `episode_return`",
    NegativeSteps: "`NegativeSteps.steps_per_iteration` returns -[0-9]+, which is not a number of steps",
    VectorMetric: r"metric `loss` of `VectorMetric` has shape \[3\]",
    ComplexMetric: "metric `phase` of `ComplexMetric` is complex64, which is not a real number",
    ReservedMetric: "returns a metric `seconds`, which a run writes itself",
    FloatAction: r"an action float32\[\] for one environment, but actions are Discrete\(2\)",
    OneResult: r"not \(carry, metrics\)",
    BatchedAct: r"an action int32\[2\] for one environment",
    NoGreedy: "`NoGreedy.act` cannot be called",
    RandomGreedy: "depends on the key",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: cls.__name__)
def test_the_error_names_what_is_wrong(broken):
    with pytest.raises(AlgorithmError, match=BROKEN[broken]):
        check_algorithm(broken(), ENV)


@pytest.mark.parametrize(
    "algo", [Tiny(), PythonInCarry(), Imitation()], ids=["smallest", "Python in the carry", "without environments"]
)
def test_correct_algorithms_pass(algo):
    check_algorithm(algo, ENV)


def test_a_missing_part_is_named_with_its_signature():
    @dataclass(frozen=True)
    class Partial:
        unroll: int = 8

        def init(self, env, key): ...

    with pytest.raises(AlgorithmError, match="`Partial` lacks 3 of the parts") as error:
        require_parts(Partial())
    for line in ("`iterate`: iterate(env, carry, key)", "`policy`: policy(train)", "`act`: act(params, obs, key"):
        assert line in str(error.value)


def test_the_wrong_number_of_arguments_is_refused():
    class NoKey(Tiny):
        def init(self, env):
            return None

    with pytest.raises(AlgorithmError, match="`NoKey.init` does not take 2 arguments") as error:
        require_parts(NoKey())
    assert "init(env, key)" in error.value.fix


def test_hyper_parameters_must_be_hashable():
    unhashable = dataclasses.make_dataclass("Listed", [("layers", list)], bases=(Tiny,), frozen=True, kw_only=True)
    with pytest.raises(AlgorithmError, match="`Listed` cannot be hashed"):
        require_parts(unhashable(layers=[64, 64]))
