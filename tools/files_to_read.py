"""How many files must a reader open to understand an algorithm?

    python tools/files_to_read.py [ppo sac] [--limit 4]

The script runs `init` and `iterate` of each algorithm with its defaults on a small environment, under `jax.eval_shape`, and
notes the file of every Python function that is called. It counts the files of the package, including the algorithm's own file. Some
files are not counted, because a reader of the algorithm need not open them: types and errors; environments (`envs/`, `host/`);
replay (`buffers/`); and the code behind fragments (`roles`, `static_key`, `dtypes`, `_compat`). The script exits with 1 if any
algorithm needs more files than the limit.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax

import choreo
from choreo import algos, envs
from choreo.roles import unmarked

LIMIT = 4
PACKAGE = Path(choreo.__file__).parent
ENVIRONMENTS = {"ppo": "jax:CartPole-v1", "sac": "jax:Pendulum-v1"}
NOT_COUNTED = ("types", "errors", "envs", "host", "buffers", "roles", "static_key", "dtypes", "_compat")
"""Modules and packages at the top level of choreo whose files are not counted."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", default=list(ENVIRONMENTS), help="by default: ppo sac")
    parser.add_argument("--limit", type=int, default=LIMIT, help="largest number of files that is allowed")
    arguments = parser.parse_args()
    too_many = False
    for name in arguments.algorithms:
        files = files_to_read(name)
        print(f"{name}: {len(files)} files, {sum(files.values())} lines (limit: {arguments.limit} files)")
        for file, lines in sorted(files.items()):
            print(f"    {lines:4d}  {file}")
        too_many |= len(files) > arguments.limit
    return 1 if too_many else 0


def files_to_read(name: str) -> dict[str, int]:
    """Trace one iteration of an algorithm. Returns the counted files of all called functions, each with its number of lines."""
    algo, env = algos.find(name)(), envs.make(ENVIRONMENTS.get(name, "jax:CartPole-v1"), num_envs=8)

    def one_iteration(key: jax.Array) -> Any:
        return algo.iterate(env, algo.init(env, key), key)

    # Without marks, a fragment calls its plain function. With marks, it might reuse an earlier trace and call nothing.
    with unmarked(True):
        called = codes_called(lambda: jax.eval_shape(one_iteration, jax.random.key(0)))
    files = {Path(code.co_filename) for code in called if code.co_name != "<module>"}
    ours = {path: path.relative_to(PACKAGE) for path in files if path.is_relative_to(PACKAGE)}
    counted = {path: place for path, place in ours.items() if place.parts[0].removesuffix(".py") not in NOT_COUNTED}
    return {str(place): len(path.read_text().splitlines()) for path, place in counted.items()}


def codes_called(run: Callable[[], Any]) -> set[CodeType]:
    """Call `run`. Returns the code of every Python function that is called during this call."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return codes


if __name__ == "__main__":
    sys.exit(main())
