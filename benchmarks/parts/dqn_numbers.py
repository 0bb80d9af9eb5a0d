"""The settings of DQN that Choreo and its rivals have in common. Imports nothing, because each has its own Python environment."""

ENV = "CartPole-v1"
NUM_ENVS, UNROLL = 8, 4
"""An iteration takes 4 steps in each of 8 environments, and then does some updates."""
UPDATES = (8, 1)
"""Updates per iteration: Choreo's default, then Stable-Baselines3's."""
BLOCK = 32
"""The smallest number of iterations in one call: 1024 steps, because RLlib reports only after that many steps."""
BATCH_SIZE = 64
CAPACITY, MIN_SIZE = 100_000, 1_000
"""Steps that the replay stores, and the steps that are stored before the first update."""
HIDDEN = (128, 128)
LEARNING_RATE, GAMMA, EPSILON, MAX_GRAD_NORM = 5e-4, 0.99, 0.05, 10.0
TARGET_PERIOD = 200
"""Updates after which the target network becomes a copy of the network."""

STEPS = NUM_ENVS * UNROLL
"""Steps of all environments together, per iteration."""
