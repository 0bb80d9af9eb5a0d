"""The command `choreo`.

Options of a run are parsed here; whatever is left are hyper-parameters, the fields of the algorithm's dataclass,
parsed by tyro. Nothing heavy is imported before it is known that it is needed: `choreo --help` answers at once.
"""

import argparse
import dataclasses
import difflib
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from choreo.errors import ChoreoError, EnvError, LayoutError, UnknownNameError

HELP = """\
An RL algorithm is written once, as plain JAX; a layout decides where it runs.

  choreo train ALGORITHM ENVIRONMENT [options]    train, with progress, table and run folder
  choreo graph ALGORITHM ENVIRONMENT [options]    the fragmented dataflow graph; with --layout the plan
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

`choreo train --help` lists the options of a run, `choreo train ppo --help` also those of the algorithm.
CHOREO_TRACEBACK=1 shows where in Choreo an error was raised; CHOREO_CACHE=off keeps no compiled programs.
"""

Main = Callable[[list[str]], int]


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


def _nobody_reads() -> bool:
    """Has whoever read our output had enough, as `head` has? Then there is nobody to tell, and nothing more is written."""
    output = select.poll()
    output.register(sys.stdout, 0)
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


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
            raise UsageError(f"There is no command `{args[0]}`.", fix=_near(args[0], COMMANDS))
        return COMMANDS[args[0]](args[1:])
    except ChoreoError as error:
        if os.environ.get("CHOREO_TRACEBACK") == "1":
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        for note in _traceback_of_the_user(error):
            print(note, file=sys.stderr)
        return 2 if isinstance(error, UsageError | UnknownNameError | LayoutError) else 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def _traceback_of_the_user(error: ChoreoError) -> list[str]:
    """What the user's own code raised, here or in a worker."""
    cause = error.__cause__
    if cause is None or isinstance(cause, ChoreoError) or not isinstance(error, EnvError):
        return list(getattr(error, "__notes__", []))
    import traceback

    return ["".join(traceback.format_exception(cause)).rstrip()]


class UsageError(ChoreoError):
    """The command line makes no sense."""


def train(args: list[str]) -> int:
    """Train an algorithm."""
    parser = _parser("train", "choreo train ALGORITHM ENVIRONMENT|RUN.TOML [options] [hyper-parameters]")
    _add_layout(parser, default="fused")
    add = parser.add_argument
    add("--num-envs", type=_count, default=8, help="environments stepped together (8)")
    add("--steps", type=_count, default=300_000, help="environment steps, rounded up to whole iterations (300000)")
    add("--seed", type=_count, default=0, help="the run's only source of randomness (0)")
    add("--out", type=Path, help="the run folder (runs/ALGORITHM-ENVIRONMENT-SEED, numbered)")
    add("--overwrite", action="store_true", help="replace an earlier run in --out")
    add("--runtime", help="inprocess, or local: worker processes (local if the layout has several sites)")
    add("--cluster", type=Path, help="a cluster.toml: the hosts of worker processes (this machine)")
    add("--env-timeout", type=float, default=60.0, help="seconds after which an environment counts as hanging (60)")
    add("--profile", action="store_true", help="where the time goes, site by site; writes trace.json for Perfetto")
    add("--eval-every", type=_count, help="iterations between evaluations (none)")
    add("--eval-episodes", type=_count, default=20, help="episodes per evaluation during training (20)")
    add("--stop-at-return", type=float, help="end once this return is reached, by evaluation if there is --eval-every")
    add("--checkpoint-every", type=_count, help="iterations between checkpoints (ten per run)")
    add("--init-from", type=Path, help="a run folder: begin with its weights (optimiser and counters start anew)")
    add("--logger", action="append", default=[], help="also log to: tensorboard")
    _add_output(parser)
    options, algo, env = _parse_named(parser, args)

    from choreo.folder import free_folder
    from choreo.training import train as run_training

    layout = _layout(options)
    out = options.out or free_folder(algo, env, options.seed)
    if options.overwrite:
        _remove_run(out, keep=options.init_from)
    return _report(
        out,
        options,
        lambda: run_training(
            algo,
            env,
            steps=options.steps,
            layout=layout,
            seed=options.seed,
            out=out,
            runtime=options.runtime,
            eval_every=options.eval_every,
            eval_episodes=options.eval_episodes,
            stop_at_return=options.stop_at_return,
            checkpoint_every=options.checkpoint_every,
            init_from=options.init_from,
            cluster=options.cluster,
            env_timeout=options.env_timeout,
            profile=options.profile,
            loggers=options.logger,
            progress=not options.quiet,
        ),
    )


