"""Conformance checks for our code and for users' code, such as `check_env` and `check_algorithm`."""

from choreo.testing.algorithms import check_algorithm as check_algorithm
from choreo.testing.channels import check_channel as check_channel
from choreo.testing.envs import check_env as check_env
from choreo.testing.independent import check_independent as check_independent
from choreo.testing.launchers import check_launcher as check_launcher
from choreo.testing.layouts import check_layout as check_layout
from choreo.testing.marks import unmarked as unmarked
