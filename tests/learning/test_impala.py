"""IMPALA learns: greedy evaluation of the final parameters, 100 fresh episodes, on every seed.

Hyper-parameters were chosen on seeds 100 and above; docs/algorithms/impala.md reports other runs.
Run by `make test-learning`.
"""

import pytest

import choreo
from choreo.algos import IMPALA

NUM_ENVS, STEPS = 16, 1_000_000


@pytest.mark.learning
@pytest.mark.parametrize("seed", range(3))
def test_cartpole(seed, capsys):
    algo = IMPALA()
    run = choreo.train(algo, "jax:CartPole-v1", steps=STEPS, seed=seed, num_envs=NUM_ENVS, progress=False)
    evaluation = run.evaluate(episodes=100)
    with capsys.disabled():
        print(f"\njax:CartPole-v1 fused seed {seed} num_envs {NUM_ENVS} steps {STEPS:,}: {evaluation}; {algo}")
    assert evaluation.mean >= 450
