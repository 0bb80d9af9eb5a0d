"""The parts of a graph. They are immutable, and refer to the equations of a traced program.

    Graph  = a body, with names for its inputs and outputs (in `graph.py`)
    Body   = ins, ops, outs            the inputs of a scan are consts, carry, xs, as in `lax.scan`;
                                       the inputs of `iterate` are carry, key, iteration; of `init`, key
    Op     = one equation over values  a fragment (it has a call), a scan that contains fragments (it has a body), or glue
    Value  = one array

A value belongs to one body. One op of that body produces the value, or the value is an input or a constant of the body.
`verify.py` checks these rules. Nothing here depends on layouts.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jec

from choreo import _compat
from choreo.roles import Call
from choreo.types import Role


@dataclass(frozen=True, eq=False)
class Value:
    """One array that flows through the graph."""

    number: int
    """Unique in the graph; values are numbered in the order in which they are produced."""
    aval: Any
    """Shape and dtype."""
    label: str
    """A name for people: a path into the user's data, or the name of the operation that produces the value."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.aval)

    def __repr__(self) -> str:
        return f"v{self.number}:{self.aval.str_short(short_dtypes=True)}"


Operand = Value | jec.Literal


def nbytes_of(aval: Any) -> int:
    """The size of an array of this shape and dtype. A random key counts as 8 bytes."""
    return math.prod(aval.shape) * (8 if _compat.is_key(aval.dtype) else aval.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class Op:
    """One equation of the program, over values of the graph."""

    eqn: jec.JaxprEqn
    ins: tuple[Operand, ...]
    outs: tuple[Value | None, ...]
    """The results; None for a result that nothing reads, or that is an operand returned unchanged (readers read the operand)."""
    roles: frozenset[Role]
    """The role of a fragment, or the roles of all fragments inside of a scan; empty for glue."""
    call: Call | None = None
    """For a fragment: how it was called."""
    body: "Body | None" = None
    """For a scan that contains fragments: its body. The scan can be split over sites."""
    at: str = ""
    """File and line of the user's code, with the function's name."""

    @property
    def name(self) -> str:
        return self.call.name if self.call else _compat.call_name(self.eqn) or self.eqn.primitive.name

    @property
    def host(self) -> bool:
        """True for a host fragment, and for a scan that contains one."""
        return bool(self.call and self.call.host) or bool(self.body and any(op.host for op in self.body.ops))

    def values(self) -> Iterator[Value]:
        """The operands, without literals."""
        return (v for v in self.ins if isinstance(v, Value))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.ins))}) -> {', '.join(map(repr, self.outs))}"


@dataclass(frozen=True, eq=False)
class Body:
    """A sequence of ops without branches: the whole program, or the inside of a scan."""

    ins: tuple[Value, ...]
    """Consts, then carry, then xs."""
    ops: tuple[Op, ...]
    """In topological order."""
    outs: tuple[Operand, ...]
    """Carry, then ys."""
    consts: Mapping[Value, Any]
    """The constants of this body, with their arrays. The consts of a scan are inputs of its body, so they are not among these."""
    num_consts: int
    """How many of `ins` are consts."""
    num_carry: int
    """How many of `ins`, and how many of `outs`, are carry."""
    length: int = 1
    """The number of rounds of a scan."""
    reverse: bool = False
    """True for a scan that goes from the last slice to the first."""

    @property
    def const_ins(self) -> tuple[Value, ...]:
        return self.ins[: self.num_consts]

    @property
    def carry_ins(self) -> tuple[Value, ...]:
        return self.ins[self.num_consts : self.num_consts + self.num_carry]

    @property
    def xs(self) -> tuple[Value, ...]:
        return self.ins[self.num_consts + self.num_carry :]

    @property
    def carry_outs(self) -> tuple[Operand, ...]:
        return self.outs[: self.num_carry]

    @property
    def ys(self) -> tuple[Operand, ...]:
        return self.outs[self.num_carry :]

    def producers(self) -> dict[Value, Op]:
        """The op that produces each value."""
        return {value: op for op in self.ops for value in op.outs if value}
