"""PPO learns Gymnasium's CartPole and Pendulum. Worker processes step the environments.

The measure is the mean return of 100 new episodes, with the final parameters and greedy actions.
The settings are the same as in tests/learning/test_ppo.py. They were chosen in runs with JAX environments.
`make test-learning` runs this file.
"""

import pytest

import choreo
from choreo.algos import PPO

SETTINGS = {
    "CartPole-v1": PPO(),
    "Pendulum-v1": PPO(gamma=0.9, gae_lambda=0.95, learning_rate=1e-3, epochs=10, minibatch_size=128, entropy_coef=0.0),
}
"""Settings for each environment. docs/algorithms/ppo.md shows the same settings."""

LAYOUTS = {"coarse x2": choreo.coarse(workers=2), "fine x2": choreo.fine(workers=2)}


@pytest.mark.learning
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_ppo_reaches_475_on_cartpole_with_workers(layout, seed, capsys):
    assert train("CartPole-v1", layout, seed, 300_000, capsys) >= 475


@pytest.mark.learning
def test_ppo_reaches_minus_250_on_pendulum_with_workers(capsys):
    assert train("Pendulum-v1", "coarse x2", 0, 400_000, capsys) >= -250


def train(env: str, layout: str, seed: int, steps: int, capsys) -> float:
    """Train, print the result and return the mean return of the evaluation."""
    algo, num_envs = SETTINGS[env], 8
    run = choreo.train(
        algo, env, layout=LAYOUTS[layout], runtime="local", steps=steps, seed=seed, num_envs=num_envs, progress=False
    )
    evaluation = run.evaluate(episodes=100)
    with capsys.disabled():
        print(
            f"\n{env} {layout} seed {seed} num_envs {num_envs}: {evaluation}; {run.timing.steps_per_second:,.0f} steps/s"
        )
        print(f"{algo}")
    return evaluation.mean
