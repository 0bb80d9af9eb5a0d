"""Everything a run depends on, as one value; `run.toml` is this, written down."""

import dataclasses
import functools
import importlib.metadata
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax

from choreo import registry
from choreo.errors import AlgorithmError, RunError, unknown_name
from choreo.evaluate import check_act
from choreo.types import Key, PyTree

STEPS_PER_CHUNK = 2**15
"""Environment steps between two boundaries, if nothing else asks; the progress line moves a few times per second."""
CHECKPOINTS_PER_RUN = 10
"""How many are written, one over the other, if `checkpoint_every` is not given."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a run depends on; `run.toml` is this, written down."""

    algo: Any
    """The algorithm as the user gave it."""
    env: Any
    """The environments."""
    layout: Any
    """Where it runs."""
    steps: int
    """Environment steps asked for; the run does whole iterations, at least so many."""
    seed: int
    """The run's only source of randomness."""
    runtime: str
    """Who executes the plan."""
    eval_every: int | None
    """Iterations between evaluations."""
    eval_episodes: int
    """Episodes per evaluation during training."""
    stop_at_return: float | int | None
    """The return that is good enough."""
    checkpoint_every: int | None
    """Iterations between checkpoints."""

    def __post_init__(self):
        if self.steps < 1:
            raise RunError(f"A run of {self.steps} steps does nothing.", fix="Give --steps 300000.")
        for name in ("eval_every", "checkpoint_every", "eval_episodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RunError(f"{name}={value} must be at least 1.", fix=f"Leave {name} out, or give a larger number.")
        if not 0 <= self.seed < 2**32:
            raise RunError(f"seed={self.seed} is not between 0 and 2**32 - 1.", fix="Choose another seed.")
        if self.runtime not in RUNTIMES:
            raise unknown_name("runtime", self.runtime, RUNTIMES)
        check_act(self.algo)

    @property
    def steps_per_iteration(self) -> int:
        return self.algo.unroll * self.env.num_envs

    @property
    def iterations(self) -> int:
        return -(-self.steps // self.steps_per_iteration)

    @property
    def total_steps(self) -> int:
        return self.iterations * self.steps_per_iteration

    @property
    def chunk(self) -> int:
        """Iterations per call of the runtime; divides every period, so that all calls but the last have one length."""
        most = max(1, STEPS_PER_CHUNK // self.steps_per_iteration)
        period = math.gcd(*(every for every in (self.eval_every, self.checkpoint_every) if every))
        return next(n for n in range(min(most, period or most), 0, -1) if period % n == 0)

    @property
    def checkpoint_period(self) -> int:
        """`checkpoint_every`, or some multiple of a chunk."""
        return self.checkpoint_every or max(1, self.iterations // (CHECKPOINTS_PER_RUN * self.chunk)) * self.chunk

    @functools.cached_property
    def algo_with_horizon(self) -> Any:
        """The algorithm that is run: it knows how long, unless the user said otherwise, or it has no `total_steps`."""
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
        # Far from 0 and 1, which the runtime uses for `init` and for iterations.
        return jax.random.fold_in(self.key, 2**31)

    def next_boundary(self, iteration: int) -> int:
        return min((iteration // self.chunk + 1) * self.chunk, self.iterations)

    def carry_structure(self) -> PyTree:
        """The shapes and types of the carry; runs nothing."""
        carry = eqx.filter_eval_shape(self.algo_with_horizon.init, self.env, self.key)
        if not hasattr(carry, "train"):
            raise AlgorithmError(
                f"`{type(self.algo).__name__}.init` returns a {type(carry).__name__} without `train`.",
                fix="Return a NamedTuple whose field `train` holds everything learned.",
            )
        return carry

    def to_toml(self) -> dict[str, Any]:
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        algo, env, layout = options.pop("algo"), options.pop("env"), options.pop("layout")
        versions = {name: importlib.metadata.version(name) for name in ("choreo", "jax", "jaxlib", "equinox", "optax")}
        return {
            "run": {name: value for name, value in options.items() if value is not None},
            "algorithm": registry.describe(algo),
            "environment": registry.describe_environment(env),
            "layout": registry.describe(layout),
            "versions": versions | {"python": platform.python_version()},
        }

    @classmethod
    def from_toml(cls, data: Mapping[str, Any], *, algo: Any = None, env: Any = None) -> "Recipe":
        """The recipe of a run; `algo` and `env` stand in for what the file cannot name."""
        optional = {"eval_every": None, "stop_at_return": None, "checkpoint_every": None}
        if env is None:
            env = registry.rebuild_environment(data["environment"])
        return cls(
            algo=registry.rebuild(data["algorithm"], at="algorithm") if algo is None else registry.algorithm(algo),
            env=env,
            layout=registry.rebuild(data["layout"], at="layout"),
            **(optional | data["run"]),
        )


def _inprocess(the_plan: Any) -> Any:
    from choreo.runtime.inprocess import InProcess

    return InProcess(the_plan)


RUNTIMES: dict[str, Callable[[Any], Any]] = {"inprocess": _inprocess}
"""Who can execute a plan."""
