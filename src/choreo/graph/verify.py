"""Check the rules of a graph after every pass that makes a graph. A failed check is a bug in Choreo, not in the user's code."""

from typing import Any

import jax.extend.core as jec

from choreo.graph.graph import Graph
from choreo.graph.ir import Body, Operand, Value


def verify(graph: Graph, after: str) -> Graph:
    """Return the graph, or raise an AssertionError that names the pass and the broken rule, and prints the graph."""
    try:
        assert len(graph.in_names) == len(graph.body.ins), "an input without a name"
        assert len(graph.out_names) == len(graph.body.outs), "an output without a name"
        _verify_body(graph.body, seen=set())
    except AssertionError as broken:
        raise AssertionError(f"`{after}` broke the graph of `{graph.name}`: {broken}\n{graph}") from broken
    return graph


def _verify_body(body: Body, seen: set[int]) -> None:
    known: set[Value] = set()

    def define(value: Value, what: str) -> None:
        assert value.number not in seen, f"{what} {value!r} is defined twice"
        seen.add(value.number)
        known.add(value)

    def check_read(operand: Operand, what: str) -> None:
        is_literal = isinstance(operand, jec.Literal)
        assert is_literal or operand in known, f"{what} reads {operand!r} before it is produced"

    assert body.num_consts + body.num_carry <= len(body.ins), "more consts and carry than inputs"
    for value in body.ins:
        define(value, "input")
    for value in body.consts:
        define(value, "constant")
    for op in body.ops:
        assert len(op.ins) == len(op.eqn.invars), f"{op!r} has lost an operand"
        assert len(op.outs) == len(op.eqn.outvars), f"{op!r} has lost a result"
        for operand, var in zip(op.ins, op.eqn.invars, strict=True):
            check_read(operand, repr(op))
            assert _type(operand) == _type(var), f"{op!r} changes a type"
        assert not op.call or op.roles == {op.call.role}, f"fragment {op!r} has roles other than the role of its call"
        if op.body:
            assert op.eqn.primitive.name == "scan" and op.roles, f"{op!r} has a body but is not a scan with fragments"
            assert len(op.body.ins) == len(op.ins) and len(op.body.outs) == len(op.outs), (
                f"the body of {op!r} does not have as many inputs and outputs as the op"
            )
            _verify_body(op.body, seen)
        for value in op.outs:
            if value:
                define(value, "result")
    for operand in body.outs:
        check_read(operand, "output")
    for before, after in zip(body.carry_ins, body.carry_outs, strict=True):
        assert _type(before) == _type(after), f"carry {before!r} comes back as {after!r}"


def _type(operand: Any) -> tuple[Any, Any]:
    return operand.aval.shape, operand.aval.dtype
