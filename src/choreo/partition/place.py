"""The analysis that finds a *home* for every op and every value: the group that computes it.

- The home of a fragment is the group of its role.
- All other ops are *glue*. Glue goes to the group where it causes the fewest bytes to be sent.
- Glue that reads only values without a home, such as keys and constants, has no home itself (None): every site that needs its
  result computes it, and the result never crosses.
- Glue that mixes data along an axis goes to a group that does not divide this axis.
- A scan with fragments is *split* if the fragments have different homes, or if one of them is Python, or if something in it mixes
  environments and cannot run where the rest runs. Otherwise the scan has one home.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from choreo import _compat
from choreo.errors import PartitionError
from choreo.graph.graph import Graph
from choreo.graph.ir import Body, Op, Operand, Value
from choreo.host import HostMethod
from choreo.partition.inference import infer_eqn
from choreo.partition.lattice import ENV_AXIS, WHOLE, Form, Forms, Size
from choreo.partition.program import Axis
from choreo.partition.reduce import combines
from choreo.roles import SHARD_AXIS
from choreo.types import AxisName, GroupName, Role

MOST_SWAPS = 8
"""Glue can change its home in every round, without end. So `_settle` may also end while homes still change: when the forms
have reached their fixed point, and `_settle` has made this many rounds more than there are carried values."""


@dataclass(frozen=True)
class Sites:
    """The part of a layout that the compiler needs."""

    group_of: Mapping[Role, GroupName]
    """The group of each role."""
    replicas: Mapping[GroupName, int | None]
    """Into how many blocks each group is divided; None: one site sees everything."""
    default: GroupName
    """The group of roles that the layout does not name, and of glue that has no better place."""
    num_envs: int
    shards: int = 1
    """How many shards divide the environments. If there are several, each replica gets an equal number of shards."""
    axis_of: Mapping[GroupName, AxisName] = field(default_factory=dict)
    """The axis that each group divides, for the groups that divide neither environments nor shards but, for example, agents."""
    lengths: Mapping[AxisName, int] = field(default_factory=dict)
    """The lengths of these axes."""
    num_workers: int = 1
    """With merge="any": how many workers run the program, each on its own environments, for one site that learns; else 1."""
    python: frozenset[GroupName] = frozenset()
    """The groups that run only Python. Nothing is compiled for them, so that their workers need no JAX."""

    def group(self, role: Role) -> GroupName:
        return self.group_of.get(role, self.default)

    def axis(self, group: GroupName) -> AxisName:
        """The name of the axis that the replicas of a group divide."""
        return self.axis_of.get(group, SHARD_AXIS if self.shards > 1 else ENV_AXIS)

    def size(self, group: GroupName) -> Size | None:
        """The size of a replicated group's blocks; None if the group is one site."""
        replicas, name = self.replicas[group], self.axis(group)
        count = {ENV_AXIS: self.num_envs, SHARD_AXIS: self.shards, **self.lengths}[name]
        return None if replicas is None or replicas == 1 else Size(count, count // replicas, name)

    def of_one_worker(self) -> "Sites":
        """The sites of one worker's program."""
        alone = dict.fromkeys(self.replicas)
        return replace(self, replicas=alone, num_envs=self.num_envs // self.num_workers)

    @property
    def axes(self) -> list[AxisName]:
        """The axes for which the analysis runs: the env axis or the shard axis, and every other axis that a group divides."""
        return list(dict.fromkeys([SHARD_AXIS if self.shards > 1 else ENV_AXIS, *self.sizes]))

    @functools.cached_property
    def sizes(self) -> Mapping[AxisName, Size]:
        """For every axis that a replicated group divides, the block size of one such group; used for ops of all other groups."""
        sizes = [size for group in self.replicas if (size := self.size(group))]
        return {size.name: size for size in reversed(sizes)}

    def single(self) -> list[GroupName]:
        """The groups that are one site, which sees everything."""
        return [group for group in self.replicas if not self.size(group)]


@dataclass(eq=False)
class Placement:
    """The homes of a graph's ops and values."""

    sites: Sites
    ops: dict[Op, GroupName | None] = field(default_factory=dict)
    """The home of each op. A split scan is absent."""
    values: dict[Value, GroupName | None] = field(default_factory=dict)
    forms: dict[Value, Forms] = field(default_factory=dict)
    """What a replica can compute of each value, for each axis that a group divides (`lattice.py`)."""

    def home(self, operand: Operand) -> GroupName | None:
        return self.values.get(operand) if isinstance(operand, Value) else None

    def form(self, operand: Operand, axis: AxisName) -> Form:
        """The form of a value for one of the axes in `Sites.sizes`."""
        return self.forms[operand][axis] if isinstance(operand, Value) else WHOLE

    def form_at(self, operand: Operand, group: GroupName) -> Form:
        """The form of a value for the axis that a replicated group divides."""
        return self.form(operand, self.sites.axis(group))

    def natural(self, operand: Operand, group: GroupName) -> Axis:
        """The piece of a value that a group holds, if the group computes the value."""
        if not self.sites.size(group):
            return None
        form = self.form_at(operand, group)
        return None if form.whole else form.axis


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
        self.sites, self.result, self.glue_at, self.names = sites, Placement(sites), glue_at, sites.axes
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
        # The forms of all other axes begin as whole. The results of fragments under the `jax.vmap` of such an axis are blocks.
        for value, axis in zip(body.carry_ins, carry_axes, strict=True):
            block = WHOLE if axis is None else Form(False, axis)
            self._set(value, None, {name: block if name in (ENV_AXIS, SHARD_AXIS) else WHOLE for name in self.names})
        self._settle(body, init=None)

    def _set(self, value: Value, home: GroupName | None, forms: Forms) -> None:
        self.result.values[value], self.result.forms[value] = home, forms

    def _forms(self, operand: Operand) -> dict[AxisName, Form]:
        return {name: self.result.form(operand, name) for name in self.names}

    def _all_whole(self) -> Forms:
        return dict.fromkeys(self.names, WHOLE)

    def _settle(self, body: Body, init: list[Operand] | None) -> None:
        """Place the ops of a body again and again, until a fixed point. `init`: the first values of a loop's carry; None for the
        body of the whole program."""
        for value in [*body.consts, *body.xs]:
            if value not in self.result.forms:
                self._set(value, None, self._all_whole())
        for rounds in itertools.count():
            homes, forms = self._homes(body), [dict(self.result.forms[v]) for v in body.carry_ins]
            for op in body.ops:
                self._place_op(op)
            for position, (value, out) in enumerate(zip(body.carry_ins, body.carry_outs, strict=True)):
                self._place_carry(value, out, init[position] if init else None)
            # Forms only rise from whole to block, so they reach a fixed point. Homes may never reach one: at equal cost,
            # glue could move between two groups forever.
            settled = forms == [self.result.forms[v] for v in body.carry_ins]
            if settled and (homes == self._homes(body) or rounds > len(body.carry_ins) + MOST_SWAPS):
                return

    def _homes(self, body: Body) -> list[GroupName | None]:
        return [self.result.values.get(v) for v in body.carry_ins] + [self.result.ops.get(op) for op in body.ops]

    def _place_carry(self, value: Value, out: Operand, init: Operand | None) -> None:
        forms, home = self._forms(value), self.result.home(out)
        whole = all(form.whole for form in forms.values())
        if out is value:  # carried unchanged
            if whole and (init is None or self.result.home(init) is None):
                home = None
            else:
                home = self.result.home(init) if init is not None else self._some_reader(value)
        elif home is None and init is not None:
            home = self.result.home(init)
        elif home is None and not whole:
            home = self._some_reader(value)
        for name, out_form in self._forms(out).items():
            if forms[name].whole and not out_form.whole and not out_form.mixed:
                forms[name] = Form(False, out_form.axis)
        if home is None and not all(form.whole for form in forms.values()):
            home = self._some_reader(value)
        if home is None and out is not value and (self._read_by_python(value) or self.sites.num_workers > 1):
            home = self.sites.default
        self._set(value, home, forms)

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
            mixed = self._mixes(op, home)
            if op.call and op.call.host and [vmap for vmap in op.call.vmaps if vmap.axis_name != SHARD_AXIS]:
                raise PartitionError(
                    f"The host fragment `{op.name}` is called under jax.vmap, but Python code is called once for all rows.",
                    at=op.at,
                    fix="Call it on the whole batch, without jax.vmap.",
                )
            if op.call and op.call.host and (size := self.sites.size(home)) and size.is_mapped:
                raise PartitionError(
                    f"The host fragment `{op.name}` cannot run on `{home}`, which is divided along the axis {size.name!r}. Each "
                    "object in Python holds whole environments, so this axis cannot be divided.", at=op.at,
                    fix=f"Put the role `{next(iter(op.roles))}` into a group without this axis.")  # fmt: skip
            if op.call and op.call.host and not isinstance(op.call.host, HostMethod) and self.sites.size(home):
                raise PartitionError(
                    f"The host fragment `{op.name}` cannot be replicated: Choreo does not know which of its rows belong to "
                    "which environment.", at=op.at,
                    fix=f"Use one site for `{home}`, or make it a method of an object: choreo.host_method.")  # fmt: skip
            if mixed and op.body:
                return self._place_split(op, groups)
        elif self._can_run_anywhere(op):
            home = self.sites.default if any(self._read_by_python(v) for v in op.outs if v) else None
        else:
            home = self._cheapest(op)
        self.result.ops[op] = home
        forms = {name: self._forms_of_results(op, home, name) for name in self.names}
        for position, value in enumerate(op.outs):
            if value:
                self._set(value, home, {name: forms[name][position] for name in self.names})
        return None

    def _forms_of_results(self, op: Op, home: GroupName | None, name: AxisName) -> list[Form]:
        """The forms of an op's results for one axis, if `home` runs the op.

        A group sees all of every axis that the group does not divide. So it can mix along this axis, and its results are whole.
        """
        forms = self._infer(op, home, name)
        if home is None:
            return forms
        if op.roles and self.sites.size(home) and self.sites.axis(home) == name:
            return [self._blame(op, form, home) for form in forms]
        return [WHOLE if form.mixed else form for form in forms]

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

    def _infer(self, op: Op, group: GroupName | None, name: AxisName) -> list[Form]:
        """The forms of an op's results for one axis, if `group` runs the op."""
        own = self.sites.size(group) if group else None
        size = own if own and own.name == name else self.sites.sizes.get(name)
        if size is None:
            return [WHOLE] * len(op.outs)
        return list(infer_eqn(op.eqn, [self.result.form(v, name) for v in op.ins], size, op.at).outs)

    def _mixes(self, op: Op, group: GroupName) -> bool:
        """Does an op mix data along the axis that a group divides? False if the group is one site."""
        if not self.sites.size(group):
            return False
        forms = self._infer(op, group, self.sites.axis(group))
        return any(form.mixed is not None for value, form in zip(op.outs, forms, strict=True) if value)

    def _cheapest(self, op: Op) -> GroupName:
        """The group in which glue causes the fewest bytes to be sent."""
        near = {home for v in op.values() if (home := self.result.home(v)) is not None}
        near |= {group for value in op.outs if value for group in self._consumer_groups(value)}
        near |= {self.glue_at[op]} if op in self.glue_at else set()
        allowed = [g for g in self.sites.replicas if g in near - self.sites.python] or [self.sites.default]
        if combines(op.eqn):  # a single site combines without messages, as a parameter server does
            allowed = [g for g in allowed if not self.sites.size(g)] or allowed
        able = [g for g in allowed if not self._mixes(op, g)]
        allowed = able or self._fallback() or self._others_able(op) or self._refuse_mixing(op)
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

    def _others_able(self, op: Op) -> list[GroupName]:
        """Groups that divide a different axis: each of their replicas sees all of the axis along which the op mixes."""
        return [group for group in self.sites.replicas if group not in self.sites.python and not self._mixes(op, group)]

    def _refuse_mixing(self, op: Op) -> list[GroupName]:
        groups = [group for group in self.sites.replicas if self.sites.size(group)]
        inferred = (form for group in groups for form in self._infer(op, group, self.sites.axis(group)))
        mixed = next(form.mixed for form in inferred if form.mixed)
        mapped = [repr(name) for name, size in self.sites.sizes.items() if size.is_mapped]
        if mapped:
            raise PartitionError(
                f"`{op.name}` needs all environments and the whole axis {' and '.join(mapped)} together, and no group of this "
                "layout sees both.", at=mixed.at or op.at,
                fix="Compute it in two steps: reduce over environments first, and then over the other axis, as in "
                    "jnp.mean(jnp.mean(x, axis=0)). Or give one group a single site.")  # fmt: skip
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
            self._set(inner, self.result.home(outer), self._forms(outer))
        for inner, outer in zip(body.carry_ins, inits, strict=True):
            known, forms = self.result.forms.get(inner, {}), self._forms(outer)
            for name, form in forms.items():
                if form.whole:
                    forms[name] = known[name] if name in known and not known[name].whole else WHOLE
            self._set(inner, self.result.values.get(inner, self.result.home(outer)), forms)
        for inner, outer in zip(body.xs, op.ins[body.num_consts + body.num_carry :], strict=True):
            forms = self._forms(outer)
            if over := [name for name, form in forms.items() if form.axis == 0 and not form.whole]:
                what = f"the axis {over[0]!r}" if over[0] not in (ENV_AXIS, SHARD_AXIS) else "environments"
                raise PartitionError(
                    f"A scan over {what} cannot be split over sites, or run at a site that has only some of them.", at=op.at,
                    fix="Put the roles inside it into one group, which is not divided along this axis.")  # fmt: skip
            shifted = {n: Form(form.whole, form.axis - 1 if form.axis else None) for n, form in forms.items()}
            self._set(inner, self.result.home(outer), shifted)
        self._settle(body, list(inits))
        for position, (value, inner) in enumerate(zip(op.outs, [*body.carry_ins, *body.ys], strict=True)):
            if value:
                stacked = 1 if position >= body.num_carry else 0
                self._set(value, self.result.home(inner), {
                    name: Form(form.whole, None if form.axis is None else form.axis + stacked, form.mixed)
                    for name, form in self._forms(inner).items()
                })  # fmt: skip


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
