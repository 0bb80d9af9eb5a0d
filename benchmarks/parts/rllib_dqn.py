"""RLlib's DQN with the settings of the benchmark, driven line by line (`line_process.py`).

    python rllib_dqn.py UPDATES      prints "ready"; then, for each number of iterations on stdin, wall and CPU seconds

Environments and learner are in this process, with one thread. The CPU time of Ray's own idle processes is not counted.
"""

import logging
import sys
import time

import dqn_numbers as same  # pyright: ignore[reportMissingImports]


def make(updates: int):
    # These packages are installed in the Python environment that runs this file, but not in Choreo's.
    import ray  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    from ray.rllib.algorithms.dqn import DQNConfig  # pyright: ignore[reportMissingImports]
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig  # pyright: ignore[reportMissingImports]

    logging.disable(logging.WARNING)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    torch.set_num_threads(1)
    config = DQNConfig().environment(same.ENV).learners(num_learners=0).evaluation(evaluation_interval=None)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=same.NUM_ENVS, rollout_fragment_length=same.UNROLL)
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=list(same.HIDDEN), fcnet_activation="relu"))
    config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=same.BLOCK * same.STEPS)
    config.training(
        lr=same.LEARNING_RATE,
        gamma=same.GAMMA,
        epsilon=same.EPSILON,
        grad_clip=same.MAX_GRAD_NORM,
        train_batch_size=same.BATCH_SIZE,
        training_intensity=updates * same.BATCH_SIZE / same.STEPS,  # items that are learned from, per environment step
        replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": same.CAPACITY},
        num_steps_sampled_before_learning_starts=same.MIN_SIZE,
        target_network_update_freq=same.TARGET_PERIOD * same.STEPS // updates,  # counted in environment steps
        double_q=False,
        dueling=False,
        n_step=1,
    )
    return config.build_algo()


def main() -> None:
    algo = make(int(sys.argv[1]))
    steps = 0
    for _ in range(2):
        steps = sampled(algo)
    print("ready", flush=True)
    for line in sys.stdin:
        wall, cpu, before = time.perf_counter(), time.process_time(), steps
        for _ in range(int(line) // same.BLOCK):
            steps = sampled(algo)
        # RLlib can take a few more steps than these iterations have. So the times are scaled down to the steps of the iterations.
        share = int(line) * same.STEPS / (steps - before)
        print(share * (time.perf_counter() - wall), share * (time.process_time() - cpu), flush=True)
    algo.stop()


def sampled(algo) -> float:
    """Train until RLlib reports the next time; returns the number of environment steps so far."""
    return algo.train()["env_runners"]["num_env_steps_sampled_lifetime"]


if __name__ == "__main__":
    main()
