"""A2C learns CartPole with every seed.

The measure is the mean return of 100 new episodes, with the final parameters and greedy actions.
The hyper-parameters were chosen on other seeds (100 and above). docs/algorithms/a2c.md reports more runs.
`make test-learning` runs this file.
"""

import pytest

import choreo
from choreo.algos import A2C

NUM_ENVS, STEPS = 8, 500_000


@pytest.mark.learning
@pytest.mark.parametrize("seed", range(5))
def test_a2c_reaches_475_on_cartpole(seed, capsys):
    algo = A2C()
    run = choreo.train(algo, "jax:CartPole-v1", steps=STEPS, seed=seed, num_envs=NUM_ENVS, progress=False)
    evaluation = run.evaluate(episodes=100)
    with capsys.disabled():
        print(f"\njax:CartPole-v1 fused seed {seed} num_envs {NUM_ENVS} steps {STEPS:,}: {evaluation}; {algo}")
    assert evaluation.mean >= 475
