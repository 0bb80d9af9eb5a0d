"""Stable-Baselines3's PPO with the numbers of the benchmark, in an environment of its own; driven line by line.

python sb3.py ENV NUM_ENVS      ready; then for each number of iterations on stdin: wall and CPU seconds of training
"""

import sys
import time

NUMBERS = {
    "n_steps": 128,
    "batch_size": 256,
    "n_epochs": 4,
    "learning_rate": 2e-3,
    "gae_lambda": 0.98,
    "ent_coef": 0.01,
}
"""Those of `choreo.PPO()`; its network, 2 x 64 tanh for actor and critic each, is also the one of Stable-Baselines3."""


def make(env: str, num_envs: int):
    # In the environment that runs this file, they are there.
    import torch  # pyright: ignore[reportMissingImports]
    from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    return PPO("MlpPolicy", make_vec_env(env, num_envs, seed=0), device="cpu", seed=0, **NUMBERS)


def main() -> None:
    env, num_envs = sys.argv[1], int(sys.argv[2])
    model = make(env, num_envs)
    per_iteration = num_envs * NUMBERS["n_steps"]
    model.learn(per_iteration)
    print("ready", flush=True)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        model.learn(int(line) * per_iteration, reset_num_timesteps=False)
        print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)


if __name__ == "__main__":
    main()
