"""Starts, watches and ends workers on this machine and on the hosts of a cluster."""
