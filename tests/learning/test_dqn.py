"""DQN, C51 and Ape-X learn CartPole. Each test checks the median result of five seeds. One test also checks the smallest result.

The measure is the mean return of 100 new episodes, with the final parameters and greedy actions.
The hyper-parameters were chosen on other seeds (100 and above).
`make test-learning` runs this file.
"""

import statistics

import pytest

import choreo
from choreo.algos import DQN

pytestmark = pytest.mark.learning

APEX = DQN(prioritized=True, buffer_shards=2, epsilon_spread=7.0)
SEEDS = range(5)


def greedy_return(capsys, algo, steps: int, seed: int, layout=None) -> float:
    """Train, print the result and return the mean return of the evaluation."""
    layout = layout or choreo.fused()
    run = choreo.train(algo, "jax:CartPole-v1", steps=steps, seed=seed, num_envs=8, layout=layout,
                       runtime="inprocess", progress=False)  # fmt: skip
    evaluation = run.evaluate(episodes=100)
    with capsys.disabled():
        print(f"\n{layout!r}, seed {seed}, num_envs 8, steps {steps:,}: {evaluation}; {algo}")
    return evaluation.mean


def test_the_median_of_dqn_reaches_450_in_200_000_steps(capsys):
    returns = [greedy_return(capsys, DQN(), 200_000, seed) for seed in SEEDS]
    assert statistics.median(returns) >= 450 and min(returns) >= 300, returns


def test_the_median_of_dqn_reaches_475_in_500_000_steps(capsys):
    returns = [greedy_return(capsys, DQN(), 500_000, seed) for seed in SEEDS]
    assert statistics.median(returns) >= 475, returns


def test_the_median_of_c51_reaches_450(capsys):
    returns = [greedy_return(capsys, DQN(head="c51"), 500_000, seed) for seed in SEEDS]
    assert statistics.median(returns) >= 450, returns


def test_the_median_of_apex_reaches_450_with_lag(capsys):
    layout = choreo.apex(workers=2, buffers=2, max_lag=2)
    returns = [greedy_return(capsys, APEX, 500_000, seed, layout) for seed in SEEDS]
    assert statistics.median(returns) >= 450, returns
