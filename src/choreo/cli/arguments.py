"""Parse the arguments of commands: names of an algorithm and an environment, options of a run, hyper-parameters.

Heavy modules are imported inside the functions that need them, so that `choreo --help` does not wait for JAX.
"""

import argparse
import dataclasses
import difflib
from pathlib import Path
from typing import Any, NoReturn

from choreo.errors import ChoreoError


class UsageError(ChoreoError):
    """The arguments of a command are wrong."""


def make_parser(command: str, usage: str) -> argparse.ArgumentParser:
    """A parser that raises UsageError for wrong arguments; argparse itself would print the usage and exit."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message[0].upper()}{message[1:]}.", fix=f"See `choreo {command} --help`.")

    parser = Parser(prog=f"choreo {command}", usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this")
    return parser


def add_layout(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    add = parser.add_argument
    words = "where the algorithm runs: a name that `choreo list layouts` prints, or your own: my_layouts.py:two_stage"
    add("--layout", default=default, help=f"{words} ({default or 'none'})")
    add("--workers", type=count, help="replicas of the layout's first replicated group")
    add("--learners", type=count, help="replicas of the learner, in a layout that may have several")
    add("--buffers", type=count, help="replicas of the replay, in a layout that may have several")
    add("--devices", type=count, help="devices that share the work of one site")
    add("--shards", type=count, help="learner shards S; they change the results, unlike workers, learners and devices")
    add("--max-lag", type=count, help="how many updates old the parameters that a worker reads may be (0, lockstep)")
    add("--merge", help="all: learn from all workers' parts together; any: from each part as it arrives (all)")
    exact = "the same result, bit for bit, for any number of workers"
    add("--exact", action=argparse.BooleanOptionalAction, default=None, help=exact)


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the code that a run.toml names, even if this account did not write the file",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="write one JSON object as the last line of stdout; everything else goes to stderr",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def parse(parser: argparse.ArgumentParser, args: list[str]) -> argparse.Namespace:
    if "-h" in args or "--help" in args:
        parser.print_help()
        raise SystemExit(0)
    options, left = parser.parse_known_args(args)
    if left:
        raise _unknown_option(left[0], _flags(parser))
    return options


def parse_named(parser: argparse.ArgumentParser, args: list[str]) -> tuple[argparse.Namespace, Any, Any]:
    """Returns the options of the command, the algorithm with its hyper-parameters, and the environments.

    The first arguments are the names of algorithm and environment, or the path of a run.toml. The options in a run.toml
    become the defaults.
    """
    names = []
    while args and len(names) < 2 and not args[0].startswith("-"):
        names.append(args.pop(0))
    config = _read_config(names, parser, trust="--trust" in args)
    if "-h" in args or "--help" in args:
        parser.print_help()
        if names:
            print(f"\nhyper-parameters of {names[0]}:\n")
            _hyperparameters(names[0], ["--help"], parser, config)
        raise SystemExit(0)
    if len(names) < 2 and config is None:
        raise UsageError(
            f"`{parser.prog}` needs an algorithm and an environment, in this order, before any option.",
            fix=f"For example: {parser.prog} ppo jax:CartPole-v1",
        )
    args, settings = env_settings(args)
    options, left = parser.parse_known_args(args)
    algo = _hyperparameters(names[0], left, parser, config)

    from choreo.runs import resolve

    env = resolve.environment(names[1] if config is None else config.env, options.num_envs, **settings)
    return options, algo, env


def env_settings(args: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Returns the arguments without `--env.key=value`, and a dict with all `key: value`.

    A value that is not a Python literal stays a text.
    """
    import ast

    rest, settings = [], {}
    for arg in args:
        if not arg.startswith("--env."):
            rest.append(arg)
            continue
        key, equals, value = arg.removeprefix("--env.").partition("=")
        name = key.replace("-", "_")
        if not equals or not name.isidentifier():
            raise UsageError(f"`{arg}` is not an argument of an environment.", fix="Write --env.difficulty=3")
        if name == "num_envs":
            raise UsageError("The number of environments is an option of the run.", fix="Write --num-envs 8")
        try:
            settings[name] = ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
        except (SyntaxError, ValueError):
            settings[name] = value
    return rest, settings


