"""Executes the programs of a plan at the sites of one process."""
