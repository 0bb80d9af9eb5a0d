"""Train an algorithm, keep what came out, and go on later.

    train ──► Recipe ──► plan ──► runtime.run(0, 32), run(32, 64), ... ──► Run
                                        │ at each boundary: metrics, evaluation, checkpoint, stop?

Boundaries are iteration numbers chosen before the run starts, never times. Everything that looks at a run or ends it
(evaluation, checkpoints, `stop_at_return`, a metric that is no longer finite, `on_iteration`) does so there, so a
resumed run does the same as one that was never interrupted, bit for bit.
"""

import collections
import contextlib
import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from choreo.envs.gymnasium import HostEnv
from choreo.errors import ChoreoWarning, DivergedError, RunError
from choreo.plans import plan as plans
from choreo.plans.plan import Plan
from choreo.runs import checkpoint, jax_settings, registry, requirements
from choreo.runs.config import InitFrom, RunConfig, make_runtime
from choreo.runs.evaluation import evaluate
from choreo.runs.folder import Row, RunFolder, free_folder, to_json
from choreo.runs.loggers import Logger, Metrics, check_loggers, make_loggers
from choreo.runs.progress import Progress
from choreo.runs.run import Run, Timing
from choreo.runs.warm_start import Weights
from choreo.runtime.compilation_cache import use_compilation_cache
from choreo.runtime.coordinator.cluster import Cluster
from choreo.runtime.engine.schedule import VersionRead
from choreo.runtime.inprocess import as_numbers
from choreo.types import PyTree

EPISODES_PER_RETURN = 100
"""`train_return` is the mean over at least this many episodes, once there are so many."""

OnIteration = Callable[[int, Metrics], bool | None]
"""Called with each iteration's number and metrics; True ends the run at the boundary."""


def train(
    algo: Any,
    env: Any,
    *,
    steps: int,
    layout: Any = "fused",
    num_envs: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    runtime: str | None = None,
    cluster: Cluster | str | Path | None = None,
    env_timeout: float | int = 60.0,
    profile: bool = False,
    allow_versions: bool = False,
    same_bits: bool = False,
    trust_network: bool = False,
    eval_every: int | None = None,
    eval_episodes: int = 20,
    stop_at_return: float | int | None = None,
    checkpoint_every: int | None = None,
    init_from: str | Path | InitFrom | None = None,
    loggers: Sequence[str | Logger] = (),
    on_iteration: OnIteration | None = None,
    progress: bool | None = None,
) -> "Run":
    """Train `algo` on `env` for at least `steps` environment steps (whole iterations).

    `algo`, `env` and `layout` are values or names ("ppo", "my_ppo.py:MyPPO"; "jax:CartPole-v1"; "coarse"). An
    environment given by name is made 8 times unless `num_envs` says otherwise. With `out`, everything is kept in that
    folder, which must be new or empty; a logger given by name takes a new one in `runs/`. `eval_every` and
    `checkpoint_every` count iterations. `stop_at_return` ends the run once the evaluation reaches it; without
    `eval_every`, once the mean of the last 100 training episodes does.
    `init_from`, a run folder, gives the first weights; optimiser, counters and environments start anew.
    `runtime`: "inprocess" runs everything in this process, "local" in worker processes; None takes workers where the
    layout has several sites. `cluster` (or the path of a `cluster.toml`) names the hosts of workers. A worker whose
    environment does not return for `env_timeout` seconds ends the run. `profile` keeps what each site did when: a table,
    and `trace.json` in the run folder, which Perfetto opens. A host with other versions than this machine is refused;
    `allow_versions` insists. `same_bits` also refuses one with another CPU or other XLA_FLAGS, of which one is warned
    otherwise. Learners on different machines combine gradients without encryption, which is refused; `trust_network` insists.
    `progress`: None shows it in a terminal only.
    JAX's settings are afterwards what they were before; the number of CPU devices only until JAX has started.

    Refuses (ChoreoError) before anything is compiled whatever can be refused then.
    """
    with jax_settings.put_back():
        layout = registry.layout(layout)
        jax_settings.prepare(layout)  # before a file of the user's is imported, which may use JAX
        algo, env = registry.algorithm(algo), registry.environment(env, num_envs)
        jax_settings.prepare(layout, env)
        recipe = RunConfig(
            algo=algo,
            env=env,
            layout=layout,
            steps=steps,
            seed=seed,
            runtime=runtime,
            eval_every=eval_every,
            eval_episodes=eval_episodes,
            stop_at_return=stop_at_return,
            checkpoint_every=checkpoint_every,
        )
        if out is None and any(
            isinstance(logger, str) for logger in ([loggers] if isinstance(loggers, str) else loggers)
        ):
            out = free_folder(algo, env, seed)  # they need a place to write to
        folder = None if out is None else RunFolder(out)
        if folder is not None:
            folder.check_new()
        check_loggers(loggers, folder and folder.path)
        weights = None if init_from is None else Weights.read(recipe, init_from)
        if weights is not None:
            recipe = dataclasses.replace(recipe, init_from=weights.origin)
        start = Start(done=0, rows=[], carry=None, weights=weights)
        if cluster is not None and not isinstance(cluster, Cluster):
            cluster = Cluster.from_toml(cluster)
        watching = RunOptions(
            env_timeout_s=float(env_timeout),
            profile=profile,
            cluster=cluster,
            allow_versions=allow_versions,
            same_bits=same_bits,
            trust_network=trust_network,
        )
        return _drive(recipe, folder, start, watching, loggers=loggers, on_iteration=on_iteration, progress=progress)


