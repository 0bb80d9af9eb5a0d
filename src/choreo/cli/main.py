"""The entry point of `choreo`: it finds the command, runs it, and turns errors into messages and exit codes."""

import os
import select
import sys
from collections.abc import Sequence

from choreo.cli.arguments import UsageError, near
from choreo.cli.commands import COMMANDS
from choreo.errors import ChoreoError, EnvError, LayoutError, UnknownNameError, printable

HELP = """\
An RL algorithm is written once, as plain JAX; a layout decides where it runs.

  choreo train ALGORITHM ENVIRONMENT [options]    train, with progress, table and run folder
  choreo graph ALGORITHM ENVIRONMENT [options]    the fragmented dataflow graph; with --layout the plan
  choreo check ALGORITHM ENVIRONMENT [options]    does the layout change nothing but time? A few iterations, compared
  choreo evaluate RUN [--episodes 100]            greedy episodes with what was trained
  choreo resume RUN [--steps N]                   go on from the last checkpoint
  choreo replay RUN                               run it again by its log: the same parameters, bit for bit
  choreo compare RUN RUN ... [-o compare.png]     return against steps and time, speed-up, as table and picture
  choreo agent --token-file FILE                  start workers on this host for a coordinator elsewhere
  choreo list algos|envs|layouts                  what there is

An ALGORITHM is a name (ppo) or a class in a file (my_ppo.py:MyPPO), an ENVIRONMENT a name (CartPole-v1, jax:CartPole-v1)
or a function in a file (my_env.py:make_env) with its arguments as --env.key=value, a RUN is a run folder. --layout takes
a name (coarse, seed_rl) or a layout in a file (my_layouts.py:two_stage). For example:

  choreo train ppo jax:CartPole-v1 --layout fused --num-envs 8 --steps 300000 --seed 0 --out runs/x

The run.toml of a run stands for ALGORITHM ENVIRONMENT and all its options: choreo train runs/x/run.toml --seed 1
A run of somebody else is data; code that it names is run with --trust only.

`choreo train --help` lists the options of a run, `choreo train ppo --help` also those of the algorithm.
CHOREO_TRACEBACK=1 shows where in Choreo an error was raised; CHOREO_CACHE=off keeps no compiled programs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 if it failed, 2 if it was misused, 130 if it was interrupted."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return 1


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if args else 2
    if args[0] == "--version":
        import importlib.metadata

        print(f"choreo {importlib.metadata.version('choreo')}")
        return 0
    try:
        if args[0] not in COMMANDS:
            raise UsageError(f"There is no command `{args[0]}`.", fix=near(args[0], COMMANDS))
        return COMMANDS[args[0]](args[1:])
    except ChoreoError as error:
        if os.environ.get("CHOREO_TRACEBACK") == "1":
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        for note in _traceback_of_the_user(error):
            print(printable(note), file=sys.stderr)
        return 2 if isinstance(error, UsageError | UnknownNameError | LayoutError) else 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def _traceback_of_the_user(error: ChoreoError) -> list[str]:
    """What the user's own code raised, here or in a worker."""
    cause = error.__cause__
    if cause is None or isinstance(cause, ChoreoError) or not isinstance(error, EnvError):
        notes = getattr(error, "__notes__", [])
        return [note for note in notes if "JAX has removed its internal frames" not in note]  # there is no traceback
    import traceback

    return ["".join(traceback.format_exception(cause)).rstrip()]


def _nobody_reads() -> bool:
    """Has whoever read our output had enough, as `head` has? Then there is nobody to tell, and nothing more is written."""
    output = select.poll()
    output.register(sys.stdout, 0)
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
