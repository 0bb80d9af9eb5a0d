"""The sizes that Choreo and its rivals have in common. Imports nothing, because each has its own Python environment."""

NUM_ENVS, UNROLL = 8, 4
"""An iteration adds 4 steps of each of 8 CartPole environments."""
LENGTH = 2
"""Steps of an item. The rivals store one step with both observations, which is faster for them."""
BATCHES, BATCH_SIZE = 8, 64
"""An iteration draws 8 batches of 64 items, and sets the priority of each if they are drawn by priority."""
CAPACITY, FILLED = 100_000, 25_600
"""Steps that the replay can store, and the steps that are stored before the measurement begins."""
EXPONENT = 0.6
"""Priority exponent."""
AHEAD = 8
"""The number of iterations by which a rival may add steps before it draws items, at most."""

STEPS, ITEMS = NUM_ENVS * UNROLL, BATCHES * BATCH_SIZE
"""Steps added and items drawn per iteration."""
