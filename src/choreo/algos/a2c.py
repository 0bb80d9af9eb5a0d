"""Advantage actor-critic (Mnih et al. 2016), for discrete and continuous actions, for networks with or without memory.

    policy:   log pi(a | s) * A         A: the generalised advantage of action a, from the critic's values
    critic:   (V(s) + A) - V(s)         the error; no gradient flows through the target V(s) + A

In lockstep this algorithm is A2C. Under the layout `a3c` it is A3C: each worker computes gradients from the steps of its own
environments, and one site applies each gradient when the gradient arrives.
"""

from dataclasses import dataclass
from typing import Any

import optax

from choreo import ops
from choreo.algos.one_gradient import OneGradient, Predictions, Targets
from choreo.loops import Transition


@dataclass(frozen=True, kw_only=True)
class A2C(OneGradient):
    """Advantage actor-critic; under the asynchronous layout `a3c` it is A3C."""

    learning_rate: float = 2e-3
    unroll: int = 8
    gae_lambda: float = 0.95
    """Between one-step (0) and n-step (1) advantages, n = `unroll`; the paper has 1."""

    def targets(self, trajectory: Transition, predicted: Predictions) -> Targets:
        """The targets of section 4 of the paper (A3C), with generalised instead of n-step advantages."""
        _, value_tm1, value_t = predicted
        discount_t = self.gamma * trajectory.discount
        advantage = ops.gae(trajectory.reward, discount_t, trajectory.last, value_tm1, value_t, self.gae_lambda)
        return Targets(value_tm1 + advantage, advantage)

    def usual_optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        # RMSProp, as in the paper. With Adam, five of the six settings that we tried failed on some seeds (docs/algorithms/a2c.md).
        return optax.rmsprop(learning_rate, decay=0.99, eps=1e-5)