def plan(algo: Any, env: Any, layout: Any = "fused", *, num_envs: int | None = None) -> Plan:
    """Say how `algo` would run on `env` in `layout`, values or names as for `train`: sites, fragments, what crosses.

    Nothing is computed and nothing started.
    """
    algo, env = registry.algorithm(algo), registry.environment(env, num_envs)
    requirements.check_parts(algo, env)
    the_plan = plans.plan(algo, env, registry.layout(layout))
    requirements.check_metric_names(algo, the_plan.metric_names)
    return the_plan


def resume(
    path: str | Path,
    *,
    steps: int | None = None,
    algo: Any = None,
    env: Any = None,
    trust: bool = False,
    loggers: Sequence[str | Logger] = (),
    on_iteration: OnIteration | None = None,
    progress: bool | None = None,
) -> "Run":
    """Go on from the last checkpoint of a run folder, to its own number of steps or to `steps`.

    The result is that of a run that was never interrupted, bit for bit. With other `steps` than the run began with,
    schedules stretch to the new end, unless the algorithm was given its `total_steps` at the start. Only for layouts
    with one site. `trust`: as of `load`.
    """
    with jax_settings.put_back():
        folder = RunFolder(path)
        folder.check_run()
        folder.check_not_in_use()
        recipe = RunConfig.read(folder.recipe, algo=algo, env=env, trust=trust)
        jax_settings.prepare(recipe.layout, recipe.env)
        if isinstance(recipe.env, HostEnv):
            raise RunError(
                f"`{recipe.env.name}` is Python, and its state is not in the checkpoint: this run cannot go on where it stopped.",
                fix=f"Begin a new run with its weights: choreo train {folder.path}/run.toml --init-from {folder.path}",
            )
        if steps is not None:
            recipe = dataclasses.replace(recipe, steps=steps)
        check_loggers(loggers, folder.path)
        done = checkpoint.iteration(folder.checkpoint)
        if done >= recipe.iterations:
            raise RunError(
                f"{folder.path} is finished: {done} iterations, {done * recipe.steps_per_iteration:,} steps.",
                fix=f"Go on with `choreo resume {folder.path} --steps {2 * done * recipe.steps_per_iteration}`.",
            )
        start = Start(
            done=done,
            rows=folder.read_metrics(before=done),
            carry=checkpoint.load(folder.checkpoint, recipe.carry_structure()),
        )
        watching = RunOptions()
        return _drive(recipe, folder, start, watching, loggers=loggers, on_iteration=on_iteration, progress=progress)


