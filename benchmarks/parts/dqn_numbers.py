"""The settings of DQN that are the same for Choreo and its rivals.

This file imports nothing, because each rival imports it in its own Python environment.
"""

ENV = "CartPole-v1"
NUM_ENVS, UNROLL = 8, 4
"""An iteration takes 4 steps in each of 8 environments, and then does some updates."""
UPDATES = (8, 1)
"""Updates per iteration: Choreo's default, then Stable-Baselines3's."""
BLOCK = 32
"""The smallest number of iterations that are measured: 1024 steps. RLlib reports only after 1024 steps (`rllib_dqn.py`)."""
BATCH_SIZE = 64
CAPACITY, MIN_SIZE = 100_000, 1_000
"""How many steps the replay can store, and how many are stored before the first update."""
HIDDEN = (128, 128)
LEARNING_RATE, GAMMA, EPSILON, MAX_GRAD_NORM = 5e-4, 0.99, 0.05, 10.0
TARGET_PERIOD = 200
"""The network is copied to the target network once in this many updates."""

STEPS = NUM_ENVS * UNROLL
"""Steps of all environments together, per iteration."""
