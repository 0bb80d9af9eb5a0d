"""The sizes that are the same for Choreo and its rivals.

This file imports nothing, because each rival imports it in its own Python environment.
"""

NUM_ENVS, UNROLL = 8, 4
"""An iteration adds 4 steps of each of 8 CartPole environments."""
LENGTH = 2
"""Steps of an item. An item of a rival is one step with the observations before and after it, which is faster for the rivals."""
BATCHES, BATCH_SIZE = 8, 64
"""An iteration draws 8 batches of 64 items. If items are drawn by priority, the iteration also sets their priorities."""
CAPACITY, FILLED = 100_000, 25_600
"""How many steps the replay can store, and how many are stored before the measurement begins."""
EXPONENT = 0.6
"""Priority exponent."""
AHEAD = 8
"""The largest number of iterations by which adding may be ahead of drawing in a rival."""

STEPS, ITEMS = NUM_ENVS * UNROLL, BATCHES * BATCH_SIZE
"""Steps added and items drawn per iteration."""
