"""Collect the states of the Python objects at the sites of a process, and load them again.

Objects are numbered in the order in which the whole program first calls them. A worker has only the steps of its own groups, so
the coordinator numbers the objects, and tells each worker the numbers of each group's objects, in order. This module does not
import JAX.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from choreo.errors import EnvError
from choreo.host import HostMethod, HostObjects, key_of
from choreo.host.states import NoState, SiteStates
from choreo.partition.program import HostCall, Step, walk
from choreo.runtime.engine.execution import Execution, HostNumbers
from choreo.types import GroupName


def number_objects(steps: Iterable[Step]) -> HostNumbers:
    """The numbers of all Python objects. `steps` are those of `init` and `iterate`, for all groups."""
    calls = list(host_calls(steps))
    number_of = {key: number for number, key in enumerate(dict.fromkeys(key_of(call.fn) for call in calls))}
    groups = dict.fromkeys(call.group for call in calls)
    return {group: tuple(number_of[key] for key in _objects_of(calls, group)) for group in groups}


def collect(execution: Execution) -> tuple[list[SiteStates], list[str]]:
    """The states of the objects of this process, and a sentence about each object that has no state."""
    found, lost = [], []
    for objects, key, is_method, number in _objects(execution):
        try:
            states = objects.states(key, is_method=is_method)
        except NoState as why:
            lost.append(f"{why}.")
        else:
            found.append(SiteStates(number=number, first=objects.blocks[key].start, states=states))
    return found, lost


def load(execution: Execution, states: Mapping[int, Sequence[Any]]) -> None:
    """Let the objects of this process continue from the states of all environments, by the numbers of the objects."""
    for objects, key, is_method, number in _objects(execution):
        envs = objects.blocks[key]
        try:
            objects.load(key, states[number][envs.start : envs.stop], is_method=is_method)
        except NoState as why:
            raise EnvError(
                f"A stored state cannot be loaded: {why}.", fix="Use the environment of the run that stored it."
            ) from why


def _objects(execution: Execution) -> Iterator[tuple[HostObjects, Any, bool, int]]:
    """For every Python object of this process: the objects of its site, its key, whether it belongs to a method, its number."""
    programs = execution.programs
    calls = list(host_calls(programs.init.steps + programs.iterate.steps))
    for (group, _), objects in execution.objects.items():
        own = _objects_of(calls, group)
        for (key, is_method), number in zip(own.items(), programs.host_numbers.get(group, ()), strict=True):
            yield objects, key, is_method, number


def _objects_of(calls: list[HostCall], group: GroupName) -> dict[Any, bool]:
    """The keys of a group's Python objects, in the order of their first calls, each with True if it belongs to a method."""
    return {key_of(call.fn): isinstance(call.fn, HostMethod) for call in calls if call.group == group}


def host_calls(steps: Iterable[Step]) -> Iterator[HostCall]:
    return (step for step, _ in walk(tuple(steps)) if isinstance(step, HostCall))
