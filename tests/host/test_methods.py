"""A site makes one Python object for its block of environments. All methods share the object. Their results are checked."""

from dataclasses import dataclass

import numpy as np
import pytest

from choreo.errors import AlgorithmError
from choreo.host import HostMethod, HostObjects, Spec


class Counters:
    """One counter per environment."""

    def __init__(self, envs):
        self.envs, self.count, self.closed, self.current = envs, np.zeros(len(envs), np.int32), False, None

    def add(self, numbers):
        self.count = self.count + numbers
        return (self.count,)

    def numbers(self):
        return (np.asarray(self.envs, np.int32),)

    def wrong_type(self):
        return (self.count.astype(np.float32),)

    def wrong_shape(self):
        return (self.count[:1],)

    def close(self):
        self.closed = True


@dataclass(frozen=True)
class Make:
    def __call__(self, envs):
        return Counters(envs)


def method(name):
    return HostMethod(Make(), name, (Spec((6,), "int32"),))


def test_a_site_has_one_object_for_its_own_environments():
    objects = HostObjects(replica=1, replicas=3)
    add = objects.bind(method("add"))
    add(np.array([1, 2], np.int32))
    assert add(np.array([1, 2], np.int32))[0].tolist() == [2, 4]
    assert objects.bind(method("numbers"))()[0].tolist() == [2, 3]
    assert len(objects.made) == 1, "two methods with an equal `make` did not share one object"
    (counters,) = objects.made.values()
    counters.current = 3
    # `calls` counts the beginning and the end of each of the three calls.
    assert objects.current() == 3 and objects.calls == 6
    objects.close()
    assert counters.closed and not objects.made


@pytest.mark.parametrize(("name", "got"), [("wrong_type", r"float32\[3\]"), ("wrong_shape", r"int32\[1\]")])
def test_results_that_differ_from_the_declaration_are_refused(name, got):
    call = HostObjects(replica=0, replicas=2).bind(method(name))
    with pytest.raises(AlgorithmError, match=rf"`{name}` returned {got}; it was declared to return int32\[3\]"):
        call()
