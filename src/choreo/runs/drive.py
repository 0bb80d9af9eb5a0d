"""The loop of a run. It runs iterations up to the next boundary, and there it evaluates, writes, stops or saves.

    plan      check the parts of the algorithm, trace, plan: nothing is written before these succeed
    open      run folder, loggers, runtime: closed in reverse order, also after an error
    loop      run to the next boundary ──► evaluate ──► write rows ──► tell subscribers ──► stop? ──► checkpoint
    finish    timing, profile, learning curve, summary

Everything that happens becomes an event (`choreo.runs.events`): the progress line, loggers and callbacks are subscribers.

Boundaries are iteration numbers that follow from the configuration, never times. Between two boundaries, nothing reads the
state of a run, and only an error or Ctrl-C can end the run. So a resumed run gives the same bits as a run
that was never interrupted.
"""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from choreo.errors import ChoreoWarning, DivergedError, RunError
from choreo.partition.trace import Traced
from choreo.plans import build
from choreo.plans.plan import Plan
from choreo.runs import algorithm_checks, checkpoint
from choreo.runs.clock import Clock
from choreo.runs.config import RunConfig
from choreo.runs.episode_returns import EpisodeReturns, measures_episodes
from choreo.runs.evaluation import evaluate
from choreo.runs.events import (
    BoundaryReached,
    CheckpointSaved,
    EvaluationDone,
    EventStream,
    IterationDone,
    OnIteration,
    RunBegan,
    Subscriber,
    WarningGiven,
    WorkerOutput,
    WorkerStates,
    each_iteration,
    name_of_subscriber,
)
from choreo.runs.folder import Row, RunFolder, to_json
from choreo.runs.loggers import Logger, make_loggers, rows_to
from choreo.runs.progress import Progress
from choreo.runs.rows import NotFinite, first_not_finite, make_rows
from choreo.runs.run import Run, Timing
from choreo.runs.warm_start import Weights
from choreo.runtime.base import Runtime
from choreo.runtime.compilation_cache import use_compilation_cache
from choreo.runtime.coordinator.cluster import Cluster
from choreo.runtime.coordinator.silence import Silence
from choreo.runtime.engine.profile import Profile
from choreo.runtime.engine.schedule import VersionRead
from choreo.runtime.make import make_runtime
from choreo.types import PyTree


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where the loop begins."""

    done: int
    """Iterations already run."""
    rows: list[Row]
    """The metrics of these iterations."""
    carry: PyTree | None
    """The state after these iterations; None: run `init`."""
    weights: Weights | None = None
    """Weights that replace the weights from `init`."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is executed. In lockstep, results do not depend on these options, except that other hosts may round differently."""

    env_timeout_s: float = 60.0
    """Seconds after which an environment that does not return counts as hanging."""
    silence: Silence = Silence()
    """How long a worker may be silent before a message names it, and before it counts as dead."""
    profile: bool = False
    """Whether to record a timeline of each site's work."""
    cluster: Cluster | None = None
    """The hosts of workers; None: this machine."""
    allow_versions: bool = False
    """Whether to accept hosts whose versions differ from those of this machine."""
    same_bits: bool = False
    """Whether to refuse hosts whose CPU or XLA_FLAGS may round differently."""
    trust_network: bool = False
    """Whether learners on different machines may combine gradients over connections that are not encrypted."""
    replay: list[VersionRead] | None = None
    """The log of an earlier relaxed run. This run reads parameters of the same age at the same places, and gives the same bits."""


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """The loggers, callbacks and subscribers of a run, as the user gave them."""

    loggers: Sequence[str | Logger] = ()
    """Loggers, or their names."""
    on_iteration: OnIteration | None = None
    """The callback for each iteration."""
    subscribers: Sequence[Subscriber] = ()
    """Called with every event."""
    progress: bool | None = None
    """Whether progress is shown; None: only in a terminal."""


