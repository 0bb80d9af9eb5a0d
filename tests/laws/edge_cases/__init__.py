"""Programs with unusual features of JAX and Python, for law levels 2 and 3: an accepted program gives the reference result.

Each program is an ordinary small algorithm on `Pond` with one odd thing in it: an unusual leaf or container, statics that
compare equal, shapes that depend on the number of environments E. The programs take all sizes from `env`, so that each runs
with any number of environments. `test_edges.py` runs them, and says which must run and which may be refused.
"""

from pathlib import Path

FOLDER = str(Path(__file__).parent)
"""A refusal must name a line of a file in this folder."""
