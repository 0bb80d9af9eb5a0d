"""Pure functions, a paper equation each."""

from choreo.ops.distributions import Categorical as Categorical
from choreo.ops.distributions import Distribution as Distribution
from choreo.ops.distributions import Gaussian as Gaussian
from choreo.ops.losses import clipped_surrogate as clipped_surrogate
from choreo.ops.normalise import Moments as Moments
from choreo.ops.normalise import Seen as Seen
from choreo.ops.normalise import look as look
from choreo.ops.normalise import merge_moments as merge_moments
from choreo.ops.normalise import normalise as normalise
from choreo.ops.normalise import update_moments as update_moments
from choreo.ops.returns import discounted_return as discounted_return
from choreo.ops.returns import gae as gae
from choreo.ops.returns import lambda_return as lambda_return
from choreo.ops.vtrace import VTrace as VTrace
from choreo.ops.vtrace import vtrace as vtrace
