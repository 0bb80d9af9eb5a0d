"""Small programs with one odd thing in each, for law level 3: an accepted program gives the result of the reference.

All of them run on `Pond` with E environments. `test_never_silently_wrong.py` runs each program under several layouts. The test
expects either a refusal that names a line, a leaf or a metric of the program, or the result of the program without marks, up to
1e-5.

The docstring of each program says which mistake the program would uncover. The mistakes are those of a naive compiler: it finds the
env axis by its length, gives each replica a block of this axis, and runs the user's code on that block.
"""

from pathlib import Path

from laws.odd_programs import axes, carries, fragments, loops, random_keys
from laws.odd_programs.program import PROGRAMS, Program

FOLDER = str(Path(__file__).parent)
"""A refusal must name a line of a file in this folder."""

__all__ = ["FOLDER", "PROGRAMS", "Program", "axes", "carries", "fragments", "loops", "random_keys"]
