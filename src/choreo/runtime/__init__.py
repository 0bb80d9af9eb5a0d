"""Runtimes: they execute a plan in this process or in worker processes. All runtimes compute the same bits."""
