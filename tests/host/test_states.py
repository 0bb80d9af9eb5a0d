"""The states of Python objects are plain data: they are copied, encoded and checked."""

import json

import numpy as np
import pytest

from choreo.errors import EnvError, RunError
from choreo.host import HostMethod, HostObjects, Spec
from choreo.host.states import HostStates, NoState, SiteStates, decode, encode, has_state, plain

PLAIN = {
    "none": None, "true": True, "int": 2**127 + 1, "float": 0.1, "text": "ü$", "nothing": [], "empty": {},
    "nested": [{"a": [np.arange(6, dtype=np.int16).reshape(2, 3), 1.5]}, np.array(True), np.zeros((0, 2), np.float32)],
}  # fmt: skip


def same(a, b):
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_plain_data_survives_json_and_its_arrays_are_copied():
    tree, arrays = encode(PLAIN, "x")
    assert same(decode(json.loads(json.dumps(tree)), arrays), PLAIN)
    array = np.zeros(3)
    copied = plain([array], "x")[0]
    array[:] = 1
    assert not copied.any()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"a": [0, (1, 2)]}, "a tuple at `$.a[1]`"),
        ([np.float32(1)], "a float32 at `$[0]`"),
        ({"a": {3: 1}}, "a dict at `$.a`"),
        ({"$array": 0}, "a dict at `$`"),
        ([np.array(["x"])], "an array of <U1 at `$[0]`"),
        ([np.array([None])], "an array of object at `$[0]`"),
        (np.random.default_rng(0), "a Generator at `$`"),
    ],
)
def test_data_that_is_not_plain_is_refused_with_its_path(data, why):
    with pytest.raises(EnvError) as refusal:
        encode(data, "`Robot`")
    assert refusal.value.what == f"`state` of `Robot` returned {why}, which is not plain data."
    assert "Convert a tuple to a list" in str(refusal.value.fix)


@pytest.mark.parametrize("tree", [{"$array": 1}, {"$array": "0"}, {"$array": True}, {"$array": -1}])
def test_a_reference_to_a_missing_array_is_refused(tree):
    with pytest.raises(ValueError, match="there is no array"):
        decode([tree], [np.zeros(1)])


def test_states_of_sites_are_put_in_the_order_of_the_environments():
    parts = [
        SiteStates(number=1, first=0, states=["x"]),
        SiteStates(number=0, first=2, states=["c", "d"]),
        SiteStates(number=0, first=0, states=["a", "b"]),
    ]
    states = HostStates.gathered(parts, ["A is lost.", "A is lost."])
    assert states == HostStates(objects={0: ["a", "b", "c", "d"], 1: ["x"]}, lost=("A is lost.",))


def test_an_object_that_is_lost_at_one_site_is_left_out():
    parts = [SiteStates(number=0, first=2, states=["c"]), SiteStates(number=1, first=0, states=["x"])]
    assert HostStates.gathered(parts, ["A is lost."]).objects == {1: ["x"]}
    with pytest.raises(AssertionError):
        HostStates.gathered(parts, [])


def test_states_that_are_lost_or_do_not_fit_are_refused():
    HostStates(objects={0: [1, 2]}).check({0: 2})
    with pytest.raises(RunError) as refusal:
        HostStates(objects={}, lost=("`Robot` has no methods `state` and `load`.",)).check({0: 2})
    assert str(refusal.value) == (
        "The state of the Python objects was not stored completely: `Robot` has no methods `state` and `load`.\n"
        "Give these objects the methods `state` and `load`, and train again."
    )
    with pytest.raises(RunError) as refusal:
        HostStates(objects={0: [1, 2]}).check({0: 2, 1: 1})
    assert refusal.value.what == (
        "The stored states do not fit the plan: they are those of 1 object with 2 environments, but the plan has 2 objects with "
        "2, 1 environments."
    )


class Robots:
    """Some robots, each with a position."""

    def __init__(self, envs):
        self.position = np.array(envs, np.int32)

    def move(self):
        self.position = self.position + 1
        return (self.position,)

    def state(self):
        return self.position.tolist()

    def load(self, states):
        self.position = np.array(states, np.int32)

    def close(self):
        pass


class Forgetful(Robots):
    state = np.zeros(3)  # an attribute of this name is not a method


class TooFew(Robots):
    def state(self):
        return [1]


def site(make, replica=1):
    objects = HostObjects(replica, 2)
    return objects, objects.bind(HostMethod(make, "move", (Spec((4,), "int32"),)))


def test_a_site_stores_and_loads_the_states_of_its_own_environments():
    objects, move = site(Robots)
    assert move()[0].tolist() == [3, 4]
    states = objects.states(Robots, is_method=True)
    assert states == [3, 4] and objects.blocks[Robots] == range(2, 4)
    other, move_other = site(Robots)
    other.load(Robots, states, is_method=True)  # before the first call of `move_other`
    assert move_other()[0].tolist() == move()[0].tolist() == [4, 5]


def test_an_object_without_its_state_says_so():
    assert has_state(Robots(range(2))) and not has_state(Forgetful(range(2)))
    objects, _ = site(Forgetful)
    with pytest.raises(NoState, match="`Forgetful` has no methods `state` and `load`"):
        objects.states(Forgetful, is_method=True)
    objects, _ = site(TooFew)
    with pytest.raises(EnvError) as refusal:
        objects.states(TooFew, is_method=True)
    assert str(refusal.value) == (
        "`state` of `TooFew` returned 1 states, but it has 2 environments.\n"
        "Return a list with one state for each environment, in order."
    )
