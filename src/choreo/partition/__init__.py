"""The partitioning compiler: from a traced algorithm and a layout to a program for every site. Start with `passes.py`."""
