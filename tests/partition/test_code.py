"""The code of a segment is data: it can be inspected and holds no reference to an analysis. One function, `evaluate`, runs it."""

import functools
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from choreo.envs import make
from choreo.graph.ir import Op
from choreo.layouts import coarse, fine, fused, multi_learner
from choreo.partition.code import DrawCode, JoinedCode, OpsCode, RestCode, SegmentCode, evaluate
from choreo.partition.cut import _Cutter
from choreo.partition.demand import Needs
from choreo.partition.place import Placement, _Placer
from choreo.partition.program import Segment, walk
from choreo.plans.build import plan
from choreo.plans.plan import Plan
from tiny import Tiny

CASES = {
    "fused": ("jax:CartPole-v1", fused()),
    "coarse x2": ("jax:CartPole-v1", coarse(2)),
    "fine x2": ("jax:CartPole-v1", fine(2)),
    "Python environments": ("CartPole-v1", coarse(2)),
    "learners that combine gradients": ("jax:CartPole-v1", multi_learner(2)),
}


@functools.cache
def planned(case: str) -> Plan:
    env, layout = CASES[case]
    return plan(Tiny(unroll=3), make(env, 4), layout)


def segments(case: str) -> list[Segment]:
    both = (planned(case).init, planned(case).iterate)
    return [step for program in both for step, _ in walk(program.steps) if isinstance(step, Segment)]


def reachable(start: object) -> Iterator[object]:
    """Every object that can be reached from `start` through fields, containers and closures. Globals of functions are left out."""
    seen, todo = set(), [start]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | types.ModuleType | str | bytes | np.ndarray | jax.Array):
            continue
        seen.add(id(each))
        yield each
        todo += list(getattr(each, "__dict__", {}).values())
        todo += [getattr(each, name, None) for kind in type(each).__mro__ for name in _slots(kind)]
        if isinstance(each, dict):
            todo += [*each.keys(), *each.values()]
        elif isinstance(each, tuple | list | set | frozenset):
            todo += each
        elif isinstance(each, functools.partial):
            todo += [each.func, each.args, each.keywords]
        elif isinstance(each, types.MethodType):
            todo += [each.__self__, each.__func__]
        elif isinstance(each, types.FunctionType):
            todo += [cell.cell_contents for cell in each.__closure__ or ()] + list(each.__defaults__ or ())


def _slots(kind: type) -> list[str]:
    names = kind.__dict__.get("__slots__", ())
    return [name for name in ([names] if isinstance(names, str) else names) if name != "__weakref__"]


def test_reachable_looks_into_closures_and_partials():
    hidden = Placement(planned("fused").sites)
    assert hidden in list(reachable({"fn": [lambda: hidden]}))
    assert hidden in list(reachable(functools.partial(print, hidden)))


@pytest.mark.parametrize("case", CASES)
def test_a_segment_holds_no_reference_to_an_analysis(case):
    for segment in segments(case):
        found = [each for each in reachable(segment) if isinstance(each, Needs | Placement | _Placer | _Cutter)]
        assert not found, f"{segment.name} holds {found}"


@pytest.mark.parametrize("case", CASES)
def test_a_segment_has_the_same_name_roles_and_types_as_its_code(case):
    for segment in segments(case):
        code = segment.fn
        assert isinstance(code, SegmentCode)
        assert all(isinstance(op, Op) for op in code.ops)
        facts = (segment.name, segment.roles, segment.out_axes, segment.out_avals, segment.combines)
        assert facts == (code.name, code.roles, code.out_axes, code.out_avals, code.combines)


def test_the_cases_contain_every_kind_of_code():
    within = [each for case in CASES for segment in segments(case) for each in reachable(segment)]
    kinds = {type(each) for each in within if isinstance(each, SegmentCode)}
    assert kinds == {OpsCode, JoinedCode, DrawCode, RestCode}


@pytest.mark.parametrize("case", [case for case in CASES if case != "learners that combine gradients"])
def test_eager_evaluation_equals_the_compiled_segment(case):
    """The test leaves out the case with learners that combine gradients. The code of these learners needs the mapped axis that
    `collectives.py` provides."""
    for number, segment in enumerate(segments(case)):
        code, values = segment.fn, [example(given.aval, number + i) for i, given in enumerate(segment.ins)]
        assert isinstance(code, SegmentCode)
        index, t = jnp.int32(0), jnp.int32(1)
        eager, compiled = evaluate(code, index, t, values), jax.jit(code)(index, t, *values)
        for got, expected, aval in zip(eager, compiled, segment.out_avals, strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype) == (aval.shape, aval.dtype)
            np.testing.assert_allclose(as_numpy(got), as_numpy(expected), rtol=1e-5, atol=1e-6, err_msg=segment.name)


def example(aval, number: int) -> jax.Array:
    """An array of the given type. `number` is the seed of its random numbers."""
    key = jax.random.key(number)
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, aval.shape) if aval.shape else key
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jax.random.uniform(key, aval.shape, aval.dtype, -0.1, 0.1)
    return jnp.zeros(aval.shape, aval.dtype)


def as_numpy(value: jax.Array) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)