def _read_config(names: list[str], parser: argparse.ArgumentParser, *, trust: bool) -> Any:
    """Returns the RunConfig in the run.toml that `names` contains, or None if `names` contains none.

    The options in the run.toml become the defaults of `parser`.
    """
    if not names or not (names[0].endswith(".toml") or Path(names[0], "run.toml").is_file()):
        if trust:
            raise UsageError(
                "--trust is only for a run.toml; code that you name yourself is always run.", fix="Leave out --trust."
            )
        return None
    if not names[0].endswith(".toml"):
        raise UsageError(f"`{names[0]}` is a run folder.", fix=f"Name its file: {parser.prog} {names[0]}/run.toml")
    if len(names) > 1:
        raise UsageError(
            f"`{names[1]}` is one argument too many: {names[0]} already names the environment.",
            fix="Give the algorithm and the environment by name, or only the file.",
        )

    from choreo.runs.config import RunConfig

    config = RunConfig.read(Path(names[0]), trust=trust)
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    parser.set_defaults(**options, num_envs=None)
    return config


def _hyperparameters(name: str, args: list[str], parser: argparse.ArgumentParser, config: Any) -> Any:
    import tyro

    from choreo.runs import resolve

    cls = resolve.algorithm_class(name) if config is None else type(config.algo)
    fields = {f"--{field.name.replace('_', '-')}": field for field in dataclasses.fields(cls)}
    known = {*fields, *(f"--no-{flag[2:]}" for flag, field in fields.items() if field.type in (bool, "bool"))}
    for arg in args:
        flag = arg.split("=", 1)[0].replace("_", "-")
        if flag.startswith("--") and flag not in {*known, "--help"}:
            raise _unknown_option(flag, known | _flags(parser))
    if config is None:
        return resolve.algorithm(tyro.cli(cls, args=args, prog=f"{parser.prog} {name} ENVIRONMENT"))
    return resolve.algorithm(tyro.cli(cls, args=args, prog=f"{parser.prog} {name}", default=config.algo))


LAYOUT_OPTIONS = ("workers", "learners", "buffers", "devices", "shards", "max_lag", "merge", "exact")
"""Names of the options that layouts take."""


def layout_given(options: argparse.Namespace) -> dict[str, Any]:
    """The layout options that the user gave."""
    return {name: value for name in LAYOUT_OPTIONS if (value := getattr(options, name)) is not None}


def layout_of(options: argparse.Namespace) -> Any:
    """The layout that the user named. If a run.toml names the layout, the given layout options replace those in the file."""
    from choreo.runs import resolve

    layout, given = options.layout, layout_given(options)
    if isinstance(layout, str) or not given:
        return resolve.layout(layout, **given)
    before = resolve.made_with(layout)
    if before is None:
        raise UsageError(
            f"{as_flag(next(iter(given)))} cannot change the layout of this run, because the layout is not a preset of Choreo.",
            fix="Also name a layout: --layout coarse --workers 2",
        )
    return resolve.layout(layout.name, **before | given)


def as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}


def _unknown_option(flag: str, known: set[str]) -> UsageError:
    what = f"There is no option `{flag}`." if flag.startswith("-") else f"`{flag}` is one argument too many."
    return UsageError(what, fix=near(flag, known))


def near(name: str, known: Any) -> str:
    """A hint for a wrong name: the nearest known names."""
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    return f"Did you mean {' or '.join(f'`{c}`' for c in close)}?" if close else "See `choreo --help`."


def count(text: str) -> int:
    """Parse an integer; 300_000 and 3e5 are accepted too."""
    try:
        value = float(text) if "e" in text.lower() else int(text)
        if value != int(value):
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number") from None
    return int(value)
