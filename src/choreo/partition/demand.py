"""The analysis of needs: which group needs which piece of which value. A backward analysis, from the outputs.

A value crosses if a group other than its home needs it. Nothing else is sent. A value without a home is computed in every
group that needs it.
"""

from collections.abc import Iterable, Mapping

from choreo.errors import PartitionError
from choreo.graph.ir import Body, Op, Operand, Value
from choreo.partition.inference import infer_eqn
from choreo.partition.inferred import InferredEqn
from choreo.partition.lattice import Demand, Mixed, Mixes
from choreo.partition.place import Placement
from choreo.partition.program import Axis
from choreo.partition.whole_equations import Pruned
from choreo.types import GroupName


class Needs:
    """For every value, the pieces that each group needs. `needs_of` adds pieces until a fixed point; nothing is ever removed."""

    def __init__(self, placement: Placement, top: Body):
        self.placement, self.sites = placement, placement.sites
        self.pieces: dict[Value, dict[GroupName, set[Axis]]] = {}
        self._inferred: dict[tuple[Op, GroupName], InferredEqn] = {}
        self._pruned: dict[tuple[Op, tuple[bool, ...]], Pruned] = {}
        self.outside: set[Value] = set()
        """The values that no segment makes: inputs, constants, and results of split loops."""
        self._find_inputs(top)
        self.grew = False
        """Has something been added since this flag was last set to False?"""

    def _find_inputs(self, body: Body) -> None:
        self.outside.update(v for v in [*body.ins, *body.consts])
        for op in body.ops:
            if op.body:
                self._find_inputs(op.body)
                self.outside.update(v for v in op.outs if v and op not in self.placement.ops)

    def at(self, operand: Operand, group: GroupName) -> set[Axis]:
        """The pieces of a value that a group needs."""
        return self.pieces.get(operand, {}).get(group, set()) if isinstance(operand, Value) else set()

    def groups(self, value: Value) -> list[GroupName]:
        """The groups that need some piece of a value, in the layout's order."""
        return [group for group in self.sites.replicas if self.at(value, group)]

    def add(self, operand: Operand, group: GroupName, axes: Iterable[Axis]) -> None:
        """Record that a group needs these pieces of a value. If the group is not the value's home, also record that the home needs
        the piece that the home sends."""
        if not isinstance(operand, Value):
            return
        home = self.placement.home(operand)
        axes = self.held(operand, group, axes)
        have = self.pieces.setdefault(operand, {}).setdefault(group, set())
        if not axes <= have:
            have |= axes
            self.grew = True
        if axes and home not in (None, group):
            self.add(operand, home, {self.placement.natural(operand, home)})

    def held(self, value: Value, group: GroupName, axes: Iterable[Axis]) -> set[Axis]:
        """The pieces that a group holds if it needs the pieces `axes`: usually the same pieces.

        A group holds only the whole value in two cases: it sees all environments; or the value comes from outside of the segments
        and the group can hold the whole. In the second case the group slices its blocks from the whole.
        """
        home_here = self.placement.home(value) in (None, group)
        whole = not self.sites.size(group) or (
            value in self.outside and home_here and self.placement.form_at(value, group).whole
        )
        return ({None} if whole else set(axes)) if axes else set()

    def crossings(self, value: Value) -> list[GroupName]:
        """The groups to which a value must be sent."""
        home = self.placement.home(value)
        return [] if home is None else [group for group in self.groups(value) if group != home]

    def inferred(self, op: Op, group: GroupName) -> InferredEqn | None:
        """What is inferred about an op on the blocks of a replicated group; None if the group sees all environments."""
        size = self.sites.size(group)
        if size is None:
            return None
        if (op, group) not in self._inferred:
            forms = [self.placement.form_at(v, group) for v in op.ins]
            self._inferred[op, group] = infer_eqn(op.eqn, forms, size, op.at)
        return self._inferred[op, group]

    def pruned(self, op: Op, wanted: Demand) -> Pruned:
        """The op for a group that sees all environments, with only those inner equations that the wanted results need."""
        key = (op, tuple(bool(axes) for axes in wanted))
        if key not in self._pruned:
            self._pruned[key] = Pruned.of_eqn(op.eqn, key[1])
        return self._pruned[key]

    def operands(self, op: Op, group: GroupName, wanted: Demand) -> Demand:
        """The pieces of its operands that an op reads at a group, to compute the wanted pieces of its results."""
        if inferred := self.inferred(op, group):
            return inferred.demand(wanted)
        if op.call and op.call.host:
            return [{None}] * len(op.ins)
        return [{None} if used else set() for used in self.pruned(op, wanted).used]

    def wanted(self, op: Op, group: GroupName) -> list[set[Axis]]:
        """The pieces of an op's results that a group needs."""
        return [self.at(value, group) if value else set() for value in op.outs]