def drive(config: RunConfig, folder: RunFolder | None, start: Start, options: RunOptions, watchers: Watchers) -> Run:
    """Run the iterations from `start` to the end of the run; returns the finished run."""
    clock = Clock(earlier_seconds=start.rows[-1]["seconds"] if start.rows else 0.0)
    use_compilation_cache()
    traced, the_plan = _make_plan(config)
    _check_can_start(start, the_plan)
    with contextlib.ExitStack() as stack:
        if folder is not None:
            folder.open()
            stack.callback(folder.close)
            _write_inputs(folder, config, traced, start)
        stream, rows = _open_stream(watchers, folder), list(start.rows)
        stack.enter_context(stream.ending(is_finished=lambda: rows[-1]["iteration"] + 1 == config.iterations))
        stream.emit(_run_began(config, folder, start))
        for warning in the_plan.warnings:
            stream.emit(WarningGiven(text=warning))
        runtime = _make_runtime(config, the_plan, options, stream)
        stack.callback(runtime.close)
        if folder is not None and runtime.differences:
            folder.write_config(config.to_toml(hosts=runtime.differences))
        _load_carry(runtime, start, config)

        returns = EpisodeReturns(start.rows)
        first, stopping = start.done, False
        while first < config.iterations and not stopping:
            stop = config.next_boundary(first)
            with clock.running(runtime, steps=(stop - first) * config.steps_per_iteration):
                metrics = runtime.run(first, stop)
            new = make_rows(config, metrics, range(first, stop), returns, seconds=clock.run_seconds)
            diverged = first_not_finite(new)
            if diverged is not None:
                new = new[: diverged.iteration - first + 1]
            elif config.is_evaluation_due(stop):
                new[-1]["eval_return"] = _mean_return(config, runtime, stop)
            rows += new
            _write_rows(folder, new, runtime)
            _tell(new, stream)
            if diverged is not None:
                raise _diverged_error(config, folder, diverged)
            _tell_boundary(new[-1], stream, stop, clock)
            if config.is_good_enough(new[-1]):
                stream.ask_to_stop("stop_at_return")
            if folder is not None and (stream.stop_asked_by or config.is_checkpoint_due(stop)):
                checkpoint.save_stream(folder.checkpoint, the_plan.carry, runtime.stream, iteration=stop)
                stream.emit(CheckpointSaved(iterations_done=stop, path=folder.checkpoint))
            first, stopping = stop, stream.stop_asked_by is not None

        profile = runtime.profile() if options.profile else None
        run = _finished_run(config, folder, runtime, rows, clock, profile)
        if folder is not None:
            _write_results(folder, run)
        return run


def _make_plan(config: RunConfig) -> tuple[Traced, Plan]:
    algo = config.algo_with_horizon
    algorithm_checks.check_parts(algo, config.env)  # before tracing `iterate`, which takes longer
    traced = build.trace_for(algo, config.env, config.layout)
    algorithm_checks.check_metrics(algo, traced.metrics)
    _check_can_stop(config, traced)
    if config.layout.shards > 1 or config.layout.num_workers > 1:
        algorithm_checks.check_reductions(algo, traced.reductions)
    the_plan = build.plan_traced(traced, config.layout, title=build.plan_title(config.algo, config.env))
    for warning in the_plan.warnings:
        warnings.warn(warning, ChoreoWarning, stacklevel=4)  # shown at the line that called `train`
    return traced, the_plan


def _check_can_stop(config: RunConfig, traced: Traced) -> None:
    if config.stop_at_return is not None and not config.eval_every and not measures_episodes(traced.metrics):
        raise RunError(
            f"stop_at_return={config.stop_at_return:g} is never reached: `{type(config.algo).__name__}.iterate` returns no "
            "metrics of episodes, and there are no evaluations.",
            fix="Evaluate the parameters: give --eval-every 100 (eval_every=100).",
        )


def _check_can_start(start: Start, the_plan: Plan) -> None:
    if start.done and the_plan.num_sites > 1:
        raise RunError(
            f"This run has {the_plan.num_sites} sites; only runs with one site can be resumed.",
            fix="Train this run again from the start. To be able to resume a run, train it with --layout fused.",
        )


def _write_inputs(folder: RunFolder, config: RunConfig, traced: Traced, start: Start) -> None:
    """Write the files that are known before the first iteration."""
    folder.write_config(config.to_toml())
    folder.write_text("graph.svg", traced.iterate.draw())
    if start.done:
        folder.rewrite_metrics(start.rows)  # drops the rows after the checkpoint: their iterations are run again


