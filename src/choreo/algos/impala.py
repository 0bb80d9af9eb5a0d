"""IMPALA (Espeholt et al. 2018), for discrete and continuous actions, for networks with or without memory.

    policy:   log pi(a | s) * rho * (r + gamma v' - V(s))       rho: the clipped importance weight of action a
    critic:   v - V(s)                                          v, v': the V-trace targets of state s and its successor

In a relaxed layout, actors use parameters that are some iterations old. `act` returns the distribution from which it drew the
action, and V-trace corrects for the difference between that distribution and the learner's policy. In lockstep there is no
difference, and the gradient is that of A2C with `gae_lambda` = `trace_lambda` (if `c_bar` is at least 1).
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax

from choreo import ops
from choreo.algos.one_gradient import OneGradient, Predictions, Targets
from choreo.errors import AlgorithmError
from choreo.loops import Transition


@dataclass(frozen=True, kw_only=True)
class IMPALA(OneGradient):
    """Importance-weighted actor-learner: an actor-critic that corrects for the older parameters of its actors."""

    trace_lambda: float = 0.95
    """Between one-step (0) and n-step (1) targets, n = `unroll`; the paper has 1."""
    rho_bar: float = 1.0
    """Bound on the importance weight of a temporal difference. With a larger bound, the critic learns the values of a policy that
    is closer to the learner's policy."""
    c_bar: float = 1.0
    """Bound on the importance weight in a trace. A smaller bound gives targets with less variance."""

    def __post_init__(self):
        super().__post_init__()
        if not self.c_bar > 0:
            raise AlgorithmError(
                f"IMPALA(c_bar={self.c_bar}) must be above 0.", fix="For one-step targets set trace_lambda=0."
            )
        if self.c_bar > self.rho_bar:
            raise AlgorithmError(
                f"IMPALA(c_bar={self.c_bar}) may not be larger than rho_bar={self.rho_bar}.",
                fix="V-trace converges for c_bar <= rho_bar (theorem 1 of the paper): raise rho_bar, or lower c_bar.",
            )

    def targets(self, trajectory: Transition, predicted: Predictions) -> Targets:
        """The targets of section 4.2 of the paper; the loss is a mean over the trajectory, not a sum as in the paper."""
        log_prob, behaviour_log_prob = (pi.log_prob(trajectory.action) for pi in (predicted.pi, trajectory.extras))
        log_ratio = log_prob - behaviour_log_prob
        ratio = jnp.exp(log_ratio)
        value, advantage = ops.vtrace(
            ratio,
            trajectory.reward,
            self.gamma * trajectory.discount,
            trajectory.last,
            predicted.value_tm1,
            predicted.value_t,
            self.trace_lambda,
            rho_bar=self.rho_bar,
            c_bar=self.c_bar,
        )
        metrics = {"importance": jnp.mean(ratio), "behaviour_kl": jnp.mean(ratio - 1 - log_ratio)}
        return Targets(value, advantage, metrics)

    def usual_optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        # RMSProp, as in the paper. With Adam, some seeds failed if actors used parameters that were four iterations old
        # (docs/algorithms/impala.md).
        return optax.rmsprop(learning_rate, decay=0.99, eps=1e-5)
