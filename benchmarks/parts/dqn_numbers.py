"""The settings of DQN that are the same for Choreo and its rivals.

This file imports nothing, because each rival imports it in its own Python environment.
"""

ENV = "CartPole-v1"
NUM_ENVS, UNROLL = 8, 4
"""An iteration takes 4 steps in each of 8 environments, and then does some updates."""
UPDATES = (8, 1)
"""Updates per iteration: Choreo's default, then Stable-Baselines3's."""
BLOCK = 32
"""A measurement has a multiple of this many iterations. 32 iterations have 1024 steps, and RLlib reports only after 1024 steps."""
BATCH_SIZE = 64
CAPACITY, MIN_SIZE = 100_000, 1_000
"""How many steps the replay can store, and how many are stored before the first update."""
HIDDEN = (128, 128)
LEARNING_RATE, GAMMA, EPSILON, MAX_GRAD_NORM = 5e-4, 0.99, 0.05, 10.0
TARGET_PERIOD = 200
"""Number of updates between two copies of the network to the target network."""

STEPS = NUM_ENVS * UNROLL
"""Steps of all environments together, per iteration."""
