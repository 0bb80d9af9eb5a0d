"""Layouts: where an algorithm runs, as a value."""

from choreo.layouts.base import Group as Group
from choreo.layouts.base import Layout as Layout
from choreo.layouts.presets import ALIASES as ALIASES
from choreo.layouts.presets import PRESETS as PRESETS
from choreo.layouts.presets import apex as apex
from choreo.layouts.presets import central as central
from choreo.layouts.presets import coarse as coarse
from choreo.layouts.presets import find as find
from choreo.layouts.presets import fine as fine
from choreo.layouts.presets import fused as fused
from choreo.layouts.presets import multi_learner as multi_learner
from choreo.layouts.presets import per_agent as per_agent
from choreo.layouts.presets import sebulba as sebulba
