"""The result of training: metrics and parameters, and methods to evaluate, act and plot with them."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from choreo import static_key
from choreo.errors import EnvError, RunError
from choreo.runs import checkpoint, jax_settings
from choreo.runs.config import RunConfig
from choreo.runs.evaluation import Evaluation, act, evaluate, initial_state
from choreo.runs.folder import Row
from choreo.runtime.compilation_cache import use_compilation_cache
from choreo.runtime.engine.profile import Profile
from choreo.types import Key, PyTree


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The wall time of a run; NaN where it is not known."""

    seconds: float = math.nan
    """From the call of `train` to the last iteration."""
    compile_seconds: float = math.nan
    """The part of `seconds` spent compiling."""
    steps_per_second: float = math.nan
    """Steps per second (see `choreo.runs.steps`), without the time for compiling and evaluating."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The result of a training run."""

    config: RunConfig
    """Everything the run depended on."""
    train_state: PyTree
    """The field `train` of the carry: parameters, optimiser state and all else that was learned."""
    rows: list[Row]
    """Metrics, one row per iteration."""
    timing: Timing
    """Wall time and speed."""
    path: Path | None
    """The run folder, if there is one."""
    profile: Profile | None = None
    """A timeline of each site's work, if the run was made with train(profile=True); else None."""

    @property
    def algo(self) -> Any:
        return self.config.algo_with_horizon

    @property
    def env(self) -> Any:
        return self.config.env

    @property
    def layout(self) -> Any:
        return self.config.layout

    @functools.cached_property
    def params(self) -> PyTree:
        """The parameters with which the algorithm acts: `algo.policy(train_state)`."""
        return self.algo.policy(self.train_state)

    @functools.cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Each metric as an array over iterations; NaN where it was not measured."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        return {name: np.array([row.get(name, math.nan) for row in self.rows]) for name in names}

    @property
    def train_return(self) -> float:
        """Mean return of the last 100 training episodes; NaN if none has ended, or if the algorithm does not measure episodes."""
        return self.rows[-1].get("train_return", math.nan) if self.rows else math.nan

    @property
    def _measures_episodes(self) -> bool:
        return bool(self.rows) and "train_return" in self.rows[-1]

    def evaluate(self, episodes: int = 100, *, seed: int = 0, greedy: bool = True) -> Evaluation:
        """Play complete episodes with the final parameters, from fresh resets. A different `seed` gives different episodes."""
        key = jax.random.fold_in(jax.random.fold_in(self.config.key_evaluate, 2**31), seed)
        with jax_settings.put_back():
            use_compilation_cache()
            return evaluate(self.algo, self.env, self.params, key=key, episodes=episodes, greedy=greedy)

    def act(self, obs: Any, state: PyTree = None, *, greedy: bool = True, key: Key | None = None) -> Any:
        """The action for one observation, as a NumPy array.

        With a recurrent network, the result is `(action, state)`: pass the state with the next observation, and None at the
        start of an episode. `key` is needed only for greedy=False.
        """
        space = self.env.observation_space
        fix = "Pass one observation of one environment; for a batch, call `act` for each."
        if space.shape is None:  # a Dict or Tuple space
            if not space.contains(obs):
                raise EnvError(f"An observation of {self.env.name} must be in {space}.", fix=fix)
        elif np.shape(obs) != space.shape:
            raise EnvError(
                f"An observation of {self.env.name} has shape {list(space.shape)}, not {list(np.shape(obs))}.", fix=fix
            )
        if key is None:
            if not greedy:
                raise RunError(
                    "act(greedy=False) samples an action, and needs a key.", fix="Pass key=jax.random.key(0)."
                )
            key = self.config.key
        first = initial_state(self.algo, self.params)
        state = first if state is None else state
        one = np.asarray(obs, space.dtype) if space.shape is not None else dict(obs) if isinstance(obs, dict) else obs
        action, state = _act(self.algo, self.params, jax.tree.map(jnp.asarray, one), key, state, greedy)
        action = jax.tree.map(np.asarray, action)
        return action if first is None else (action, state)

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """The numbers of the table that `choreo train` prints at the end. The first access plays 100 evaluation episodes."""
        return {"return": self.evaluate(episodes=100).mean} | self.training_summary

    @property
    def training_summary(self) -> dict[str, Any]:
        """The numbers of `summary` without the evaluation."""
        measured = {"train_return": self.train_return} if self._measures_episodes else {}
        return {
            **measured,
            "iterations": len(self.rows),
            "env_steps": len(self.rows) * self.config.env_steps_per_iteration,
            **dataclasses.asdict(self.timing),
            "params_hash": checkpoint.sha256(self.params),
        }

    def plot(self, path: str | Path | None = None) -> Any:
        """The learning curve as a Matplotlib figure; written as PNG if `path` is given."""
        # Imported here: Matplotlib is slow to import, and few programs plot.
        from choreo.runs import figures

        figure = figures.learning_curve(self.metrics, title=self.config.title)
        if path is not None:
            figures.save_png(figure, Path(path))
        return figure

    def __repr__(self) -> str:
        folder = f", {self.path}" if self.path else ""
        measured = f", return {self.train_return:.1f}" if self._measures_episodes else ""
        return f"<Run {self.config.title}: {len(self.rows)} iterations{measured}{folder}>"


@static_key.jit
def _act(algo: Any, params: PyTree, obs: jax.Array, key: Key, state: PyTree, greedy: bool) -> tuple[PyTree, PyTree]:
    return act(algo, params, obs, key, state, greedy=greedy)