def replay(
    path: str | Path, *, algo: Any = None, env: Any = None, trust: bool = False, progress: bool | None = None
) -> "Run":
    """Run again what is in a folder, in this process; what was read out of date is read so again, by the run's log.

    The result is that of the run in the folder, bit for bit, whatever the timing of its workers was. `trust`: as of `load`.
    """
    with jax_settings.put_back():
        folder = RunFolder(path)
        folder.check_run()
        recipe = RunConfig.read(folder.recipe, algo=algo, env=env, trust=trust)
        jax_settings.prepare(recipe.layout, recipe.env)
        log = [VersionRead(*read) for read in folder.read_log()]
        if recipe.layout.is_relaxed and not log:
            raise RunError(f"{folder.path} has no log of what was read.", fix="Only a run that was begun here has one.")
        recipe = dataclasses.replace(recipe, runtime="inprocess")
        weights = None if recipe.init_from is None else Weights.read(recipe, recipe.init_from)
        start, done = Start(done=0, rows=[], carry=None, weights=weights), checkpoint.iteration(folder.checkpoint)
        watching, is_done = RunOptions(replay=log or None), lambda iteration, _: iteration + 1 >= done
        return _drive(recipe, None, start, watching, loggers=(), on_iteration=is_done, progress=progress)


def load(path: str | Path, *, algo: Any = None, env: Any = None, trust: bool = False) -> "Run":
    """The run in a folder, as of its last checkpoint. `algo` or `env` are needed only if run.toml cannot name them.

    A folder is data. If its run.toml names code (`my_ppo.py:MyPPO`), that is run only if this account wrote the file, or with
    `trust=True`; an `algo` or `env` that is passed is used in place of the file's.
    """
    with jax_settings.put_back():
        use_compilation_cache()
        folder = RunFolder(path)
        folder.check_run()
        recipe = RunConfig.read(folder.recipe, algo=algo, env=env, trust=trust)
        done = checkpoint.iteration(folder.checkpoint)
        carry = checkpoint.load(folder.checkpoint, recipe.carry_structure())
        rows = folder.read_metrics(before=done)
        return Run(recipe=recipe, train_state=carry.train, rows=rows, timing=_read_timing(folder), path=folder.path)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where `_drive` begins."""

    done: int
    """Iterations already run."""
    rows: list[Row]
    """Their metrics."""
    carry: PyTree | None
    """The state after them; None: run `init`."""
    weights: Weights | None = None
    """What to begin with in place of the weights that `init` makes."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is watched and where its workers are; its result does not depend on it."""

    env_timeout_s: float = 60.0
    """After how long an environment that does not return counts as hanging."""
    profile: bool = False
    """Keep what each site did when?"""
    cluster: Cluster | None = None
    """The hosts of workers; None: this machine."""
    allow_versions: bool = False
    """Take hosts with other versions than this machine?"""
    same_bits: bool = False
    """Refuse hosts whose CPU or XLA_FLAGS may round differently?"""
    trust_network: bool = False
    """Let workers on different machines combine values, although nothing protects that?"""
    replay: list[VersionRead] | None = None
    """What another run has read, to be read again."""


