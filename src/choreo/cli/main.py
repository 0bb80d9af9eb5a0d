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

  choreo train ALGORITHM ENVIRONMENT [options]    train; shows progress and a table, writes a run folder
  choreo graph ALGORITHM ENVIRONMENT [options]    show the fragmented dataflow graph; with --layout, the plan
  choreo check ALGORITHM ENVIRONMENT [options]    test on a few iterations that the layout changes nothing but time
  choreo evaluate RUN [--episodes 100]            play greedy episodes with the trained parameters
  choreo resume RUN [--steps N]                   continue from the last checkpoint
  choreo replay RUN                               repeat a run from its log; gives the same parameters, bit for bit
  choreo compare RUN RUN ... [-o compare.png]     compare return over steps and time, and speed, as table and picture
  choreo agent --token-file FILE                  start workers on this host for a coordinator on another host
  choreo list algos|envs|layouts                  list the names that Choreo knows

An ALGORITHM is a name (ppo) or a class in a file (my_ppo.py:MyPPO). An ENVIRONMENT is a name (CartPole-v1,
jax:CartPole-v1) or a function in a file (my_env.py:make_env); its arguments are given as --env.key=value. A RUN is a run
folder. --layout takes a name (coarse, seed_rl) or a layout in a file (my_layouts.py:two_stage). For example:

  choreo train ppo jax:CartPole-v1 --layout fused --num-envs 8 --steps 300000 --seed 0 --out runs/x

The run.toml of a run replaces ALGORITHM ENVIRONMENT and all options: choreo train runs/x/run.toml --seed 1
Code that a run.toml names is run only if you wrote the file yourself, or with --trust.

`choreo train --help` lists the options of a run, `choreo train ppo --help` also those of the algorithm.
CHOREO_TRACEBACK=1 shows where in Choreo an error was raised. CHOREO_CACHE=off turns off the cache of compiled programs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 for success, 1 for a failure, 2 for wrong arguments, 130 for Ctrl-C."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _stdout_is_closed():
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
    """The traceback if the user's environment raised the error, in this process or in a worker; for any other error, its notes."""
    cause = error.__cause__
    if cause is None or isinstance(cause, ChoreoError) or not isinstance(error, EnvError):
        notes = getattr(error, "__notes__", [])
        # JAX adds this note to explain a traceback. No traceback is printed here, so leave out the note.
        return [note for note in notes if "JAX has removed its internal frames" not in note]
    import traceback

    return ["".join(traceback.format_exception(cause)).rstrip()]


def _stdout_is_closed() -> bool:
    """Return whether the reader has closed stdout (`choreo ... | head`). If so, also redirect all further output to /dev/null."""
    output = select.poll()
    output.register(sys.stdout, 0)
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
