"""The commands of `choreo`: each parses its arguments, does its work and returns the exit code.

argparse parses the options of a run. All other options are hyper-parameters: fields of the algorithm's dataclass, which tyro
parses. Heavy modules are imported inside the functions. So `choreo --help` and the error for a wrong value of an option do not
wait for JAX. The error for an unknown option waits for JAX if the command takes hyper-parameters.
"""

import argparse
import itertools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from choreo.cli.arguments import (
    UsageError,
    add_layout,
    add_output,
    add_trust,
    as_flag,
    count,
    layout_given,
    layout_of,
    make_parser,
    parse,
    parse_named,
)
from choreo.errors import RunError, printable


def train(args: list[str]) -> int:
    """Train an algorithm."""
    parser = make_parser("train", "choreo train ALGORITHM ENVIRONMENT|RUN.TOML [options] [hyper-parameters]")
    add_layout(parser, default="fused")
    add = parser.add_argument
    add("--num-envs", type=count, default=8, help="environments stepped together (8)")
    add(
        "--steps",
        type=count,
        default=300_000,
        help="environment steps, rounded up; iterations, if an iteration takes no environment steps (300000)",
    )
    add("--seed", type=count, default=0, help="the run's only source of randomness (0)")
    add(
        "--out",
        type=Path,
        help="the run folder (runs/ALGORITHM-ENVIRONMENT-SEED; if it exists, with a number appended)",
    )
    add("--overwrite", action="store_true", help="replace an earlier run in --out")
    add("--runtime", help="inprocess, or local for worker processes (local if the layout has several sites)")
    add("--cluster", type=Path, help="a cluster.toml, which names the hosts of worker processes (this machine)")
    add("--env-timeout", type=float, default=60.0, help="seconds after which an environment counts as hanging (60)")
    add(
        "--silence", type=float, default=300.0, help="seconds after which a worker without a sign of life is dead (300)"
    )
    add("--profile", action="store_true", help="show how each site spends its time; writes trace.json for Perfetto")
    add("--allow-versions", action="store_true", help="accept hosts whose versions differ from those of this machine")
    add("--same-bits", action="store_true", help="refuse hosts whose CPU or XLA_FLAGS may round differently")
    add(
        "--trust-network",
        action="store_true",
        help="let learners on different hosts combine gradients without encryption",
    )
    add("--eval-every", type=count, help="iterations between evaluations (none)")
    add("--eval-episodes", type=count, default=20, help="episodes per evaluation during training (20)")
    add(
        "--stop-at-return",
        type=float,
        help="end the run at this training return, or at this evaluation return if --eval-every is given",
    )
    add("--checkpoint-every", type=count, help="iterations between checkpoints (ten per run)")
    add("--init-from", type=Path, help="a run folder: begin with its weights; optimiser and counters start anew")
    add("--logger", action="append", default=[], help="also log to: tensorboard")
    add_trust(parser)
    add_output(parser)
    typed = list(args)
    options, algo, env = parse_named(parser, args)

    from choreo.runs.folder import free_folder
    from choreo.runs.training import train as run_training

    layout = layout_of(options)
    out = options.out or free_folder(algo, env, options.seed)
    if options.overwrite:
        _remove_run(out, keep=options.init_from)
    code = _report(
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
            silence=options.silence,
            profile=options.profile,
            allow_versions=options.allow_versions,
            same_bits=options.same_bits,
            trust_network=options.trust_network,
            loggers=options.logger,
            progress=not options.quiet,
        ),
    )
    if not code and not options.quiet and not options.json and not type(algo).__module__.startswith("choreo."):
        print(f"To test that the layout changes nothing but time: `{_check_command(typed, options)}`.", file=sys.stderr)
    return code