def needs_of(placement: Placement, body: Body, outputs: Mapping[int, Mapping[GroupName, Axis]]) -> Needs:
    """The needs of a program. `outputs`: for each output that is not carried, the piece that each group must hold in the end. A
    carried value is needed at its home."""
    needs = Needs(placement, body)
    while True:
        needs.grew = False
        for value in body.carry_ins:
            home = placement.home(value) or needs.sites.default
            needs.add(value, home, {placement.natural(value, home)})
        for position, groups in outputs.items():
            for group, axis in groups.items():
                needs.add(body.outs[position], group, {axis})
        _body_needs(needs, body)
        if not needs.grew:
            return needs


def _body_needs(needs: Needs, body: Body) -> None:
    for value, out in zip(body.carry_ins, body.carry_outs, strict=True):
        _carry_needs(needs, value, out)
    for op in reversed(body.ops):
        if op not in needs.placement.ops:
            _split_needs(needs, op)
            continue
        home = needs.placement.ops[op]
        for group in needs.sites.replicas if home is None else [home]:
            wanted = needs.wanted(op, group)
            if any(wanted) or (op.eqn.effects and home is not None):
                _op_needs(needs, op, group, wanted)


def _op_needs(needs: Needs, op: Op, group: GroupName, wanted: Demand) -> None:
    try:
        pieces = needs.operands(op, group, wanted)
    except Mixes as mixes:
        raise _refusal(op, group, needs, mixes) from None
    for operand, axes in zip(op.ins, pieces, strict=True):
        needs.add(operand, group, axes)


def _refusal(op: Op, group: GroupName, needs: Needs, mixes: Mixes) -> PartitionError:
    mixed = mixes.args[0] if isinstance(mixes.args[0], Mixed) else Mixed(str(mixes), "")
    fragment = mixed.fragment or (op.name if op.call else "")
    what = f"the fragment `{fragment}`" if fragment else f"`{op.name}`"
    # The fragment that mixes, and the op that reads its result, may be in different groups.
    group = mixed.group or group
    size = needs.sites.size(group)
    if size is not None and size.is_mapped:
        why = mixed.why.replace("environments", f"entries of the axis {size.name!r}")
        return PartitionError(
            f"{why}: {what} cannot run on `{group}`, which is divided into {size.blocks} blocks of the axis {size.name!r}.",
            at=mixed.at or op.at,
            fix=f"Use one site for `{group}`, or move this computation to a group that does not divide this axis.",
        )
    return PartitionError(
        f"{mixed.why}: {what} cannot run on `{group}`, which is divided into {needs.sites.replicas[group]} blocks of environments.",
        at=mixed.at or op.at,
        fix=f"Use one site for `{group}`, move this computation to a group that is not replicated (for example, the learner's), or "
            + (f"vouch for it, if you know that it does not mix environments: {mixed.vouch}." if mixed.vouch
               else "write it for one environment and call it under jax.vmap."))  # fmt: skip


def _carry_needs(needs: Needs, value: Value, out: Operand) -> None:
    home = needs.placement.home(value)
    for group in needs.groups(value) if home is None else [home]:
        axis = needs.placement.natural(value, group)
        if home is not None and not needs.groups(value):
            continue
        needs.add(out, group, {axis})
        needs.add(value, group, {axis})


def _split_needs(needs: Needs, op: Op) -> None:
    body, placement = op.body, needs.placement
    assert body is not None
    c, k = body.num_consts, body.num_carry
    for value, inner in zip(op.outs, body.carry_ins, strict=False):
        for group in needs.groups(value) if value else []:
            if placement.home(inner) in (None, group):
                needs.add(inner, group, {placement.natural(inner, group)})
    for value, inner in zip(op.outs[k:], body.ys, strict=True):
        for group in needs.groups(value) if value else []:
            if placement.home(inner) in (None, group):
                needs.add(inner, group, {placement.natural(inner, group)})
    _body_needs(needs, body)
    for position, (inner, outer) in enumerate(zip(body.ins, op.ins, strict=True)):
        carried = c <= position < c + k
        invariant = carried and body.carry_outs[position - c] is inner
        home = placement.home(inner)
        for group in needs.groups(inner):
            if carried and not invariant and home not in (None, group):
                continue  # the home sends the value to this group in every step of the loop
            shift = 1 if position >= c + k else 0
            axes = {axis if axis is None else axis + shift for axis in needs.at(inner, group)}
            needs.add(outer, group, axes)
