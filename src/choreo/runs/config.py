"""`RunConfig` has everything that a run depends on. It is written to `run.toml` and read back from there."""

import dataclasses
import difflib
import functools
import importlib.metadata
import math
import platform
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from choreo.envs.base import Env
from choreo.errors import RunError, unknown_name
from choreo.layouts import Layout
from choreo.partition.carry import form_of, may_change
from choreo.partition.trace import trace
from choreo.runs import algorithm_checks, public_names, resolve, toml_values, trusted_runs
from choreo.runs.evaluation import check_act
from choreo.runs.folder import Row, parse_toml, read_file
from choreo.runs.steps import env_steps_per_iteration
from choreo.runtime.make import RUNTIMES
from choreo.types import Key, PyTree

STEPS_PER_CHUNK = 2**15
"""The largest number of environment steps between two boundaries. It is chosen so that the progress line changes a few times per
second. If one iteration takes more steps, there is a boundary after every iteration."""
ITERATIONS_PER_CHUNK = 2**8
"""The largest number of iterations between two boundaries, if iterations take no environment steps."""
CHECKPOINTS_PER_RUN = 10
"""About how often the checkpoint is written during a run if `checkpoint_every` is not given."""


@dataclass(frozen=True, kw_only=True)
class InitFrom:
    """The earlier run whose weights a new run begins with."""

    path: str
    """The folder of the earlier run."""
    params_hash: str
    """SHA-256 of the weights. It shows whether the earlier run was trained further after these weights were read."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run depends on."""

    algo: Any
    """The algorithm as the user gave it."""
    env: Any
    """The environments."""
    layout: Any
    """Where the algorithm runs."""
    steps: int
    """Steps asked for (see `choreo.runs.steps`); rounded up to whole iterations."""
    seed: int
    """The run's only source of randomness."""
    runtime: str | None
    """Name of the runtime that executes the plan; None: `local` for several processes or a cluster, else `inprocess`."""
    eval_every: int | None
    """Iterations between evaluations; None: no evaluations."""
    eval_episodes: int
    """Episodes per evaluation during training."""
    stop_at_return: float | int | None
    """The run ends at the first boundary at which this return is reached (see `is_good_enough`); None: no return ends the run."""
    checkpoint_every: int | None
    """Iterations between checkpoints; None: see `checkpoint_period`."""
    init_from: InitFrom | None = None
    """The run that the first weights came from; None: the algorithm's `init` makes them."""

    def __post_init__(self):
        if self.steps < 1:
            raise RunError(f"A run of {self.steps} steps does nothing.", fix="Give --steps 300000.")
        for name in ("eval_every", "checkpoint_every", "eval_episodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RunError(f"{name}={value} must be at least 1.", fix=f"Leave {name} out, or give a larger number.")
        if not 0 <= self.seed < 2**32:
            raise RunError(f"seed={self.seed} is not between 0 and 2**32 - 1.", fix="Choose another seed.")
        if self.runtime is not None and self.runtime not in RUNTIMES:
            raise unknown_name("runtime", self.runtime, RUNTIMES)
        check_act(self.algo)
        env_steps_per_iteration(self.algo, self.env)  # refuses a wrong number

    @functools.cached_property
    def env_steps_per_iteration(self) -> int:
        """Environment steps in one iteration; 0 if the algorithm takes none."""
        return env_steps_per_iteration(self.algo, self.env)

    @property
    def steps_per_iteration(self) -> int:
        """Steps in one iteration: environment steps, or 1 if an iteration takes no environment steps."""
        return self.env_steps_per_iteration or 1

    @property
    def iterations(self) -> int:
        return -(-self.steps // self.steps_per_iteration)

    @property
    def total_steps(self) -> int:
        return self.iterations * self.steps_per_iteration

    @property
    def chunk(self) -> int:
        """The number of iterations per call of the runtime.

        This number divides `eval_every` and `checkpoint_every`, so that every evaluation and every checkpoint is at a boundary.
        """
        most = ITERATIONS_PER_CHUNK
        if self.env_steps_per_iteration:
            most = max(1, STEPS_PER_CHUNK // self.env_steps_per_iteration)
        period = math.gcd(*(every for every in (self.eval_every, self.checkpoint_every) if every))
        return next(n for n in range(min(most, period or most), 0, -1) if period % n == 0)

    @property
    def checkpoint_period(self) -> int:
        """Iterations between checkpoints: `checkpoint_every`, or the multiple of a chunk that gives about ten checkpoints."""
        return self.checkpoint_every or max(1, self.iterations // (CHECKPOINTS_PER_RUN * self.chunk)) * self.chunk

    @functools.cached_property
    def algo_with_horizon(self) -> Any:
        """The algorithm. If it has a field `total_steps` that is None, this field is set to the length of the run."""
        if (
            "total_steps" not in {field.name for field in dataclasses.fields(self.algo)}
            or self.algo.total_steps is not None
        ):
            return self.algo
        return dataclasses.replace(self.algo, total_steps=self.total_steps)

    @property
    def title(self) -> str:
        return f"{type(self.algo).__name__}  {self.env.name}"

    @property
    def key(self) -> Key:
        return jax.random.key(self.seed)

    @property
    def key_evaluate(self) -> Key:
        # The number must not be 0 or 1: the runtime splits the same key in two, and the split uses the counters 0 and 1.
        return jax.random.fold_in(self.key, 2**31)

    def next_boundary(self, iteration: int) -> int:
        """The first boundary after `iteration` iterations."""
        return min((iteration // self.chunk + 1) * self.chunk, self.iterations)

    def is_evaluation_due(self, iteration: int) -> bool:
        """Whether the parameters are evaluated after `iteration` iterations."""
        return self.eval_every is not None and iteration % self.eval_every == 0

    def is_checkpoint_due(self, iteration: int) -> bool:
        """Whether the state is saved after `iteration` iterations; always true after the last one."""
        return iteration % self.checkpoint_period == 0 or iteration == self.iterations

    def is_good_enough(self, row: Row) -> bool:
        """Whether the return at a boundary has reached `stop_at_return`.

        With `eval_every`, this is the return of an evaluation; without it, the return of the training episodes.
        """
        if self.stop_at_return is None:
            return False
        return row.get("eval_return" if self.eval_every else "train_return", math.nan) >= self.stop_at_return

    def carry_structure(self) -> PyTree:
        """The carry with a type in place of each array; static leaves are kept. `init` is only traced, not run;
        if `iterate` could change the form of the carry, `iterate` is traced as well."""
        form = form_of(lambda key: self.algo_with_horizon.init(self.env, key), self.key)
        algorithm_checks.check_carry(self.algo, form)
        if not may_change(form):
            return form
        return trace(self.algo_with_horizon, self.env, self.layout.shards).carry

    def to_toml(self, *, hosts: Mapping[str, Mapping[str, str]] | None = None) -> dict[str, Any]:
        """The content of run.toml. `hosts`: for each host, the versions and flags that differ from those of this machine."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.init_from is not None:
            options["init_from"] = dataclasses.asdict(self.init_from)
        algo, env, layout = options.pop("algo"), options.pop("env"), options.pop("layout")
        versions = {name: importlib.metadata.version(name) for name in ("choreo", "jax", "jaxlib", "equinox", "optax")}
        return {
            "run": {name: value for name, value in options.items() if value is not None},
            "algorithm": toml_values.describe(algo),
            "environment": toml_values.describe_environment(env),
            "layout": toml_values.describe(layout),
            "versions": versions | {"python": platform.python_version()} | ({"hosts": hosts} if hosts else {}),
        }

    @classmethod
    def read(cls, file: Path, *, algo: Any = None, env: Any = None, trust: bool = False) -> "RunConfig":
        """The configuration in a run.toml. Code that the file names is run only with `trust`, or if this account wrote the file."""
        text = read_file(file)
        trust = trust or trusted_runs.is_own(file, text)
        return cls.from_toml(parse_toml(text, file), algo=algo, env=env, file=file, trust=trust)

    @classmethod
    def from_toml(
        cls,
        data: Mapping[str, Any],
        *,
        algo: Any = None,
        env: Any = None,
        file: str | Path = "run.toml",
        trust: bool = False,
    ) -> "RunConfig":
        """The configuration from the content of a run.toml; `algo` and `env` replace those of the file.

        Every command that makes the algorithm of a run from its run.toml calls this function. Without `trust`, a file
        that names code is refused (UntrustedError) before anything is imported or made. `file` is named in errors.
        """
        for table in ("run", "algorithm", "environment", "layout"):
            if not isinstance(data.get(table), dict):
                raise RunError(
                    f"{file} has no table [{table}].", fix="Use the run.toml of a run; `choreo train` writes one."
                )
        options = _checked_options(data["run"], file)
        code = toml_values.Code(trusted=trust)
        try:
            make_env = None if env is not None else toml_values.environment_maker(data["environment"], code=code)
            make_algo = None if algo is not None else toml_values.maker(data["algorithm"], at="algorithm", code=code)
            make_layout = toml_values.maker(data["layout"], at="layout", code=code)
        except RecursionError as error:
            raise RunError(f"{file} is nested too deeply.", fix="Undo the last edit.") from error
        code.check(file)
        if make_env is not None:
            env = _rebuilt(make_env, "environment", file)
            if not isinstance(env, Env):
                raise _wrong_type(env, "environment", file)
        if make_algo is not None:
            _check_fields(data["algorithm"], file, code)
            algo = _rebuilt(make_algo, "algorithm", file)
            if not dataclasses.is_dataclass(algo) or public_names.kind_of(type(algo)) not in (None, "algorithm"):
                raise _wrong_type(algo, "algorithm", file)
        layout = _rebuilt(make_layout, "layout", file)
        if not isinstance(layout, Layout):
            raise _wrong_type(layout, "layout", file)
        return cls(algo=resolve.algorithm(algo), env=env, layout=layout, **options)


def _checked_options(given: Mapping[str, Any], file: str | Path) -> dict[str, Any]:
    """The options in the table [run]; refuses unknown and missing options and values of the wrong type."""
    kinds = {
        name: kind for name, kind in typing.get_type_hints(RunConfig).items() if name not in ("algo", "env", "layout")
    }
    options: dict[str, Any] = {name: None for name, kind in kinds.items() if isinstance(None, kind)}
    for name, value in given.items():
        if name not in kinds:
            raise RunError(f"{file} has an unknown option `{name}` in [run].", fix=_near(name, kinds))
        if name == "init_from":
            value = _rebuilt(lambda value=value: _init_from(**value), "run.init_from", file)
        if isinstance(value, bool) or not isinstance(value, kinds[name]):
            raise RunError(
                f"{file} says `{name} = {value!r}` in [run], which must be of type {_kind_name(kinds[name])}.",
                fix="Correct it, or undo the last edit.",
            )
        options[name] = value
    missing = [name for name in kinds if name not in options]
    if missing:
        raise RunError(f"{file} has no `{missing[0]}` in [run].", fix="Add it, or undo the last edit.")
    return options


def _init_from(*, path: Any, params_hash: Any) -> InitFrom:
    if not isinstance(path, str) or not isinstance(params_hash, str):
        raise TypeError("`path` and `params_hash` must be texts")
    return InitFrom(path=path, params_hash=params_hash)


def _check_fields(described: Mapping[str, Any], file: str | Path, code: toml_values.Code) -> None:
    """Refuse hyper-parameters that the algorithm does not have, and values whose type is not that of the default."""
    fields = described.get("fields", {})
    target = described.get("class")
    if not isinstance(target, str) or not isinstance(fields, dict):
        return  # the maker of the algorithm refuses it
    cls: Any = toml_values.finder(target, "algorithm.class", code)()
    if not dataclasses.is_dataclass(cls):
        return  # `resolve.algorithm` refuses it
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    name_of_class = getattr(cls, "__name__", "?")
    for name, value in fields.items():
        if name not in defaults:
            raise RunError(
                f"{file} gives `{name_of_class}` a hyper-parameter `{name}`, which it does not have.",
                fix=_near(name, defaults),
            )
        kind = type(defaults[name])
        if kind in (bool, int, float, str) and not isinstance(value, dict) and not _is_a(value, kind):
            raise RunError(
                f"{file} says `{name} = {value!r}` in [algorithm.fields], which must be of type {kind.__name__}.",
                fix=f"Correct it; the default of `{name_of_class}.{name}` is {defaults[name]!r}.",
            )


def _wrong_type(value: Any, what: str, file: str | Path) -> RunError:
    return RunError(f"`{what}` in {file} has the wrong type: {type(value).__name__}.", fix="Undo the last edit.")


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) or (kind is float and isinstance(value, int))


def _rebuilt(make: Callable[[], Any], what: str, file: str | Path) -> Any:
    try:
        return make()
    # Constructors raise these errors for a missing, unknown or wrong argument.
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise RunError(f"`{what}` cannot be made again from {file}: {error}.", fix="Undo the last edit.") from error


def _kind_name(kind: Any) -> str:
    names = [part.__name__ for part in typing.get_args(kind) or (kind,) if part is not type(None)]
    return " or ".join(dict.fromkeys(names))


def _near(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean `{close[0]}`?" if close else f"Known: {', '.join(sorted(known))}."