def resume(args: list[str]) -> int:
    """Go on from the last checkpoint."""
    parser = _parser("resume", "choreo resume RUN [options]")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--steps", type=_count, help="environment steps in all (those the run was started with)")
    parser.add_argument("--logger", action="append", default=[], help="also log to: tensorboard")
    _add_output(parser)
    options = _parse(parser, args)

    from choreo.training import resume as go_on

    run = lambda: go_on(options.run, steps=options.steps, loggers=options.logger, progress=not options.quiet)  # noqa: E731
    return _report(options.run, options, run)


def replay(args: list[str]) -> int:
    """Run again what is in a folder, by its log, and compare."""
    parser = _parser("replay", "choreo replay RUN [options]")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = _parse(parser, args)

    from choreo.errors import RunError
    from choreo.training import load
    from choreo.training import replay as run_again

    before, again = load(options.run), run_again(options.run, progress=not options.quiet)
    hashes = [run.training_summary["params_hash"] for run in (before, again)]
    if hashes[0] != hashes[1]:
        raise RunError(
            f"The parameters are not those of {options.run}: {hashes[1]} instead of {hashes[0]}.",
            fix="Was it resumed to another number of steps, or are the versions in its run.toml not those installed here?",
        )
    print(f"The same parameters, bit for bit: {hashes[0]}")
    return 0


