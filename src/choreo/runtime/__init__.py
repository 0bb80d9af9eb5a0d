"""Runtimes: they execute a plan in this process or in worker processes. In lockstep, all runtimes compute the same bits."""
