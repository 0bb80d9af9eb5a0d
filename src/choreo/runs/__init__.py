"""A training run: its configuration, folder, checkpoints, evaluation, events, loggers and figures, and the loop that drives it."""
