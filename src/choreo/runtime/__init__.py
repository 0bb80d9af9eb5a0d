"""Runtimes: execute a plan in this process or in worker processes. All of them compute the same bits."""