def _remove_run(folder: Path, *, keep: Any) -> None:
    """Remove an earlier run in `folder`. A folder without a run is kept: `train` refuses such a folder.

    `keep`: the run of --init-from, which must not be removed.
    """
    import shutil

    from choreo.runs.folder import RunFolder

    if keep is not None:
        kept = RunFolder(getattr(keep, "path", keep))
        kept.check_run()
        if kept.path.resolve().is_relative_to(folder.resolve()):
            raise UsageError(
                f"--overwrite would remove {kept.path}, the run of --init-from.", fix="Choose another --out."
            )
    if RunFolder(folder).config_file.is_file():
        RunFolder(folder).check_not_in_use()
        shutil.rmtree(folder)


def _check_command(typed: list[str], options: argparse.Namespace) -> str:
    """The command `choreo check` with the names and the layout that were given to `choreo train`."""
    names = list(itertools.takewhile(lambda arg: not arg.startswith("-"), typed[:2]))
    given = layout_given(options)
    if isinstance(options.layout, str):
        given = {"layout": options.layout, **given}
    flags = [
        text
        for name, value in given.items()
        for text in ([as_flag(name), str(value)] if not isinstance(value, bool) else [as_flag(name)] * value)
    ]
    return shlex.join(["choreo", "check", *names, *(arg for arg in typed if arg.startswith("--env.")), *flags])


def resume(args: list[str]) -> int:
    """Continue a run from its last checkpoint."""
    parser = make_parser("resume", "choreo resume RUN [options]")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--steps", type=count, help="total environment steps (as many as the run was started with)")
    parser.add_argument("--logger", action="append", default=[], help="also log to: tensorboard")
    add_trust(parser)
    add_output(parser)
    options = parse(parser, args)

    from choreo.runs.training import resume as run_training

    settings = {"steps": options.steps, "trust": options.trust, "loggers": options.logger}
    return _report(options.run, options, lambda: run_training(options.run, **settings, progress=not options.quiet))


def _report(out: Path, options: argparse.Namespace, run_training: Callable[[], Any]) -> int:
    """Train, then print the final table; with --json, also one line of JSON. On Ctrl-C, print where the last checkpoint is."""
    from rich.console import Console

    from choreo.runs import figures
    from choreo.runs.folder import RunFolder, to_json

    try:
        run = run_training()
    except KeyboardInterrupt:
        from choreo.runs.checkpoint import iteration

        file = RunFolder(out).checkpoint
        if file.is_file():
            print(printable(f"Interrupted. Last checkpoint: {file} (iteration {iteration(file)})."), file=sys.stderr)
            print(printable(f"Continue with `choreo resume {out}`."), file=sys.stderr)
        else:
            print("Interrupted before the first checkpoint.", file=sys.stderr)
        return 130
    summary = run.summary
    table = figures.summary_table(summary, title=run.config.title, folder=run.path)
    console = Console(stderr=options.json, highlight=False)
    console.print(table)
    if run.profile is not None:
        console.print(figures.profile_table(run.profile))
        console.print(run.profile.verdict)
    if options.json:
        print(to_json(summary | {"path": str(run.path)}))
    return 0


def replay(args: list[str]) -> int:
    """Repeat a run from its log, and compare the parameters."""
    parser = make_parser("replay", "choreo replay RUN [options]")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_trust(parser)
    options = parse(parser, args)

    from choreo.runs.training import load
    from choreo.runs.training import replay as run_again

    before = load(options.run, trust=options.trust)
    again = run_again(options.run, trust=options.trust, progress=not options.quiet)
    hashes = [run.training_summary["params_hash"] for run in (before, again)]
    if hashes[0] != hashes[1]:
        raise RunError(
            f"The parameters are not those of {options.run}: their hash is {hashes[1]}, not {hashes[0]}.",
            fix="Was the run resumed with a different --steps? Do the installed versions differ from those in its run.toml?",
        )
    print(f"The same parameters, bit for bit: {hashes[0]}")
    return 0


