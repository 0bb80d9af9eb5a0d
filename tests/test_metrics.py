"""`choreo.metric` declares how Choreo combines the values that several learner shards have for the same metric."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo.errors import AlgorithmError
from choreo.loops import Position
from choreo.partition.trace import trace
from choreo.roles import Reduction
from choreo.runtime.engine.metrics import combine_metrics
from choreo.testing import unmarked

SHARDS = 2


class Carry(NamedTuple):
    train: Any
    position: Any


@dataclass(frozen=True, kw_only=True)
class Declares:
    """An algorithm with one metric for each kind of declaration."""

    unroll: int = 4
    within: str = "iterate"
    """Where the metrics are declared: directly in `iterate` ("iterate"), inside a "jit", or inside a "fragment"."""

    def init(self, env, key):
        return Carry(jnp.zeros((4, 2)), Position(*env.reset(env.keys(key))))

    @choreo.fragment("actor")
    def act(self, weights, obs, key, *, greedy=False):
        return jax.random.categorical(key, obs @ weights), None

    @choreo.fragment("learner")
    def learn(self, weights, reward):
        return weights, self.metrics(reward)

    def metrics(self, reward):
        number = jnp.sum(reward)
        return {
            "plain": number,
            "added": choreo.metric(number, reduce="sum"),
            "largest": choreo.metric(number, reduce="max"),
            "smallest": choreo.metric(number, reduce="min"),
            "weighted": choreo.metric(number, weight="added"),
            "same": choreo.metric(choreo.all_reduce(number), reduce="sum"),
            "changed": choreo.metric(number, reduce="sum") * 2,
        }

    def iterate(self, env, carry, key):
        position, trajectory, episodes = choreo.rollout(env, self.act, carry.train, carry.position, key, self.unroll)
        if self.within == "fragment":
            train, metrics = self.learn(carry.train, trajectory.reward)
        else:
            metrics = (jax.jit(self.metrics) if self.within == "jit" else self.metrics)(trajectory.reward)
            train = carry.train
        return Carry(train, position), {**episodes, **metrics}

    def policy(self, train):
        return train


DECLARED = {
    "plain": Reduction(), "added": Reduction("sum"), "largest": Reduction("max"), "smallest": Reduction("min"),
    "weighted": Reduction("mean", "added"), "same": Reduction("sum"), "changed": Reduction(),
    "episodes": Reduction("sum"), "episode_return": Reduction("mean", "episodes"),
    "episode_length": Reduction("mean", "episodes"),
}  # fmt: skip


@pytest.mark.parametrize("within", ["iterate", "jit", "fragment"])
@pytest.mark.parametrize("shards", [1, SHARDS])
def test_declarations_are_found_in_iterate_in_a_jit_and_in_a_fragment(within: str, shards: int):
    env = choreo.envs.make("jax:CartPole-v1", num_envs=4)
    assert trace(Declares(within=within), env, shards).reductions == DECLARED


@pytest.mark.parametrize("layout", [choreo.fused(shards=SHARDS), choreo.multi_learner(workers=SHARDS)], ids=str)
def test_the_metrics_of_shards_are_reduced_as_declared(layout):
    run = choreo.train(Declares(), "jax:CartPole-v1", layout=layout, num_envs=4, steps=32, runtime="inprocess", seed=0)
    total = 4.0 * 2  # 4 steps, 2 environments per shard, a reward of 1 each
    for name, expected in {"plain": total, "added": 2 * total, "largest": total, "same": 2 * total}.items():
        assert run.metrics[name].tolist() == [expected] * len(run.metrics[name]), name


def test_each_reduction_combines_the_numbers_of_the_shards():
    metrics = {"x": np.array([[1.0, 4.0], [3.0, np.nan]]), "n": np.array([[3, 1], [2, 0]])}
    for reduction, expected in (
        (Reduction(), [2.5, np.nan]), (Reduction("sum"), [5, np.nan]), (Reduction("mean", "n"), [1.75, 3]),
        (Reduction("max"), [4, np.nan]), (Reduction("min"), [1, np.nan]),
    ):  # fmt: skip
        reduced = combine_metrics(metrics, {"x": reduction, "n": Reduction("sum")})
        np.testing.assert_array_equal(reduced["x"], expected)
        assert reduced["n"].tolist() == [4, 2]


def test_a_weighted_mean_is_nan_if_all_weights_are_0():
    metrics = {"x": np.array([[1, 4]]), "n": np.array([[0, 0]])}
    assert np.isnan(combine_metrics(metrics, {"x": Reduction("mean", "n"), "n": Reduction("sum")})["x"])


def test_a_declaration_changes_no_number():
    def double(x):
        return choreo.metric(x, reduce="max") * 2

    assert float(double(jnp.float32(1.5))) == float(jax.jit(double)(jnp.float32(1.5))) == 3.0
    with unmarked():
        assert not jax.make_jaxpr(double)(1.0).eqns[0].primitive.name.startswith("jit")


def test_an_unknown_reduction_and_a_weight_without_a_mean_are_refused():
    with pytest.raises(AlgorithmError, match=r"metric\(reduce='median'\) is not known"):
        choreo.metric(1.0, reduce="median")
    with pytest.raises(AlgorithmError, match="only a mean has a weight"):
        choreo.metric(1.0, reduce="sum", weight="episodes")


def test_a_weight_that_iterate_does_not_return_is_refused():
    class Forgets(Declares):
        def metrics(self, reward):
            return {"mean_step": choreo.metric(jnp.mean(reward), weight="steps")}

    env = choreo.envs.make("jax:CartPole-v1", num_envs=4)
    with pytest.raises(
        AlgorithmError, match="`mean_step` of `Forgets` is weighted by `steps`, but `iterate` returns no metric `steps`"
    ):
        trace(Forgets(), env)


def test_with_several_learners_the_metrics_of_episodes_must_be_declared():
    class ByHand(Declares):
        def iterate(self, env, carry, key):
            carry, metrics = super().iterate(env, carry, key)
            return carry, {name: x * 1 for name, x in metrics.items()}  # a product has no declaration

    settings: dict[str, Any] = {"num_envs": 4, "steps": 16, "runtime": "inprocess"}
    choreo.train(ByHand(), "jax:CartPole-v1", layout=choreo.fused(), **settings)
    with pytest.raises(AlgorithmError, match=r'(?s)returns `episodes` without.*choreo.metric\(x, reduce="sum"\)'):
        choreo.train(ByHand(), "jax:CartPole-v1", layout=choreo.multi_learner(workers=2), **settings)
