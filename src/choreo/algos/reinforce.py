"""REINFORCE (Williams 1992) with a learned baseline, for discrete and continuous actions, for networks with or without memory.

    policy:   log pi(a | s) * (G - V(s))        G: the discounted sum of all rewards from this step on
    critic:   G - V(s)                          the error

The advantage of an action is G minus the baseline V(s), which the critic predicts. Deviations from the paper:

- The baseline is a network.
- An update comes after `unroll` steps of every environment, instead of after each episode.
- The loss has an entropy bonus.
"""

from dataclasses import dataclass
from typing import Any

import optax

from choreo import ops
from choreo.algos.one_gradient import OneGradient, Predictions, Targets
from choreo.loops import Transition


@dataclass(frozen=True, kw_only=True)
class REINFORCE(OneGradient):
    """Monte Carlo policy gradient with a learned baseline."""

    learning_rate: float = 3e-3
    unroll: int = 128

    def targets(self, trajectory: Transition, predicted: Predictions) -> Targets:
        """Sutton & Barto 2018, section 13.4, without the factor gamma^t, which would make the weight of late steps tiny."""
        # Where the end of the unroll or a time limit cuts an episode, the return bootstraps from the baseline. Learning only from
        # whole episodes would leave out the long episodes, which differ from the short ones.
        value = ops.discounted_return(
            trajectory.reward, self.gamma * trajectory.discount, trajectory.last, predicted.value_t
        )
        return Targets(value, value - predicted.value_tm1)

    def usual_optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        return optax.adam(learning_rate, eps=1e-5)
