"""Programs with unusual features of JAX and Python, for law level 3: an accepted program gives the reference result.

Each program is an ordinary small algorithm on the environment `Pond` (`laws/refuse_or_equal.py`) with one odd thing in it: an
unusual leaf, container or metric, static arguments that compare equal but differ, or a shape that depends on the number of
environments. The programs read the number of environments from `env`, so that each program works with any number. Only
`whole_run.py` is different: it has one algorithm for CartPole, with several odd things.

`test_edges.py` runs the programs, and says which programs Choreo must run and which it is allowed to refuse.
"""

from pathlib import Path

FOLDER = str(Path(__file__).parent)
"""A refusal must name a line of a file in this folder."""
