"""PPO learns on Gymnasium's own environments, stepped in worker processes: greedy evaluation, 100 fresh episodes, on every seed.

The settings are those of tests/learning/test_ppo.py, which were chosen on JAX environments and on other seeds.
Run by `make test-learning`.
"""

import pytest

import choreo
from choreo.algos import PPO

SETTINGS = {
    "CartPole-v1": PPO(),
    "Pendulum-v1": PPO(gamma=0.9, gae_lambda=0.95, learning_rate=1e-3, epochs=10, minibatch_size=128, entropy_coef=0.0),
}
"""Settings per environment; docs/algorithms/ppo.md shows the same."""

LAYOUTS = {"coarse x2": choreo.coarse(workers=2), "fine x2": choreo.fine(workers=2)}


@pytest.mark.learning
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_cartpole(layout, seed, capsys):
    assert train("CartPole-v1", layout, seed, 300_000, capsys) >= 475


@pytest.mark.learning
def test_pendulum(capsys):
    assert train("Pendulum-v1", "coarse x2", 0, 400_000, capsys) >= -250


def train(env: str, layout: str, seed: int, steps: int, capsys) -> float:
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
