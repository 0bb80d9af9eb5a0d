"""The analysis that finds a *home* for every op and every value: the group that computes it.

- The home of a fragment is the group of its role.
- All other ops are *glue*. Glue goes to the group where it causes the fewest bytes to be sent.
- Glue that reads only values without a home, such as keys and constants, has no home itself (None): every site that needs its
  result computes it, and the result never crosses.
- Glue that mixes environments goes to a group that is not replicated.
- A scan with fragments is *split* if the fragments have different homes, or if one of them is Python, or if something in it mixes
  environments and cannot run where the rest runs. Otherwise the scan has one home.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from choreo import _compat
from choreo.errors import PartitionError
from choreo.graph.graph import Graph
from choreo.graph.ir import Body, Op, Operand, Value
from choreo.host import HostMethod
from choreo.partition.inference import infer_eqn
from choreo.partition.lattice import WHOLE, Form, Size
from choreo.partition.program import Axis
from choreo.partition.reduce import combines
from choreo.roles import SHARD_AXIS
from choreo.types import GroupName, Role

MOST_SWAPS = 8
"""Glue can change its home in every round, forever. Once the forms have reached their fixed point, `_settle` therefore
ends at the latest when it has made this many rounds more than there are carried values."""


@dataclass(frozen=True)
class Sites:
    """The part of a layout that the compiler needs."""

    group_of: Mapping[Role, GroupName]
    """The group of each role."""
    replicas: Mapping[GroupName, int | None]
    """Into how many blocks of environments each group is divided; None: one site sees all environments."""
    default: GroupName
    """The group of roles that the layout does not name, and of glue that has no better place."""
    num_envs: int
    shards: int = 1
    """How many shards divide the environments. If there are several, each replica gets an equal number of shards."""
    along_axis: int = 0
    """The length of the divided axis, if this is not the env axis but, for example, an axis of agents; else 0."""
    num_workers: int = 1
    """With merge="any": how many workers run the program, each on its own environments, for one site that learns; else 1."""
    python: frozenset[GroupName] = frozenset()
    """The groups that run only Python. Nothing is compiled for them, so that their workers need no JAX."""

    def group(self, role: Role) -> GroupName:
        return self.group_of.get(role, self.default)

    def size(self, group: GroupName) -> Size | None:
        """The size of a replicated group's blocks; None if the group sees all environments."""
        replicas = self.replicas[group]
        count = self.along_axis or (self.shards if self.shards > 1 else self.num_envs)
        return None if replicas is None or replicas == 1 else Size(count, count // replicas, self.shards > 1)

    def of_one_worker(self) -> "Sites":
        """The sites of one worker's program."""
        alone = dict.fromkeys(self.replicas)
        return replace(self, replicas=alone, num_envs=self.num_envs // self.num_workers)

    def any_size(self) -> Size | None:
        """The size of any replicated group; used for ops that have no home yet. None if no group is replicated."""
        return next((size for group in self.replicas if (size := self.size(group))), None)

    def single(self) -> list[GroupName]:
        """The groups that see all environments."""
        return [group for group in self.replicas if not self.size(group)]


@dataclass(eq=False)
class Placement:
    """The homes of a graph's ops and values."""

    sites: Sites
    ops: dict[Op, GroupName | None] = field(default_factory=dict)
    """The home of each op. A split scan is absent."""
    values: dict[Value, GroupName | None] = field(default_factory=dict)
    forms: dict[Value, Form] = field(default_factory=dict)
    """What a replica can compute of each value (`lattice.py`)."""

    def home(self, operand: Operand) -> GroupName | None:
        return self.values.get(operand) if isinstance(operand, Value) else None

    def form(self, operand: Operand) -> Form:
        return self.forms[operand] if isinstance(operand, Value) else WHOLE

    def natural(self, operand: Operand, group: GroupName) -> Axis:
        """The piece of a value that a group holds, if the group computes the value."""
        form = self.form(operand)
        return None if form.whole or not self.sites.size(group) else form.axis


def place(
    graph: Graph,
    sites: Sites,
    carry_axes: Iterable[Axis] = (),
    wanted_at: Mapping[int, GroupName] = {},
    glue_at: Mapping[Op, GroupName] = {},
) -> Placement:
    """The homes of a graph's ops and values.

    `carry_axes`: the proposed env axis of each carried value; `wanted_at`: for some outputs, by position, a group that reads
    them; `glue_at`: for some glue, the group that should compute it.
    """
    placer = _Placer(sites, graph.body, wanted_at, glue_at)
    placer.place_top(graph.body, list(carry_axes))
    return placer.result


class _Placer:
    def __init__(self, sites: Sites, top: Body, wanted_at: Mapping[int, GroupName], glue_at: Mapping[Op, GroupName]):
        self.sites, self.result, self.glue_at = sites, Placement(sites), glue_at
        self.consumers: dict[Value, list[Op | GroupName]] = {}
        self._find_consumers(top)
        for position, group in wanted_at.items():
            if isinstance(out := top.outs[position], Value):
                self.consumers.setdefault(out, []).append(group)

    def _find_consumers(self, body: Body) -> None:
        for op in body.ops:
            for value in op.values():
                self.consumers.setdefault(value, []).append(op)
            if op.body:
                self._find_consumers(op.body)

    def place_top(self, body: Body, carry_axes: list[Axis]) -> None:
        for value, axis in zip(body.carry_ins, carry_axes, strict=True):
            self._set(value, None, WHOLE if axis is None else Form(False, axis))
        self._settle(body, init=None)

    def _set(self, value: Value, home: GroupName | None, form: Form) -> None:
        self.result.values[value], self.result.forms[value] = home, form

    def _settle(self, body: Body, init: list[Operand] | None) -> None:
        """Place the ops of a body again and again, until a fixed point. `init`: the first values of a loop's carry; None for the
        body of the whole program."""
        for value in [*body.consts, *body.xs]:
            if value not in self.result.forms:
                self._set(value, None, WHOLE)
        for rounds in itertools.count():
            homes, forms = self._homes(body), [self.result.forms[v] for v in body.carry_ins]
            for op in body.ops:
                self._place_op(op)
            for position, (value, out) in enumerate(zip(body.carry_ins, body.carry_outs, strict=True)):
                self._place_carry(value, out, init[position] if init else None)
            # Forms only rise from whole to block, so they reach a fixed point. Homes need not: at equal cost, glue could
            # move between two groups forever.
            settled = forms == [self.result.forms[v] for v in body.carry_ins]
            if settled and (homes == self._homes(body) or rounds > len(body.carry_ins) + MOST_SWAPS):
                return

    def _homes(self, body: Body) -> list[GroupName | None]:
        return [self.result.values.get(v) for v in body.carry_ins] + [self.result.ops.get(op) for op in body.ops]

    def _place_carry(self, value: Value, out: Operand, init: Operand | None) -> None:
        form, home = self.result.forms[value], self.result.home(out)
        if out is value:  # carried unchanged
            if form.whole and (init is None or self.result.home(init) is None):
                home = None
            else:
                home = self.result.home(init) if init is not None else self._some_reader(value)
        elif home is None and init is not None:
            home = self.result.home(init)
        elif home is None and not form.whole:
            home = self._some_reader(value)
        out_form = self.result.form(out)
        if form.whole and not out_form.whole and not out_form.mixed:
            form = Form(False, out_form.axis)
        if not form.whole and home is None:
            home = self._some_reader(value)
        if home is None and out is not value and (self._read_by_python(value) or self.sites.num_workers > 1):
            home = self.sites.default
        self._set(value, home, form)

    def _some_reader(self, value: Value) -> GroupName:
        readers = self._consumer_groups(value)
        return sorted(readers)[0] if readers else self.sites.default

    def _read_by_python(self, value: Value) -> bool:
        """Does a group that runs only Python read the value? Such a group cannot compute glue."""
        return not self.sites.python.isdisjoint(self._consumer_groups(value))

    def _consumer_groups(self, value: Value) -> set[GroupName]:
        groups = set()
        for consumer in self.consumers.get(value, []):
            group = self.result.ops.get(consumer) if isinstance(consumer, Op) else consumer
            if group is not None:
                groups.add(group)
        return groups

    def _place_op(self, op: Op) -> None:
        groups = {self.sites.group(role) for role in op.roles}
        if len(groups) > 1 or (op.host and not op.call):
            return self._place_split(op, groups)
        if groups:
            (home,) = groups
            forms, mixed = self._infer(op, home)
            if op.call and op.call.host and [vmap for vmap in op.call.vmaps if vmap.axis_name != SHARD_AXIS]:
                raise PartitionError(
                    f"The host fragment `{op.name}` is called under jax.vmap, but Python code is called once for all rows.",
                    at=op.at,
                    fix="Call it on the whole batch, without jax.vmap.",
                )
            if op.call and op.call.host and not isinstance(op.call.host, HostMethod) and self.sites.size(home):
                raise PartitionError(
                    f"The host fragment `{op.name}` cannot be replicated: Choreo does not know which of its rows belong to "
                    "which environment.", at=op.at,
                    fix=f"Use one site for `{home}`, or make it a method of an object: choreo.host_method.")  # fmt: skip
            if mixed and op.body and self.sites.size(home):
                return self._place_split(op, groups)
            if self.sites.size(home):
                forms = [self._blame(op, form, home) for form in forms]
            else:
                forms = [WHOLE if form.mixed else form for form in forms]
        elif self._can_run_anywhere(op):
            home = self.sites.default if any(self._read_by_python(v) for v in op.outs if v) else None
            forms, _ = self._infer(op, home)
        else:
            home = self._cheapest(op)
            forms = [WHOLE if form.mixed else form for form in self._infer(op, home)[0]]
        self.result.ops[op] = home
        for value, form in zip(op.outs, forms, strict=True):
            if value:
                self._set(value, home, form)
        return None

    def _can_run_anywhere(self, op: Op) -> bool:
        """Can every site that needs the results of this glue compute them itself? Only if all sites get the same results."""
        same = not op.eqn.effects and _compat.impure_primitive(op.eqn) is None
        return same and all(self.result.home(v) is None for v in op.ins)

    @staticmethod
    def _blame(op: Op, form: Form, home: GroupName) -> Form:
        """The form, with the name of the fragment that mixes environments: the first such fragment, not a later reader."""
        if form.mixed is None or form.mixed.fragment or op.call is None:
            return form
        return form._replace(mixed=form.mixed._replace(fragment=op.name, group=home))

    def _infer(self, op: Op, group: GroupName | None) -> tuple[list[Form], bool]:
        """The forms of an op's results if `group` runs the op, and whether the op mixes environments."""
        size = (self.sites.size(group) if group else None) or self.sites.any_size()
        if size is None:
            return [WHOLE] * len(op.outs), False
        forms = infer_eqn(op.eqn, [self.result.form(v) for v in op.ins], size, op.at).outs
        return list(forms), any(form.mixed is not None for value, form in zip(op.outs, forms, strict=True) if value)

    def _cheapest(self, op: Op) -> GroupName:
        """The group in which glue causes the fewest bytes to be sent."""
        near = {home for v in op.values() if (home := self.result.home(v)) is not None}
        near |= {group for value in op.outs if value for group in self._consumer_groups(value)}
        near |= {self.glue_at[op]} if op in self.glue_at else set()
        allowed = [g for g in self.sites.replicas if g in near - self.sites.python] or [self.sites.default]
        if combines(op.eqn):  # a single site combines without messages, as a parameter server does
            allowed = [g for g in allowed if not self.sites.size(g)] or allowed
        able = [g for g in allowed if not self.sites.size(g) or not self._infer(op, g)[1]]
        allowed = able or self._fallback() or self._refuse_mixing(op)
        if self.glue_at.get(op) in able:
            return self.glue_at[op]

        def cost(group: GroupName) -> int:
            sent_here = sum(v.nbytes for v in set(op.values()) if self.result.home(v) not in (None, group))
            sent_on = sum(v.nbytes * len(self._consumer_groups(v) - {group}) for v in op.outs if v)
            return sent_here + sent_on

        # At equal cost, prefer a single site, then the default group, which runs most of the ops that read the result.
        return min(allowed, key=lambda group: (cost(group), bool(self.sites.size(group)), group != self.sites.default))

    def _fallback(self) -> list[GroupName]:
        single = [group for group in self.sites.single() if group not in self.sites.python]
        return [self.sites.default] if self.sites.default in single else single[:1]

    def _refuse_mixing(self, op: Op) -> list[GroupName]:
        inferred = (form for group in self.sites.replicas for form in self._infer(op, group)[0])
        mixed = next(form.mixed for form in inferred if form.mixed)
        raise PartitionError(
            f"{mixed.why}, and every group of this layout is replicated.", at=mixed.at or op.at,
            fix="Give one group a single site, or move the computation into a learner that uses choreo.all_reduce.")  # fmt: skip

    def _place_split(self, op: Op, groups: set[GroupName]) -> None:
        if op.body is None:
            raise PartitionError(
                f"`{op.eqn.primitive.name}` contains fragments of the roles {_words(op.roles)}, which this layout puts on "
                f"different sites ({_words(groups)}).", at=op.at,
                fix="Only `lax.scan` can be split over sites. Put these roles into one group, or move the branch inside one "
                    "fragment.")  # fmt: skip
        self.result.ops.pop(op, None)
        body = op.body
        inits = op.ins[body.num_consts : body.num_consts + body.num_carry]
        for inner, outer in zip(body.const_ins, op.ins, strict=False):
            self._set(inner, self.result.home(outer), self.result.form(outer))
        for inner, outer in zip(body.carry_ins, inits, strict=True):
            known = self.result.forms.get(inner)
            form = self.result.form(outer)
            form = form if not form.whole else known if known and not known.whole else Form(True)
            self._set(inner, self.result.values.get(inner, self.result.home(outer)), form)
        for inner, outer in zip(body.xs, op.ins[body.num_consts + body.num_carry :], strict=True):
            form = self.result.form(outer)
            if form.axis == 0 and not form.whole:
                raise PartitionError("A scan over environments cannot be split over sites.", at=op.at,
                                     fix="Put the roles inside it into one group.")  # fmt: skip
            self._set(inner, self.result.home(outer), Form(form.whole, form.axis - 1 if form.axis else None))
        self._settle(body, list(inits))
        for position, (value, inner) in enumerate(zip(op.outs, [*body.carry_ins, *body.ys], strict=True)):
            if value:
                form = self.result.form(inner)
                stacked = position >= body.num_carry
                axis = form.axis + 1 if stacked and form.axis is not None else form.axis
                self._set(value, self.result.home(inner), Form(form.whole, axis, form.mixed))


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
