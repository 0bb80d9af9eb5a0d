"""Experience replay as pure values: what has been stored, and what is drawn of it."""

from choreo.replay.base import Replay as Replay
from choreo.replay.base import ReplayState as ReplayState
from choreo.replay.base import Sample as Sample
from choreo.replay.base import Step as Step
from choreo.replay.tables import Table as Table
