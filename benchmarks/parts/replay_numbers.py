"""The sizes that are the same for Choreo and its rivals.

This file imports nothing, because each rival imports it in its own Python environment.
"""

NUM_ENVS, UNROLL = 8, 4
"""An iteration adds 4 steps of each of 8 CartPole environments."""
LENGTH = 2
"""Steps of an item in Choreo. An item of a rival is one step with the observations before and after it: the faster way there."""
BATCHES, BATCH_SIZE = 8, 64
"""An iteration draws 8 batches of 64 items. If items are drawn by priority, it also sets new priorities of these items."""
CAPACITY, FILLED = 100_000, 25_600
"""Number of steps that the replay can store, and number of steps that are stored before the measurement begins."""
EXPONENT = 0.6
"""Priority exponent: an item is drawn in proportion to its priority to this power."""
AHEAD = 8
"""In a rival, adding may be at most this many iterations ahead of drawing."""

STEPS, ITEMS = NUM_ENVS * UNROLL, BATCHES * BATCH_SIZE
"""Number of steps that an iteration adds, and number of items that it draws."""
