"""Stable-Baselines3's PPO with the settings of the benchmark, driven line by line (`line_process.py`).

python sb3.py ENV NUM_ENVS      prints "ready"; then, for each number of iterations on stdin, wall and CPU seconds
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
"""The defaults of `choreo.PPO()`. In both libraries, actor and critic have separate networks with 2 layers of 64 tanh units."""


def make(env: str, num_envs: int):
    # These packages are installed in the Python environment that runs this file, but not in Choreo's.
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
