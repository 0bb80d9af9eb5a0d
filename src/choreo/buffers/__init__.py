"""Experience replay as pure functions on arrays: add steps, draw items, set priorities."""

from choreo.buffers.base import Replay as Replay
from choreo.buffers.base import ReplayState as ReplayState
from choreo.buffers.base import Sample as Sample
from choreo.buffers.base import StoredStep as StoredStep
from choreo.buffers.tables import Table as Table
