"""How many lines do two algorithm files have in common?

    python tools/shared_lines.py [--limit 40]

An algorithm file is a file that defines one of the classes in `choreo.algos.ALGOS`. Every line that is not blank counts: code,
imports, comments and docstrings. Spaces at the beginning and end of a line are ignored. A line that occurs twice in one file and
once in the other is one common line. The share of two files is the number of common lines divided by the number of lines of
the shorter file. The script exits with 1 if the share of any two files is above the limit.
"""

import argparse
import inspect
import itertools
import sys
from collections import Counter
from pathlib import Path

from choreo.algos import ALGOS

LIMIT = 40.0
"""The largest allowed share, in percent of the lines of the shorter file."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=LIMIT, help="largest share that is allowed, in percent")
    limit = parser.parse_args().limit
    files = {name: lines_of(Path(inspect.getfile(algo))) for name, algo in ALGOS.items()}
    shares = {pair: share(*(files[name] for name in pair)) for pair in itertools.combinations(files, 2)}
    print_table(files, shares)
    over = [pair for pair, percent in shares.items() if percent > limit]
    for one, other in over:
        print(
            f"{one}.py and {other}.py share {shares[one, other]:.0f}% of the lines of the shorter file; the limit is {limit:.0f}%."
        )
    return 1 if over else 0


def lines_of(path: Path) -> Counter[str]:
    """The lines of a file, each with the number of times that it occurs."""
    return Counter(line.strip() for line in path.read_text().splitlines() if line.strip())


def share(one: Counter[str], other: Counter[str]) -> float:
    """The number of common lines, in percent of the lines of the shorter file."""
    return 100 * (one & other).total() / min(one.total(), other.total())


def print_table(files: dict[str, Counter[str]], shares: dict[tuple[str, str], float]) -> None:
    width = max(map(len, files)) + 1
    print("Lines in common, in percent of the lines of the shorter file:\n")
    print(" " * width + "lines" + "".join(name.rjust(width) for name in files))
    for one, lines in files.items():
        cells = (f"{shares[one, other]:.0f}" if (one, other) in shares else "" for other in files)
        print(one.ljust(width) + f"{lines.total():5d}" + "".join(cell.rjust(width) for cell in cells))
    print()


if __name__ == "__main__":
    sys.exit(main())
