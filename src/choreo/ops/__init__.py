"""Pure functions and small distributions. Where a function is an equation of a paper, its docstring names the equation.

policy_gradient.py    distributions of actions, advantages
values.py             n-step returns, distributions of a return
normalise.py          running mean and variance of observations
"""

from choreo.ops.normalise import Moments as Moments
from choreo.ops.normalise import Seen as Seen
from choreo.ops.normalise import initial_moments as initial_moments
from choreo.ops.normalise import look as look
from choreo.ops.normalise import merge_moments as merge_moments
from choreo.ops.normalise import normalise as normalise
from choreo.ops.normalise import update_moments as update_moments
from choreo.ops.policy_gradient import Bernoulli as Bernoulli
from choreo.ops.policy_gradient import Categorical as Categorical
from choreo.ops.policy_gradient import Distribution as Distribution
from choreo.ops.policy_gradient import Gaussian as Gaussian
from choreo.ops.policy_gradient import Independent as Independent
from choreo.ops.policy_gradient import Shifted as Shifted
from choreo.ops.policy_gradient import VTrace as VTrace
from choreo.ops.policy_gradient import clipped as clipped
from choreo.ops.policy_gradient import clipped_surrogate as clipped_surrogate
from choreo.ops.policy_gradient import discounted_return as discounted_return
from choreo.ops.policy_gradient import gae as gae
from choreo.ops.policy_gradient import lambda_return as lambda_return
from choreo.ops.policy_gradient import masked as masked
from choreo.ops.policy_gradient import multi_categorical as multi_categorical
from choreo.ops.policy_gradient import vtrace as vtrace
from choreo.ops.values import NStep as NStep
from choreo.ops.values import categorical_projection as categorical_projection
from choreo.ops.values import huber as huber
from choreo.ops.values import n_step as n_step
from choreo.ops.values import quantile_huber as quantile_huber
