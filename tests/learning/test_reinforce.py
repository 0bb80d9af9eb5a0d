"""REINFORCE learns CartPole with every seed.

The measure is the mean return of 100 new episodes, with the final parameters and greedy actions.
The hyper-parameters were chosen on other seeds (100 and above). docs/algorithms/reinforce.md reports more runs.
`make test-learning` runs this file.
"""

import pytest

import choreo
from choreo.algos import REINFORCE

NUM_ENVS, STEPS = 8, 1_000_000


@pytest.mark.learning
@pytest.mark.parametrize("seed", range(3))
def test_reinforce_reaches_450_on_cartpole(seed, capsys):
    algo = REINFORCE()
    run = choreo.train(algo, "jax:CartPole-v1", steps=STEPS, seed=seed, num_envs=NUM_ENVS, progress=False)
    evaluation = run.evaluate(episodes=100)
    with capsys.disabled():
        print(f"\njax:CartPole-v1 fused seed {seed} num_envs {NUM_ENVS} steps {STEPS:,}: {evaluation}; {algo}")
    assert evaluation.mean >= 450