def evaluate(args: list[str]) -> int:
    """Play greedy episodes with what was trained."""
    parser = _parser("evaluate", "choreo evaluate RUN [options]")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--episodes", type=_count, default=100, help="complete episodes to play (100)")
    parser.add_argument("--seed", type=_count, default=0, help="other episodes for another seed (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = _parse(parser, args)

    from choreo.folder import to_json
    from choreo.training import load

    run = load(options.run)
    result = run.evaluate(options.episodes, seed=options.seed)
    if options.json:
        length = float(result.lengths.mean())
        print(to_json({"return": result.mean, "std": result.std, "episodes": len(result.returns), "length": length}))
    else:
        print(f"{run.recipe.title}  {result}")
    return 0


def graph(args: list[str]) -> int:
    """Print or draw the fragmented dataflow graph, or the plan."""
    parser = _parser("graph", "choreo graph ALGORITHM ENVIRONMENT|RUN.TOML [options] [hyper-parameters]")
    _add_layout(parser, default=None)
    parser.add_argument("--num-envs", type=_count, default=8, help="environments stepped together (8)")
    parser.add_argument("-o", "--out", type=Path, help="write a picture (SVG) instead of printing")
    options, algo, env = _parse_named(parser, args)
    if options.layout is None and (given := _given(options)):
        raise UsageError(f"{_as_flag(next(iter(given)))} belongs to a layout.", fix="Add --layout coarse.")
    _check_out(options.out)

    from choreo.checkpoint import write_atomic
    from choreo.plans import graph as make_graph
    from choreo.plans import plan

    shown = make_graph(algo, env) if options.layout is None else plan(algo, env, _layout(options))
    if options.out is None:
        print(shown)
    else:
        write_atomic(options.out, shown.draw().encode())
        print(f"Wrote {options.out}.")
    return 0


def compare(args: list[str]) -> int:
    """Put runs beside each other."""
    parser = _parser("compare", "choreo compare RUN RUN ... [options]")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders; those still running too. The first is 1x")
    parser.add_argument("--at-return", type=float, help="the return to be reached (the highest that every run reached)")
    parser.add_argument("-o", "--out", type=Path, help="also write a picture (PNG)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = _parse(parser, args)
    if len(options.runs) < 2:
        raise UsageError("`choreo compare` needs two runs or more.", fix=f"See `{parser.prog} --help`.")
    _check_out(options.out)

    from rich.console import Console

    from choreo import report
    from choreo.compare import Comparison
    from choreo.folder import to_json

    comparison = Comparison.of(options.runs, at_return=options.at_return)
    if options.json:
        print(to_json(comparison.to_dict()))
    else:
        Console(highlight=False).print(comparison.table())
    if options.out is not None:
        report.save_png(comparison.figure(), options.out)
        print(f"Wrote {options.out}.", file=sys.stderr if options.json else sys.stdout)
    return 0


def agent(args: list[str]) -> int:
    """Start workers on this host for coordinators elsewhere."""
    parser = _parser("agent", "choreo agent --token-file FILE [options]")
    parser.add_argument("--address", default="0.0.0.0", help="where to listen (0.0.0.0: everywhere)")
    parser.add_argument("--port", type=_count, default=7000, help="the port of `cluster.toml` (7000)")
    parser.add_argument("--token-file", type=Path, required=True, help="the secret, the same on every host")
    options = _parse(parser, args)

    from choreo.cluster import Cluster, Host
    from choreo.runtime.agent import serve

    token = Cluster(hosts=(Host(address=options.address),), token_file=options.token_file).token()
    assert token is not None
    return serve(options.address, options.port, token)


def show_list(args: list[str]) -> int:
    """Print what there is of a kind."""
    parser = _parser("list", "choreo list algos|envs|layouts")
    parser.add_argument("kind", choices=("algos", "envs", "layouts"))
    options = _parse(parser, args)

    from choreo import algos, envs, registry
    from choreo.layouts import PRESETS

    known = {"algos": algos.ALGOS, "envs": dict.fromkeys(envs.names()), "layouts": PRESETS}[options.kind]
    _print_columns({name: registry.summary_line(value) if value else "" for name, value in known.items()})
    if options.kind == "layouts":
        print("\nother names:")
        _print_columns(_other_names())
    return 0


def _other_names() -> dict[str, str]:
    """Aliases, those of one preset together, and what they stand for."""
    from choreo import registry
    from choreo.layouts import ALIASES, PRESETS

    presets = {preset: name for name, preset in PRESETS.items()}
    named: dict[str, list[str]] = {}
    for alias, make in ALIASES.items():
        named.setdefault(presets.get(make) or registry.summary_line(make), []).append(alias)
    return {", ".join(aliases): what for what, aliases in named.items()}


def _print_columns(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name:<{width}}  {text}".rstrip())


COMMANDS: dict[str, Main] = {
    "train": train,
    "graph": graph,
    "evaluate": evaluate,
    "resume": resume,
    "replay": replay,
    "compare": compare,
    "agent": agent,
    "list": show_list,
}


def _report(out: Path, options: argparse.Namespace, run_training: Callable[[], Any]) -> int:
    """Train, then print the table, or with --json one line; on Ctrl-C, say what is left."""
    from rich.console import Console

    from choreo import report
    from choreo.folder import RunFolder, to_json

    try:
        run = run_training()
    except KeyboardInterrupt:
        from choreo.checkpoint import iteration

        file = RunFolder(out).checkpoint
        if file.is_file():
            print(f"Interrupted. Last checkpoint: {file} (iteration {iteration(file)}).", file=sys.stderr)
            print(f"Go on with `choreo resume {out}`.", file=sys.stderr)
        else:
            print("Interrupted before the first checkpoint.", file=sys.stderr)
        return 130
    summary = run.summary
    table = report.summary_table(summary, title=run.recipe.title, folder=run.path)
    console = Console(stderr=options.json, highlight=False)
    console.print(table)
    if run.profile is not None:
        console.print(report.profile_table(run.profile))
        console.print(run.profile.verdict)
    if options.json:
        print(to_json(summary | {"path": str(run.path)}))
    return 0


def _parser(command: str, usage: str) -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message[0].upper()}{message[1:]}.", fix=f"See `choreo {command} --help`.")

    parser = Parser(prog=f"choreo {command}", usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this")
    return parser


def _add_layout(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    add = parser.add_argument
    words = "where it runs: a name of `choreo list layouts`, or a layout of yours, my_layouts.py:two_stage"
    add("--layout", default=default, help=f"{words} ({default or 'none'})")
    add("--workers", type=_count, help="replicas of the layout's first replicated group")
    add("--learners", type=_count, help="replicas of its learner, where there may be several")
    add("--buffers", type=_count, help="replicas of its replay, where there may be several")
    add("--devices", type=_count, help="devices of one site, among which its work is divided")
    add("--shards", type=_count, help="learner shards S: part of the results, unlike workers, learners and devices")
    add("--max-lag", type=_count, help="by how many updates what a worker reads may be out of date (0, lockstep)")
    add("--merge", help="all: learn once every worker's part is there; any: from each part as it arrives (all)")
    exact = "the same result, bit for bit, for any number of workers"
    add("--exact", action=argparse.BooleanOptionalAction, default=None, help=exact)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="last line of stdout: one JSON object; the rest to stderr")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _parse(parser: argparse.ArgumentParser, args: list[str]) -> argparse.Namespace:
    if "-h" in args or "--help" in args:
        parser.print_help()
        raise SystemExit(0)
    options, left = parser.parse_known_args(args)
    if left:
        raise _unknown_option(left[0], _flags(parser))
    return options


def _parse_named(parser: argparse.ArgumentParser, args: list[str]) -> tuple[argparse.Namespace, Any, Any]:
    """The options of the command, the algorithm with its hyper-parameters, and the environments.

    The first arguments are the names of both, or the run.toml of a run, whose options then are the defaults.
    """
    names = []
    while args and len(names) < 2 and not args[0].startswith("-"):
        names.append(args.pop(0))
    recipe = _recipe(names, parser)
    if "-h" in args or "--help" in args:
        parser.print_help()
        if names:
            print(f"\nhyper-parameters of {names[0]}:\n")
            _hyperparameters(names[0], ["--help"], parser, recipe)
        raise SystemExit(0)
    if len(names) < 2 and recipe is None:
        raise UsageError(
            f"`{parser.prog}` needs an algorithm and an environment, in this order, before any option.",
            fix=f"For example: {parser.prog} ppo jax:CartPole-v1",
        )
    args, settings = _env_settings(args)
    options, left = parser.parse_known_args(args)
    algo = _hyperparameters(names[0], left, parser, recipe)

    from choreo import registry

    env = registry.environment(names[1] if recipe is None else recipe.env, options.num_envs, **settings)
    return options, algo, env


def _env_settings(args: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The arguments without `--env.key=value`, and these: a value is read as Python, or is a text."""
    import ast

    rest, settings = [], {}
    for arg in args:
        if not arg.startswith("--env."):
            rest.append(arg)
            continue
        key, equals, value = arg.removeprefix("--env.").partition("=")
        name = key.replace("-", "_")
        if not equals or not name.isidentifier():
            raise UsageError(f"`{arg}` is no argument of an environment.", fix="Write --env.difficulty=3")
        if name == "num_envs":
            raise UsageError("How many environments there are is an option of the run.", fix="Write --num-envs 8")
        try:
            settings[name] = ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
        except (SyntaxError, ValueError):
            settings[name] = value
    return rest, settings


def _recipe(names: list[str], parser: argparse.ArgumentParser) -> Any:
    """The recipe in the run.toml that is named, if one is; its options become the defaults of the command."""
    if not names or not (names[0].endswith(".toml") or Path(names[0], "run.toml").is_file()):
        return None
    if not names[0].endswith(".toml"):
        raise UsageError(f"`{names[0]}` is a run folder.", fix=f"Name its file: {parser.prog} {names[0]}/run.toml")
    if len(names) > 1:
        raise UsageError(
            f"`{names[1]}` is one argument too many: {names[0]} says which environment.",
            fix="Give the algorithm and the environment by name, or only the file.",
        )

    from choreo.folder import read_toml
    from choreo.recipe import Recipe

    file = Path(names[0])
    recipe = Recipe.from_toml(read_toml(file), file=file)
    options = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    parser.set_defaults(**options, num_envs=None)
    return recipe


def _hyperparameters(name: str, args: list[str], parser: argparse.ArgumentParser, recipe: Any) -> Any:
    import tyro

    from choreo import registry

    cls = registry.algorithm_class(name) if recipe is None else type(recipe.algo)
    fields = {f"--{field.name.replace('_', '-')}": field for field in dataclasses.fields(cls)}
    known = {*fields, *(f"--no-{flag[2:]}" for flag, field in fields.items() if field.type in (bool, "bool"))}
    for arg in args:
        flag = arg.split("=", 1)[0].replace("_", "-")
        if flag.startswith("--") and flag not in {*known, "--help"}:
            raise _unknown_option(flag, known | _flags(parser))
    if recipe is None:
        return registry.algorithm(tyro.cli(cls, args=args, prog=f"{parser.prog} {name} ENVIRONMENT"))
    return registry.algorithm(tyro.cli(cls, args=args, prog=f"{parser.prog} {name}", default=recipe.algo))


LAYOUT_OPTIONS = ("workers", "learners", "buffers", "devices", "shards", "max_lag", "merge", "exact")
"""What a layout may be made with."""


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a layout that were given."""
    return {name: value for name in LAYOUT_OPTIONS if (value := getattr(options, name)) is not None}


def _layout(options: argparse.Namespace) -> Any:
    """The layout by name, or that of a run, of which only what is given is changed."""
    from choreo import registry

    layout, given = options.layout, _given(options)
    if isinstance(layout, str) or not given:
        return registry.layout(layout, **given)
    before = registry.made_with(layout)
    if before is None:
        raise UsageError(
            f"{_as_flag(next(iter(given)))} cannot change the layout of this run, which is not one of Choreo's.",
            fix="Name a layout as well: --layout coarse --workers 2",
        )
    return registry.layout(layout.name, **before | given)


def _as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}


def _unknown_option(flag: str, known: set[str]) -> UsageError:
    what = f"There is no option `{flag}`." if flag.startswith("-") else f"`{flag}` is one argument too many."
    return UsageError(what, fix=_near(flag, known))


def _near(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    return f"Did you mean {' or '.join(f'`{c}`' for c in close)}?" if close else "See `choreo --help`."


def _count(text: str) -> int:
    """A whole number; 300_000 and 3e5 are welcome."""
    try:
        value = float(text) if "e" in text.lower() else int(text)
        if value != int(value):
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"`{text}` is no whole number") from None
    return int(value)


def _check_out(file: Path | None) -> None:
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"There is no folder {file.parent}.", fix="Make it first, or choose another -o.")


def _remove_run(folder: Path, *, keep: Any) -> None:
    """Remove an earlier run; anything else in its place is left for `train` to refuse."""
    import shutil

    from choreo.folder import RunFolder

    if keep is not None:
        kept = RunFolder(getattr(keep, "path", keep))
        kept.check_run()
        if kept.path.resolve().is_relative_to(folder.resolve()):
            raise UsageError(
                f"--overwrite would remove {kept.path}, the run of --init-from.", fix="Choose another --out."
            )
    if RunFolder(folder).recipe.is_file():
        RunFolder(folder).check_not_in_use()
        shutil.rmtree(folder)
