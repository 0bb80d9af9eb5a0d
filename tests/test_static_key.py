"""Static values can compare equal (`==`) and yet differ in type or bits. Such values must not share a program."""

import collections
import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo import static_key
from choreo.errors import AlgorithmError
from choreo.static_key import NoKey, tree_key
from choreo.static_key import static_key as key
from choreo.testing import unmarked
from laws.reference import planned_run
from partition.ponds import Functions, Pond


@pytest.fixture(autouse=True)
def types_promote():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Pair(NamedTuple):
    a: Any
    b: Any = None


@dataclass(frozen=True)
class Cfg:
    x: Any

    @choreo.fragment("actor")
    def scale(self, y):
        return y * self.x

    @choreo.fragment("actor")
    def inverse(self, y):
        return y / self.x

    def method(self):
        return self.x


@dataclass(frozen=True)
class WithMore:
    """A dataclass with an attribute that is not a field."""

    x: dataclasses.InitVar[float]
    y: int = 0

    def __post_init__(self, x):
        object.__setattr__(self, "kept", x)


@dataclass(frozen=True)
class Number(float):
    """A number with a unit."""

    unit: str = ""


class Slotted:
    __slots__ = ("hidden",)


@dataclass(frozen=True)
class InASlot(Slotted):
    y: int = 0

    def having(self, x):
        object.__setattr__(self, "hidden", x)
        return self


@dataclass(frozen=True)
class Uncompared:
    x: Any = field(compare=False)


def double(x):
    return 2 * x


WRAPPED = {
    "itself": lambda x: x,
    "tuple": lambda x: (x, 2),
    "list": lambda x: [x],
    "dict value": lambda x: {"a": x},
    "dict key": lambda x: {x: 1},
    "OrderedDict": lambda x: collections.OrderedDict(a=x),
    "NamedTuple": lambda x: Pair(x),
    "dataclass": Cfg,
    "dataclass in a dataclass": lambda x: Cfg(Cfg((x,))),
    "field with compare=False": Uncompared,
    "attribute that is not a field": WithMore,
    "slot of a base class": lambda x: InASlot().having(x),
    "partial": lambda x: functools.partial(double, x),
    "partial by name": lambda x: functools.partial(double, x=x),
    "bound method": lambda x: Cfg(x).method,
    "slice": lambda x: slice(x, None),
}
LOOK_EQUAL = [(1, 1.0), (1, True), (1.0, True), (0.0, -0.0), (0, False), (1, np.int32(1)), (1.0, np.float32(1)),
              (1.0, 1 + 0j), (0j, -0j), (np.float32(1), np.float64(1)), (np.zeros(2), -np.zeros(2)), ("a", b"a")]  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("pair", LOOK_EQUAL, ids=str)
def test_values_that_differ_only_in_type_or_bits_have_different_keys(pair, wrap):
    if wrap == "dict key" and any(isinstance(x, np.ndarray) for x in pair):
        pytest.skip("an array cannot be a key of a dict")
    one, other = (WRAPPED[wrap](x) for x in pair)
    assert key(one) != key(other)


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("value", [1, 1.5, True, "a", None, math.nan, 2j, np.float32(3)], ids=str)
def test_the_same_value_has_the_same_key(value, wrap):
    assert key(WRAPPED[wrap](value)) == key(WRAPPED[wrap](value))
    assert hash(key(WRAPPED[wrap](value))) == hash(key(WRAPPED[wrap](value)))


def test_the_key_of_a_dataclass_that_is_also_a_number_contains_the_number():
    assert key(Number(1.0)) != key(Number(2.0))


def test_an_object_that_is_not_plain_data_shares_its_key_with_no_other_object():
    class Thing:
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    assert Thing() == Thing()
    assert key(Thing()) != key(Thing())
    one = Thing()
    assert key(one) == key(one)
    assert key(lambda: 1) != key(lambda: 1)
    assert key(Cfg(double)) == key(Cfg(double))


def test_the_order_of_a_dict_is_part_of_its_key():
    assert key({"a": 1, "b": 2}) != key({"b": 2, "a": 1})


def test_an_array_in_a_field_is_compared_by_content():
    array = np.zeros(2)
    before = key(Cfg(array))
    array[0] = 1
    assert key(Cfg(array)) != before
    assert key(Cfg(np.zeros(2))) == before


def test_a_mutable_object_has_no_key():
    with pytest.raises(NoKey, match="a `set` is not hashable"):
        key((1, {2}))
    loop: list = []
    loop.append(loop)
    with pytest.raises(NoKey):
        key(loop)
    with pytest.raises(AlgorithmError, match="`scale` was called with a `set`, which is neither an array nor hashable"):
        Cfg({1}).scale(1.0)


class Net(eqx.Module):
    w: jax.Array
    rate: Any = eqx.field(static=True)


def test_static_fields_of_a_module_are_distinguished():
    trees = [jax.tree.structure(Net(jnp.ones(2), rate)) for rate in (1, 1.0, True)]
    assert trees[0] == trees[1]  # JAX compares static fields by `==`, so Choreo needs a different key
    assert len({tree_key(tree) for tree in trees}) == 3
    trees = [jax.tree.structure({name: 0.0}) for name in (1, 1.0, True)]
    assert len({tree_key(tree) for tree in trees}) == 3