def evaluate(args: list[str]) -> int:
    """Play greedy episodes with the trained parameters."""
    parser = make_parser("evaluate", "choreo evaluate RUN [options]")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--episodes", type=count, default=100, help="complete episodes to play (100)")
    parser.add_argument("--seed", type=count, default=0, help="a different seed gives different episodes (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_trust(parser)
    options = parse(parser, args)

    from choreo.runs.folder import to_json
    from choreo.runs.training import load

    run = load(options.run, trust=options.trust)
    result = run.evaluate(options.episodes, seed=options.seed)
    if options.json:
        length = float(result.lengths.mean())
        print(to_json({"return": result.mean, "std": result.std, "episodes": len(result.returns), "length": length}))
    else:
        print(printable(f"{run.config.title}  {result}"))
    return 0


def graph(args: list[str]) -> int:
    """Print or draw the fragmented dataflow graph, or the plan."""
    parser = make_parser("graph", "choreo graph ALGORITHM ENVIRONMENT|RUN.TOML [options] [hyper-parameters]")
    add_layout(parser, default=None)
    parser.add_argument("--num-envs", type=count, default=8, help="environments stepped together (8)")
    parser.add_argument("-o", "--out", type=Path, help="write a picture (SVG) instead of printing")
    parser.add_argument("--json", action="store_true", help="print the costs of the plan as one JSON object")
    add_trust(parser)
    options, algo, env = parse_named(parser, args)
    given = [*layout_given(options), *(["json"] if options.json else [])]
    if options.layout is None and given:
        raise UsageError(f"{as_flag(given[0])} needs --layout.", fix="Add --layout coarse.")
    if options.json and options.out is not None:
        raise UsageError("--json prints, and -o writes a picture.", fix="Use one of the two.")
    _check_out(options.out)

    from choreo.plans.build import graph as make_graph
    from choreo.plans.build import plan
    from choreo.plans.plan import Plan
    from choreo.runs.folder import to_json
    from choreo.runs.safe_files import write_atomic

    shown = make_graph(algo, env) if options.layout is None else plan(algo, env, layout_of(options))
    if options.json and isinstance(shown, Plan):
        print(to_json({"plan": shown.name} | shown.costs().to_dict()))
    elif options.out is None:
        print(printable(str(shown)))
    else:
        write_atomic(options.out, shown.draw().encode())
        print(printable(f"Wrote {options.out}."))
    return 0


def _check_out(file: Path | None) -> None:
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"There is no folder {file.parent}.", fix="Make it first, or choose another -o.")


def check(args: list[str]) -> int:
    """Compare a few small iterations in a layout with `jax.jit(iterate)`; returns 1 if they differ more than allowed."""
    parser = make_parser("check", "choreo check ALGORITHM ENVIRONMENT|RUN.TOML [options] [hyper-parameters]")
    add_layout(parser, default="fused")
    add = parser.add_argument
    add("--num-envs", type=count, help="environments stepped together (few)")
    add("--iterations", type=count, default=3, help="iterations (3)")
    add(
        "--tolerance",
        type=float,
        help="the largest difference allowed (0 or 1e-5, depending on the layout: docs/law.md)",
    )
    add("--seed", type=count, default=0, help="seed of all random numbers (0)")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add_trust(parser)
    options, algo, env = parse_named(parser, args)
    if options.iterations < 1:
        raise UsageError(f"--iterations {options.iterations} compares nothing.", fix="Give 1 or more.")
    if options.tolerance is not None and not options.tolerance >= 0:
        raise UsageError(
            f"--tolerance {options.tolerance} is neither 0 nor positive.",
            fix="Give 0 to require the same bits, or a positive number.",
        )

    from rich.console import Console

    from choreo.cli.check import Verdict
    from choreo.runs.folder import to_json

    verdict = Verdict.of(
        algo,
        env,
        layout_of(options),
        num_envs=options.num_envs,
        iterations=options.iterations,
        tolerance=options.tolerance,
        seed=options.seed,
    )
    if options.json:
        print(to_json(verdict.to_dict()))
    else:
        print(printable(verdict.title))
        Console(highlight=False).print(verdict.table())
    for warning in verdict.warnings:
        print(printable(f"Warning: {warning}"), file=sys.stderr)
    if verdict.error is not None:
        print(printable(f"PartitionError: {verdict.error}"), file=sys.stderr)
        return 1
    if not options.json:
        print(verdict.conclusion)
    return 0