def _open_stream(watchers: Watchers, folder: RunFolder | None) -> EventStream:
    """The stream of events, with all subscribers in their order: progress, loggers, `on_iteration`, the user's subscribers."""
    stream = EventStream()
    show = sys.stderr.isatty() if watchers.progress is None else watchers.progress
    stream.subscribe(Progress(show=show), name="progress")
    for logger in make_loggers(watchers.loggers, folder and folder.path):
        stream.subscribe(rows_to(logger), name=name_of_subscriber(logger))
    if watchers.on_iteration is not None:
        stream.subscribe(each_iteration(watchers.on_iteration), name="on_iteration")
    for subscriber in watchers.subscribers:
        stream.subscribe(subscriber)
    return stream


def _run_began(config: RunConfig, folder: RunFolder | None, start: Start) -> RunBegan:
    return RunBegan(
        algorithm=type(config.algo).__name__,
        environment=config.env.name,
        folder=folder and folder.path,
        total_steps=config.total_steps,
        iterations=config.iterations,
        iterations_done=start.done,
    )


def _make_runtime(config: RunConfig, the_plan: Plan, options: RunOptions, stream: EventStream) -> Any:
    named = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}

    def on_output(worker: str, line: str) -> None:
        stream.emit(WorkerOutput(worker=worker, line=line))

    def on_states(states: Mapping[str, str]) -> None:
        stream.emit(WorkerStates(states=states))

    return make_runtime(config.runtime, the_plan, **named, on_output=on_output, on_states=on_states)


def _load_carry(runtime: Runtime, start: Start, config: RunConfig) -> None:
    """Give the runtime the state that the first iteration begins with."""
    if start.carry is not None:
        runtime.restore(start.carry, config.key)
        return
    runtime.start(config.key)
    if start.weights is not None:
        runtime.restore(start.weights.put_into(runtime.carry()), config.key)


def _mean_return(config: RunConfig, runtime: Runtime, iteration: int) -> float:
    """Run greedy episodes with the parameters after `iteration` iterations, and return the mean of their returns."""
    algo = config.algo_with_horizon
    params = algo.policy(runtime.carry(part="train"))
    key = jax.random.fold_in(config.key_evaluate, iteration)
    return evaluate(algo, config.env, params, key=key, episodes=config.eval_episodes).mean


def _write_rows(folder: RunFolder | None, rows: Sequence[Row], runtime: Runtime) -> None:
    """Append the rows and the runtime's log of reads to their files; empties the log."""
    if folder is not None:
        folder.append_metrics(rows)
        if runtime.log:
            folder.append_log(runtime.log)
    runtime.log.clear()


def _tell(rows: Sequence[Row], stream: EventStream) -> None:
    """Emit the events of the iterations, and of the evaluation if there was one."""
    for row in rows:
        # A copy: a subscriber that changes the row must not change the result of the run.
        stream.emit(IterationDone(iteration=int(row["iteration"]), row=dict(row)))
    if "eval_return" in rows[-1]:
        done = int(rows[-1]["iteration"]) + 1
        stream.emit(EvaluationDone(iterations_done=done, mean_return=rows[-1]["eval_return"]))


def _tell_boundary(row: Row, stream: EventStream, done: int, clock: Clock) -> None:
    stream.emit(BoundaryReached(iterations_done=done, steps_per_second=clock.steps_per_second, row=dict(row)))


def _diverged_error(config: RunConfig, folder: RunFolder | None, found: NotFinite) -> DivergedError:
    places = {}
    if folder is not None and folder.checkpoint.exists():
        places["last_checkpoint"] = f"{folder.checkpoint} (iteration {checkpoint.iteration(folder.checkpoint)})"
    return DivergedError(
        f"The run diverged: `{found.metric}` is {found.value} at iteration {found.iteration} of {config.iterations}.",
        fix="Lower the learning rate, clip gradients, or look for a metric that grew before this iteration.",
        **places,
    )


def _finished_run(
    config: RunConfig,
    folder: RunFolder | None,
    runtime: Runtime,
    rows: list[Row],
    clock: Clock,
    profile: Profile | None,
) -> Run:
    return Run(
        config=config,
        train_state=runtime.carry(part="train"),
        rows=rows,
        timing=Timing(
            seconds=clock.seconds,
            compile_seconds=float(runtime.compile_seconds),
            steps_per_second=clock.steps_per_second,
        ),
        path=folder and folder.path,
        profile=profile,
    )


def _write_results(folder: RunFolder, run: Run) -> None:
    """Write the files that are known after the last iteration."""
    if run.profile is not None:
        folder.write_text("trace.json", run.profile.trace())
    run.plot(folder.path / "curve.png")
    folder.write_text("summary.json", to_json(run.training_summary))
