"""Experience replay as pure values: what has been stored, and what is drawn of it."""

from choreo.buffers.base import Replay as Replay
from choreo.buffers.base import ReplayState as ReplayState
from choreo.buffers.base import Sample as Sample
from choreo.buffers.base import StoredStep as StoredStep
from choreo.buffers.tables import Table as Table
