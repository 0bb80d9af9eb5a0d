"""PPO learns CartPole and Pendulum with every seed.

The measure is the mean return of 100 new episodes, with the final parameters and greedy actions.
The hyper-parameters were chosen on other seeds (100 and above), except for the `minibatch_size` for Pendulum.
docs/algorithms/ppo.md gives the reason and reports more runs. `make test-learning` runs this file.
"""

import pytest

import choreo
from choreo.algos import PPO

RECOMMENDED = {
    "jax:CartPole-v1": PPO(),
    "jax:Pendulum-v1": PPO(
        gamma=0.9, gae_lambda=0.95, learning_rate=1e-3, epochs=10, minibatch_size=128, entropy_coef=0.0
    ),
}
"""Settings for each environment. docs/algorithms/ppo.md shows the same settings."""

LAYOUTS = {"fused": choreo.fused(), "coarse x2": choreo.coarse(workers=2)}


@pytest.mark.learning
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_ppo_reaches_475_on_cartpole(layout, seed, capsys):
    assert train("jax:CartPole-v1", layout, seed, 300_000, capsys) >= 475


@pytest.mark.learning
@pytest.mark.parametrize("seed", range(3))
def test_ppo_reaches_minus_250_on_pendulum(seed, capsys):
    assert train("jax:Pendulum-v1", "fused", seed, 400_000, capsys) >= -250


def train(env: str, layout: str, seed: int, steps: int, capsys) -> float:
    """Train, print the result and return the mean return of the evaluation."""
    algo, num_envs = RECOMMENDED[env], 8
    run = choreo.train(algo, env, layout=LAYOUTS[layout], steps=steps, seed=seed, num_envs=num_envs, progress=False)
    evaluation = run.evaluate(episodes=100)
    with capsys.disabled():
        print(f"\n{env} {layout} seed {seed} num_envs {num_envs}: {evaluation}; {algo}")
    return evaluation.mean
