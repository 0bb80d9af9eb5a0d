"""Choreo: an RL algorithm is written once, as plain JAX; a layout decides where it runs."""

from choreo.roles import all_reduce as all_reduce
from choreo.roles import fragment as fragment
from choreo.roles import host_fragment as host_fragment
