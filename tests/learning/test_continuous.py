"""DDPG, TD3 and SAC learn Pendulum with every seed, with one update per environment step.

The measure is the mean return of 100 new episodes, with the final parameters and greedy actions.
The hyper-parameters were chosen on other seeds (100 and above). docs/algorithms/{ddpg,td3,sac}.md report these runs.
`make test-learning` runs this file.
"""

import functools

import pytest

import choreo
from choreo.algos.ddpg import DDPG
from choreo.algos.sac import SAC
from choreo.algos.td3 import TD3
from choreo.networks import deterministic, squashed

STEPS = 30_000
ONE_CRITIC = functools.partial(deterministic, hidden=(64, 64), critics=1)
TWO_CRITICS = functools.partial(deterministic, hidden=(64, 64))
SQUASHED = functools.partial(squashed, hidden=(64, 64))

RECOMMENDED = {
    "ddpg": DDPG(learning_rate=1e-3, batch_size=128, capacity=STEPS, network=ONE_CRITIC),
    "td3": TD3(learning_rate=1e-3, batch_size=128, capacity=STEPS, network=TWO_CRITICS),
    "sac": SAC(learning_rate=1e-3, batch_size=128, capacity=STEPS, network=SQUASHED),
}
"""Settings for Pendulum. docs/algorithms/{ddpg,td3,sac}.md show the same settings."""


@pytest.mark.learning
@pytest.mark.parametrize(("name", "threshold"), [("ddpg", -250), ("td3", -200), ("sac", -200)])
@pytest.mark.parametrize("num_envs", [1, 8])
@pytest.mark.parametrize("seed", range(5))
def test_the_threshold_is_reached_on_pendulum(name, threshold, num_envs, seed, capsys):
    algo = RECOMMENDED[name]
    run = choreo.train(algo, "jax:Pendulum-v1", steps=STEPS, seed=seed, num_envs=num_envs, progress=False)
    evaluation = run.evaluate(episodes=100)
    with capsys.disabled():
        print(f"\njax:Pendulum-v1 fused seed {seed} num_envs {num_envs} steps {STEPS:,}: {evaluation}; {algo}")
    assert evaluation.mean >= threshold
