"""The DQN that is measured: the same for Choreo and its rivals. Imports nothing, since each lives in another environment."""

ENV = "CartPole-v1"
NUM_ENVS, UNROLL = 8, 4
"""An iteration is 4 steps in each of 8 environments, and then some updates."""
UPDATES = (8, 1)
"""Per iteration: Choreo's default, then Stable-Baselines3's."""
BLOCK = 32
"""Iterations that are asked for at once, at least: 1024 steps, as many as RLlib does before it reports."""
BATCH_SIZE = 64
CAPACITY, MIN_SIZE = 100_000, 1_000
"""Steps that are stored, and how many before anything is learned."""
HIDDEN = (128, 128)
LEARNING_RATE, GAMMA, EPSILON, MAX_GRAD_NORM = 5e-4, 0.99, 0.05, 10.0
TARGET_PERIOD = 200
"""Updates after which the target network becomes a copy of the network."""

STEPS = NUM_ENVS * UNROLL
"""Of all environments, per iteration."""