def _drive(
    recipe: RunConfig,
    folder: RunFolder | None,
    start: Start,
    watching: RunOptions,
    *,
    loggers: Sequence[str | Logger],
    on_iteration: OnIteration | None,
    progress: bool | None,
) -> Run:
    """Run iterations from `start` to the end, doing at each boundary what is due."""
    began, algo, env = time.perf_counter(), recipe.algo_with_horizon, recipe.env
    use_compilation_cache()
    requirements.check_parts(algo, env)  # the cheapest way to hear that the algorithm and the counts do not fit
    traced = plans.trace_for(algo, env, recipe.layout)
    requirements.check_metrics(algo, traced.metrics)
    if recipe.layout.shards > 1 or recipe.layout.num_workers > 1:
        requirements.check_reductions(algo, traced.reductions)
    the_plan = plans.plan_traced(traced, recipe.layout, title=recipe.title)
    for warning in the_plan.warnings:
        warnings.warn(warning, ChoreoWarning, stacklevel=3)
    if start.done and the_plan.num_sites > 1:
        raise RunError(
            f"This run has {the_plan.num_sites} sites; only runs with one site can be resumed.",
            fix="Train with --layout fused to be able to resume, or train this one again from the start.",
        )
    rows, returns, clock = list(start.rows), EpisodeReturns(start.rows), Clock()
    before = start.rows[-1]["seconds"] if start.rows else 0.0
    with contextlib.ExitStack() as stack:
        if folder is not None:
            folder.open()
            stack.callback(folder.close)
            folder.write_recipe(recipe.to_toml())
            folder.write_text("graph.svg", traced.iterate.draw())
            if start.done:
                folder.rewrite_metrics(start.rows)  # rows beyond the checkpoint are about to be run again
        sinks = make_loggers(loggers, folder and folder.path)
        for sink in sinks:
            stack.callback(sink.close)
        show = sys.stderr.isatty() if progress is None else progress
        line = stack.enter_context(Progress(type(algo).__name__, total_steps=recipe.total_steps, show=show))
        options = dataclasses.asdict(watching) | {
            "cluster": watching.cluster,
            "replay": watching.replay,
            "on_output": line.print,
            "on_states": line.workers,
        }
        runtime = make_runtime(recipe.runtime, the_plan, **options)
        stack.callback(runtime.close)
        if folder is not None and runtime.differences:
            folder.write_recipe(recipe.to_toml(hosts=runtime.differences))
        if start.carry is None:
            runtime.start(recipe.key)
            if start.weights is not None:
                runtime.restore(start.weights.put_into(runtime.carry()), recipe.key)
        else:
            runtime.restore(start.carry, recipe.key)

        first, stopping = start.done, False
        while first < recipe.iterations and not stopping:
            stop = recipe.next_boundary(first)
            with clock.running(runtime):
                stacked = runtime.run(first, stop)
            new = _rows(recipe, stacked, first, stop, returns, seconds=before + time.perf_counter() - began)
            bad = _first_not_finite(new)
            new = new if bad is None else new[: bad[0] - first + 1]
            if bad is None and recipe.eval_every and stop % recipe.eval_every == 0:
                params = algo.policy(runtime.carry().train)
                key = jax.random.fold_in(recipe.key_evaluate, stop)
                score = evaluate(algo, env, params, key=key, episodes=recipe.eval_episodes)
                new[-1]["eval_return"] = score.mean
            rows += new
            if folder is not None:
                folder.append_metrics(new)
                if runtime.log:
                    folder.append_log(runtime.log)
            runtime.log.clear()
            for row in new:
                for sink in sinks:
                    sink.log(row)
                if on_iteration is not None and on_iteration(int(row["iteration"]), row):
                    stopping = True
            if bad is not None:
                raise _diverged(recipe, folder, *bad)
            line.update(new[-1], steps_per_second=clock.steps_per_second(recipe, start.done, stop))
            stopping = stopping or _good_enough(recipe, new[-1])
            if folder is not None and (stop % recipe.checkpoint_period == 0 or stopping or stop == recipe.iterations):
                checkpoint.save(folder.checkpoint, runtime.carry(), iteration=stop)
            first = stop

        profile = runtime.profile() if watching.profile else None
        run = Run(
            recipe=recipe,
            train_state=runtime.carry().train,
            rows=rows,
            timing=Timing(
                seconds=time.perf_counter() - began,
                compile_seconds=float(runtime.compile_seconds),
                steps_per_second=clock.steps_per_second(recipe, start.done, first),
            ),
            path=folder and folder.path,
            profile=profile,
        )
        if folder is not None and profile is not None:
            folder.write_text("trace.json", profile.trace())
        if folder is not None:
            run.plot(folder.path / "curve.png")
            folder.write_text("summary.json", to_json(run.training_summary))
        return run


