"""Stable-Baselines3's DQN with the settings of the benchmark, driven line by line (`line_process.py`).

python sb3_dqn.py UPDATES      prints "ready"; then, for each number of iterations on stdin, wall and CPU seconds
"""

import sys
import time

import dqn_numbers as same  # pyright: ignore[reportMissingImports]


def make(updates: int):
    # These packages are installed in the Python environment that runs this file, but not in Choreo's.
    import torch  # pyright: ignore[reportMissingImports]
    from stable_baselines3 import DQN  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    return DQN(
        "MlpPolicy",
        make_vec_env(same.ENV, same.NUM_ENVS, seed=0),
        train_freq=same.UNROLL,
        gradient_steps=updates,
        batch_size=same.BATCH_SIZE,
        buffer_size=same.CAPACITY,
        learning_starts=same.MIN_SIZE,
        learning_rate=same.LEARNING_RATE,
        gamma=same.GAMMA,
        max_grad_norm=same.MAX_GRAD_NORM,
        target_update_interval=same.TARGET_PERIOD * same.STEPS // updates,  # counted in environment steps
        exploration_initial_eps=same.EPSILON,
        exploration_final_eps=same.EPSILON,
        policy_kwargs={"net_arch": list(same.HIDDEN), "activation_fn": torch.nn.ReLU},
        device="cpu",
        seed=0,
    )


def main() -> None:
    updates = int(sys.argv[1])
    model = make(updates)
    model.learn(2 * same.MIN_SIZE)
    print("ready", flush=True)
    for line in sys.stdin:
        iterations, before = int(line), model._n_updates
        wall, cpu = time.perf_counter(), time.process_time()
        model.learn(iterations * same.STEPS, reset_num_timesteps=False)
        took = time.perf_counter() - wall, time.process_time() - cpu
        assert model._n_updates - before == iterations * updates, "the number of updates is wrong"
        print(*took, flush=True)


if __name__ == "__main__":
    main()
