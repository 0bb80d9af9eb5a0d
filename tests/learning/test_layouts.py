"""IMPALA and A3C learn CartPole with lag, and PPO learns CartPole with learner shards.

The measure is the mean return of 100 new episodes, with the final parameters and greedy actions.

In one process, Choreo draws the lags and the order of arrival from the seed. So the result is reproducible, and the threshold is
high. With worker processes, the lags and the order depend on timing, so the threshold is low. `make test-learning` runs this file.
"""

import pytest

import choreo
from choreo.algos import A2C, IMPALA, PPO

pytestmark = pytest.mark.learning

IMPALA_LAYOUTS = {
    "sebulba": choreo.sebulba(workers=4, learners=2, max_lag=4),
    "coarse": choreo.coarse(workers=2, max_lag=4),
}
A3C = choreo.central(workers=4, max_lag=8, merge="any")
PPO_LAYOUTS = {"multi_learner": choreo.multi_learner(workers=2), "sebulba": choreo.sebulba(workers=2, learners=2)}


def greedy_return(capsys, algo, layout, *, num_envs: int, steps: int, seed: int, runtime: str = "inprocess") -> float:
    """Train, print the result and return the mean return of the evaluation."""
    run = choreo.train(algo, "jax:CartPole-v1", steps=steps, seed=seed, num_envs=num_envs, layout=layout,
                       runtime=runtime, progress=False)  # fmt: skip
    evaluation = run.evaluate(episodes=100)
    lag = f"lag {sum(row['lag_mean'] for row in run.rows) / len(run.rows):.1f}, " if layout.is_relaxed else ""
    with capsys.disabled():
        print(
            f"\n{layout!r} in {runtime}, seed {seed}, num_envs {num_envs}, steps {steps:,}: {lag}{evaluation}; {algo}"
        )
    return evaluation.mean


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", IMPALA_LAYOUTS)
def test_impala_reaches_450_with_lag(layout, seed, capsys):
    assert greedy_return(capsys, IMPALA(), IMPALA_LAYOUTS[layout], num_envs=16, steps=1_000_000, seed=seed) >= 450


@pytest.mark.parametrize("seed", range(3))
def test_a3c_reaches_400(seed, capsys):
    assert greedy_return(capsys, A2C(), A3C, num_envs=16, steps=1_000_000, seed=seed) >= 400


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", PPO_LAYOUTS)
def test_ppo_reaches_475_with_two_learner_shards(layout, seed, capsys):
    assert greedy_return(capsys, PPO(), PPO_LAYOUTS[layout], num_envs=8, steps=500_000, seed=seed) >= 475


@pytest.mark.parametrize(("algo", "layout"), [(IMPALA(), IMPALA_LAYOUTS["sebulba"]), (A2C(), A3C)])
def test_relaxed_runs_with_workers_learn(algo, layout, capsys):
    """Each run differs, because it depends on timing. So the test only asks for a return far above that of a random policy."""
    assert greedy_return(capsys, algo, layout, num_envs=16, steps=1_000_000, seed=0, runtime="local") > 100
