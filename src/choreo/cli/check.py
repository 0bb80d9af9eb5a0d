"""The work of `choreo check`: test on a few small iterations that a layout changes nothing but time.

check_algorithm       checks that every part of the algorithm exists and has the right form
check_independent     searches for counterexamples to the independent=True that the user promised
deviations            compares every leaf of the carry and every metric with a reference. For most layouts in lockstep, the
                      reference is `jax.jit(iterate)`; `testing/layouts.py` lists all references
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from rich import box
from rich.table import Table

from choreo.errors import PartitionError
from choreo.layouts.base import Layout
from choreo.plans.build import plan
from choreo.runs import jax_settings
from choreo.runs.steps import env_steps_per_iteration
from choreo.runtime.compilation_cache import use_compilation_cache
from choreo.testing.algorithms import check_algorithm
from choreo.testing.independent import check_independent
from choreo.testing.layouts import Deviation, beyond, deviations, worst_of
from choreo.testing.marks import unmarked

FEW_ENVS = 6
"""The smallest number of environments that a check chooses itself."""
FEW_STEPS = 8
"""The largest `unroll`, and the largest batch of each buffer shard, in a check. Sizes that the user changed are kept."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a check: what was compared, and how large the differences were."""

    algo: Any
    """The algorithm that was run, with small sizes."""
    env: Any
    layout: Layout
    iterations: int
    deviations: list[Deviation]
    trusted: list[str]
    """Fragments marked independent=True, for which the check found no counterexample."""
    warnings: tuple[str, ...]
    """Warnings of the plan."""

    @classmethod
    def of(
        cls,
        algo: Any,
        env: Any,
        layout: Layout,
        *,
        num_envs: int | None = None,
        iterations: int = 3,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> "Verdict":
        """Check an algorithm with few environments (or `num_envs`). Sizes that the user did not change are made small."""
        with jax_settings.put_back():
            jax_settings.prepare(layout, env)
            use_compilation_cache()
            env = env.with_num_envs(num_envs or few_envs(algo, layout))
            layout.check_counts(env.num_envs)
            algo = small(algo, env, layout, iterations)
            check_algorithm(algo, env)
            trusted, warnings = check_independent(algo, env), plan(algo, env, layout).warnings
            found = deviations(algo, env, layout, iterations=iterations, tolerance=tolerance, seed=seed)
            return cls(
                algo=algo,
                env=env,
                layout=layout,
                iterations=iterations,
                deviations=found,
                trusted=trusted,
                warnings=warnings,
            )

    @property
    def worst(self) -> Deviation:
        return worst_of(self.deviations)

    @property
    def error(self) -> PartitionError | None:
        """The error about the largest deviation if this deviation is not allowed; else None."""
        return None if self.worst.is_allowed else beyond(self.worst, self.env, self.iterations)

    @property
    def title(self) -> str:
        return (
            f"{type(self.algo).__name__} on {self.env.name}, {self.env.num_envs} environments, "
            f"{f'unroll={self.algo.unroll}, ' if hasattr(self.algo, 'unroll') else ''}{self.iterations} iterations: {self.layout!r}"
        )

    @property
    def conclusion(self) -> str:
        """The result as a sentence, for a check that found no error."""
        words = "The layout changes nothing but time, as far as these iterations show."
        if self.layout.merge == "any":
            words = "Replaying the log of a run gives the same bits. The result depends on the number of workers."
        elif self.layout.is_relaxed:
            words = (
                "In lockstep, the layout changes nothing but time, as far as these iterations show. "
                "Replaying the log of a run gives the same bits."
            )
        names = ", ".join(f"`{name}`" for name in self.trusted)
        return words + (f" It is trusted, not proved, that environments do not mix in {names}." if names else "")

    def table(self) -> Table:
        """For each reference: the leaves and metrics that differ, largest difference first, and the number of equal ones."""
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("", overflow="fold")
        table.add_column("difference", justify="right")
        table.add_column("allowed", justify="right")
        table.add_column("from")
        for reference in dict.fromkeys(deviation.reference for deviation in self.deviations):
            compared = [deviation for deviation in self.deviations if deviation.reference == reference]
            differing = sorted((d for d in compared if d.difference > 0), key=lambda d: d.difference, reverse=True)
            for d in differing:
                table.add_row(d.name, f"{d.difference:.1e}", f"{d.allowed:g}", reference)
            if equal := len(compared) - len(differing):
                table.add_row(
                    f"{equal} {'other' if differing else 'leaf or metric' if equal == 1 else 'leaves and metrics'}",
                    "0",
                    "",
                    reference,
                )
        return table

    def to_dict(self) -> dict[str, Any]:
        """The result as data for JSON."""
        return {
            "algorithm": type(self.algo).__name__,
            "environment": self.env.name,
            "layout": repr(self.layout),
            "num_envs": self.env.num_envs,
            "unroll": getattr(self.algo, "unroll", None),
            "iterations": self.iterations,
            "ok": self.worst.is_allowed,
            "trusted": self.trusted,
            "warnings": list(self.warnings),
            "worst": dataclasses.asdict(self.worst),
            "deviations": [dataclasses.asdict(deviation) for deviation in self.deviations],
        }


def few_envs(algo: Any, layout: Layout) -> int:
    """The smallest number of environments, six or more, with at least two for every replica and shard."""
    counts = [n for group in layout.groups for n in (group.replicas, group.devices) if n]
    together = math.lcm(*counts, layout.shards, getattr(algo, "buffer_shards", 1))
    least = max(1, -(-FEW_ENVS // together), 2)
    # With `exact`, the number of blocks depends on the number of environments. The replicas must divide the blocks evenly.
    return next((n * together for n in range(least, least + 16) if _divides(layout, n * together)), least * together)


def _divides(layout: Layout, num_envs: int) -> bool:
    blocks = [(layout.num_blocks(group, num_envs), group.replicas) for group in layout.groups]
    return all(not replicas or (blocks or 1) % replicas == 0 for blocks, replicas in blocks)


def small(algo: Any, env: Any, layout: Layout, iterations: int) -> Any:
    """`algo` with small sizes, so that it learns within a few short iterations. Sizes that the user changed are kept.

    Returns `algo` with its own sizes if it cannot be traced with the small ones.
    """
    each = env.num_envs // (layout.shards * layout.num_workers)  # environments that `iterate` sees
    unroll = min(getattr(algo, "unroll", FEW_STEPS), FEW_STEPS)
    batch = FEW_STEPS * getattr(algo, "buffer_shards", 1)
    stored = max(unroll * env.num_envs, batch)
    most = {
        "unroll": unroll,
        "minibatch_size": unroll * (each // 2 if each % 2 == 0 else 1),
        "epochs": 2,
        "batch_size": batch,
        "min_size": stored,
        "capacity": 4 * stored,
    }
    changed = {
        field.name: min(field.default, most[field.name])
        for field in dataclasses.fields(algo)
        if field.name in most and type(field.default) is int and getattr(algo, field.name) == field.default
    }
    smaller = _with_horizon(dataclasses.replace(algo, **changed), env, iterations)
    return smaller if _runs(smaller, env.with_num_envs(each)) else _with_horizon(algo, env, iterations)


def _with_horizon(algo: Any, env: Any, iterations: int) -> Any:
    """`algo`; if its `total_steps` is None, with the length of the check in place of None. `train` does the same for a run."""
    if getattr(algo, "total_steps", 0) is not None:
        return algo
    return dataclasses.replace(algo, total_steps=iterations * (env_steps_per_iteration(algo, env) or 1))


def _runs(algo: Any, env: Any) -> bool:
    def one_iteration(key: jax.Array) -> Any:
        return algo.iterate(env, algo.init(env, key), key)

    try:
        with unmarked():
            eqx.filter_eval_shape(one_iteration, jax.random.key(0))
    except Exception:  # noqa: BLE001 - a user's algorithm may raise anything at sizes that the user did not choose
        return False
    return True