class EpisodeReturns:
    """The mean return of the last 100 training episodes, iteration by iteration."""

    def __init__(self, rows: Sequence[Row]):
        self._parts: collections.deque[tuple[float, float]] = collections.deque()
        self._episodes = 0.0
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> float:
        """Take one iteration's episodes; the mean over the newest iterations that together have 100, if there are."""
        if row["episodes"] > 0:
            self._parts.append((row["episodes"], row["episode_return"]))
            self._episodes += row["episodes"]
        while self._parts and self._episodes - self._parts[0][0] >= EPISODES_PER_RETURN:
            self._episodes -= self._parts.popleft()[0]
        return sum(n * mean for n, mean in self._parts) / self._episodes if self._parts else math.nan


class Clock:
    """Time spent running iterations, without what was spent compiling them."""

    def __init__(self):
        self.seconds = 0.0

    @contextlib.contextmanager
    def running(self, runtime: Any):
        began, compiled = time.perf_counter(), runtime.compile_seconds
        yield
        self.seconds += time.perf_counter() - began - (runtime.compile_seconds - compiled)

    def steps_per_second(self, recipe: RunConfig, first: int, stop: int) -> float:
        return (stop - first) * recipe.steps_per_iteration / self.seconds if self.seconds > 0 else math.nan


def _rows(
    recipe: RunConfig, stacked: Mapping[str, Any], first: int, stop: int, returns: EpisodeReturns, *, seconds: float
) -> list[Row]:
    columns = {name: as_numbers(values).tolist() for name, values in stacked.items()}
    rows = []
    for i in range(first, stop):
        row = {"iteration": i, "env_steps": (i + 1) * recipe.steps_per_iteration, "seconds": round(seconds, 3)}
        row |= {name: values[i - first] for name, values in columns.items()}
        row["train_return"] = returns.add(row)
        rows.append(row)
    return rows


def _first_not_finite(rows: Sequence[Row]) -> tuple[int, str, float] | None:
    """Iteration, metric and value; metrics of episodes may be NaN, when none ended."""
    for row in rows:
        for name, value in row.items():
            if not name.startswith(("episode", "train_return")) and not math.isfinite(value):
                return int(row["iteration"]), name, value
    return None


def _diverged(recipe: RunConfig, folder: RunFolder | None, iteration: int, metric: str, value: float) -> DivergedError:
    places = {}
    if folder is not None and folder.checkpoint.exists():
        places["last_checkpoint"] = f"{folder.checkpoint} (iteration {checkpoint.iteration(folder.checkpoint)})"
    return DivergedError(
        f"The run diverged: `{metric}` is {value} at iteration {iteration} of {recipe.iterations}.",
        fix="Lower the learning rate, clip gradients, or look at metrics.jsonl for what grew before.",
        **places,
    )


def _good_enough(recipe: RunConfig, row: Row) -> bool:
    if recipe.stop_at_return is None:
        return False
    score = row.get("eval_return" if recipe.eval_every else "train_return", math.nan)
    return score >= recipe.stop_at_return


def _read_timing(folder: RunFolder) -> Timing:
    """What the last finished training of this folder took; nothing is known if it was interrupted."""
    known = folder.read_summary()
    numbers = {f.name: known.get(f.name) for f in dataclasses.fields(Timing)}
    return Timing(**{name: float(value) for name, value in numbers.items() if isinstance(value, int | float)})