def compare(args: list[str]) -> int:
    """Compare runs, as a table and as a picture."""
    parser = make_parser("compare", "choreo compare RUN RUN ... [options]")
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="run folders of finished or unfinished runs; speed-ups are relative to the first",
    )
    parser.add_argument(
        "--at-return", type=float, help="compare the times to reach this return (the highest that every run reached)"
    )
    parser.add_argument("-o", "--out", type=Path, help="also write a picture (PNG)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parse(parser, args)
    if len(options.runs) < 2:
        raise UsageError("`choreo compare` needs two runs or more.", fix=f"See `{parser.prog} --help`.")
    _check_out(options.out)

    from rich.console import Console

    from choreo.runs import figures
    from choreo.runs.compare import Comparison
    from choreo.runs.folder import to_json

    comparison = Comparison.of(options.runs, at_return=options.at_return)
    if options.json:
        print(to_json(comparison.to_dict()))
    else:
        Console(highlight=False).print(comparison.table())
    if options.out is not None:
        figures.save_png(comparison.figure(), options.out)
        print(printable(f"Wrote {options.out}."), file=sys.stderr if options.json else sys.stdout)
    return 0


def agent(args: list[str]) -> int:
    """Start workers on this host for coordinators on other hosts."""
    from choreo.runtime.coordinator.cluster import LOOPBACK, Cluster, Host

    parser = make_parser("agent", "choreo agent --token-file FILE [options]")
    parser.add_argument("--address", default=LOOPBACK, help=f"the address of this host at which to listen ({LOOPBACK})")
    parser.add_argument("--port", type=count, default=7000, help="the port to listen on, as in `cluster.toml` (7000)")
    parser.add_argument("--token-file", type=Path, required=True, help="a file with the secret that all hosts share")
    options = parse(parser, args)

    from choreo.runtime.coordinator.agent import serve

    token = Cluster(hosts=(Host(address=options.address),), token_file=options.token_file).token()
    assert token is not None
    return serve(options.address, options.port, token)


def show_list(args: list[str]) -> int:
    """Print the names of the built-in algorithms, environments or layouts."""
    parser = make_parser("list", "choreo list algos|envs|layouts")
    parser.add_argument("kind", choices=("algos", "envs", "layouts"))
    options = parse(parser, args)

    from choreo import algos, envs
    from choreo.layouts import PRESETS
    from choreo.runs import resolve

    known = {"algos": algos.ALGOS, "envs": dict.fromkeys(envs.names()), "layouts": PRESETS}[options.kind]
    _print_columns({name: resolve.summary_line(value) if value else "" for name, value in known.items()})
    if options.kind == "layouts":
        print("\nother names:")
        _print_columns(_other_names())
    return 0


def _other_names() -> dict[str, str]:
    """Aliases of layouts, and what they mean: a preset or a description. Aliases with the same meaning share one key."""
    from choreo.layouts import ALIASES, PRESETS
    from choreo.runs import resolve

    presets = {preset: name for name, preset in PRESETS.items()}
    named: dict[str, list[str]] = {}
    for alias, make in ALIASES.items():
        named.setdefault(presets.get(make) or resolve.summary_line(make), []).append(alias)
    return {", ".join(aliases): what for what, aliases in named.items()}


def _print_columns(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name:<{width}}  {text}".rstrip())


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "graph": graph,
    "check": check,
    "evaluate": evaluate,
    "resume": resume,
    "replay": replay,
    "compare": compare,
    "agent": agent,
    "list": show_list,
}
"""The commands by name. Each takes its arguments and returns the exit code."""
