"""A training run: its configuration, folder, checkpoints, evaluation, loggers and figures, and the loop that drives it."""
