"""From a traced algorithm and homes for its roles to a program for every site: see `passes.py`."""