class TestAFragment:
    """The cache of a fragment distinguishes static values."""

    @pytest.mark.parametrize("values", [(1, 1.0), (1.0, 1), (True, 1, 1.0)])
    def test_is_traced_for_each_type_in_self(self, values):
        y = jnp.arange(3)
        for value in values:
            with unmarked():
                expected = Cfg(value).scale(y)
            assert Cfg(value).scale(y).dtype == expected.dtype

    def test_distinguishes_zero_and_minus_zero(self):
        assert [float(Cfg(zero).inverse(jnp.float32(1))) for zero in (0.0, -0.0, 0.0)] == [
            math.inf,
            -math.inf,
            math.inf,
        ]

    def test_is_traced_for_each_static_field(self):
        rate = choreo.fragment("actor")(lambda net, y: y * net.rate)
        types = [rate(Net(jnp.ones(2), value), jnp.arange(3)).dtype for value in (1, 1.0, 1)]
        assert types == [jnp.int32, jnp.float32, jnp.int32]

    def test_is_traced_for_each_type_of_dict_key(self):
        first = choreo.fragment("actor")(lambda d, y: y * next(iter(d)))
        types = [first({name: jnp.ones(())}, jnp.arange(3)).dtype for name in (1, 1.0, 1)]
        assert types == [jnp.int32, jnp.float32, jnp.int32]

    def test_is_traced_for_each_configuration(self):
        product = choreo.fragment("actor")(lambda x: x @ x)
        one = jax.ShapeDtypeStruct((3, 2, 2), jnp.float32)
        for precision in ("highest", None, "highest"):
            with jax.default_matmul_precision(precision):
                text = str(jax.make_jaxpr(jax.vmap(product))(one))
            assert ("HIGHEST" in text) == (precision == "highest")

    def test_records_the_program_with_the_configuration_of_the_call(self):
        from choreo import _compat
        from choreo.roles import find_call

        product = choreo.fragment("actor")(lambda x: x @ x)
        with jax.default_matmul_precision("highest"):
            closed = jax.make_jaxpr(jax.vmap(product))(jax.ShapeDtypeStruct((3, 2, 2), jnp.float32))
        call = find_call(_compat.call_name(closed.jaxpr.eqns[0]))
        assert "HIGHEST" in str(call.jaxpr)

    def test_drops_the_least_recently_used_program(self):
        traced = []

        @choreo.fragment("actor")
        def f(x, n):
            traced.append(n)
            return x + n

        f.forms.size = 2
        for n in (1, 2, 1, 3, 1, 2):
            f(jnp.float32(0), n)
        assert traced == [1, 2, 3, 2]

    def test_keeps_the_order_of_dicts(self):
        """JAX sorts the keys of a dict. But a fragment must get and return a dict with the keys in their original order."""

        @choreo.fragment("actor")
        def swap(d, *, more):
            assert list(d["z"]) == ["q", "b"] and list(more) == [2, 1]
            return {"y": jnp.stack(list(d["z"].values())), "x": collections.defaultdict(list, {"d": d["a"], "c": 3})}

        for _ in range(2):
            out = swap({"z": {"q": 1.0 * jnp.ones(2), "b": 2.0 * jnp.ones(2)}, "a": jnp.ones(1)}, more={2: 0, 1: 0})
            assert list(out) == ["y", "x"] and list(out["x"]) == ["d", "c"] and out["x"].default_factory is list
            assert float(out["y"][0, 0]) == 1.0
        other = choreo.fragment("actor")(lambda d: next(iter(d.values())))
        assert [
            float(other(d)) for d in ({"a": jnp.ones(()), "b": jnp.zeros(())}, {"b": jnp.zeros(()), "a": jnp.ones(())})
        ] == [1, 0]

    def test_keeps_64_bit_numpy_values_within_a_trace(self):
        @choreo.fragment("actor")
        def scaled(x, n, table):
            return x * float(n // 2**39) + table.sum() / 2**33, sum(1 for _ in range(np.int64(n) >> 40))

        def program(x):
            return scaled(x, np.int64(2**40), np.array([2**33, 2**33]))[0]

        with unmarked():
            expected = jax.jit(program)(jnp.float32(1))
        assert float(jax.jit(program)(jnp.float32(1))) == float(expected) == 4.0

    def test_a_plan_traces_fragments_anew(self):
        """An object, a global or a closure that the fragment reads may have changed since the last trace."""

        class Settings:
            rate = 1.0

        settings = Settings()

        @choreo.fragment("learner")
        def learn(w, settings):
            return w * settings.rate

        algo = Functions(lambda env, key: {"w": jnp.ones(3)}, lambda env, c, key: ({"w": learn(c["w"], settings)}, {}))
        found = []
        for rate in (2.0, 3.0):
            settings.rate = rate
            found.append(float(planned_run(algo, Pond(), choreo.fused(), jax.random.key(0), 1)["['w']"][0]))
        assert found == [2.0, 3.0]


def test_jit_distinguishes_static_values():
    times = static_key.jit(lambda x, by: x * by)
    assert [times(jnp.arange(2), by).dtype for by in (1, 1.0, 1)] == [jnp.int32, jnp.float32, jnp.int32]


def test_cache_distinguishes_static_values():
    kind = static_key.cache(lambda cfg: type(cfg.x).__name__)
    assert [kind(Cfg(x)) for x in (1, 1.0, True)] == ["int", "float", "bool"]
