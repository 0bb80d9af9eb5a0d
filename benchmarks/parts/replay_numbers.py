"""The traffic that is measured: the same for Choreo and its rivals. Imports nothing, since each lives in another environment."""

NUM_ENVS, UNROLL = 8, 4
"""An iteration adds 4 steps of each of 8 environments; a step is that of CartPole."""
LENGTH = 2
"""Steps of an item. The rivals store one, with the observation that follows, which is faster for them."""
BATCHES, BATCH_SIZE = 8, 64
"""An iteration draws 8 batches of 64 items, and gives each item a priority if they are drawn by priority."""
CAPACITY, FILLED = 100_000, 25_600
"""Steps that there is room for, and how many are stored before anything is measured."""
EXPONENT = 0.6
"""Of priorities."""
AHEAD = 8
"""By how many iterations, at most, a rival's adding may be ahead of its drawing."""

STEPS, ITEMS = NUM_ENVS * UNROLL, BATCHES * BATCH_SIZE
"""Added and drawn per iteration."""
