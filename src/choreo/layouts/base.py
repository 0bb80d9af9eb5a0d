"""A layout: which roles share a site, how many replicas they have, and on which devices they run.

    Layout(Group("env", "actor", replicas=4), Group("learner"))

A group without `replicas` becomes one site. With `replicas=4`, it becomes four sites, and each has an equal, contiguous block
of the environments. A layout is a value. Its groups decide only where a program runs. Three options also change the results:
`shards`, `max_lag` and `merge` (`docs/law.md`).
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from choreo.errors import LayoutError
from choreo.partition.lattice import ENV_AXIS
from choreo.partition.place import Sites
from choreo.roles import SHARD_AXIS
from choreo.types import AxisName, GroupName, Role

STANDARD_ROLES = ("env", "actor", "buffer", "learner", "gradient", "update")
MAX_BLOCKS = 16
"""The largest number of blocks of environments with `exact=True`. The blocks do not depend on the number of workers."""


@dataclass(frozen=True, init=False)
class Group:
    """Roles that run together: at the same sites, compiled into the same programs."""

    roles: tuple[Role, ...]
    replicas: int | None
    """The number of sites that share the environments; None for one site that has all environments."""
    device: str | None
    """Platform of the group's devices ("cpu", "gpu"); None for JAX's default."""
    devices: int
    """The number of devices, for a group that is one site. The devices share the learner shards; with a single shard, XLA
    divides the site's arrays among the devices."""
    axis: str | None
    """The name of the mapped axis that the replicas divide, as in `jax.vmap(..., axis_name="agent")`; None if they divide
    environments. With an axis but without `replicas`, there is one site for each index of the axis."""

    def __init__(
        self,
        *roles: Role,
        replicas: int | None = None,
        device: str | None = None,
        devices: int = 1,
        axis: str | None = None,
    ):
        object.__setattr__(self, "roles", roles)
        object.__setattr__(self, "replicas", replicas)
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "axis", axis)
        if not roles or not all(isinstance(role, str) for role in roles):
            raise LayoutError(
                f"Group({', '.join(map(repr, roles))}) needs at least one role.", fix='Write Group("env", "actor").'
            )
        if replicas is not None and (not isinstance(replicas, int) or replicas < 1):
            raise LayoutError(f"Group({self.name!r}, replicas={replicas!r}) needs at least one replica.",
                              fix="To run roles together at one site, name them in one Group.")  # fmt: skip
        if axis is not None and (not isinstance(axis, str) or not axis):
            raise LayoutError(
                f"Group({self.name!r}, axis={axis!r}) needs the name of an axis.",
                fix='Write axis="agent", as in jax.vmap(..., axis_name="agent").',
            )
        if devices < 1:
            raise LayoutError(
                f"Group({self.name!r}, devices={devices!r}) needs at least one device.", fix="Use devices=1."
            )
        if devices > 1 and replicas is not None:
            raise LayoutError(f"Group({self.name!r}, replicas={replicas!r}, devices={devices!r}): only a group that is one site "
                              "can have several devices.", fix="Leave out replicas, or devices.")  # fmt: skip

    @property
    def name(self) -> GroupName:
        return "+".join(self.roles)

    def __repr__(self) -> str:
        options = [f"{k}={v!r}" for k, v in [("replicas", self.replicas), ("device", self.device)] if v is not None]
        options += [f"devices={self.devices}"] * (self.devices > 1) + [f"axis={self.axis!r}"] * (self.axis is not None)
        return f"Group({', '.join([*map(repr, self.roles), *options])})"


@dataclass(frozen=True, init=False)
class Layout:
    """Where an algorithm runs. Up to rounding, results do not depend on the groups. They do depend on `shards`, `max_lag` and
    `merge`."""

    groups: tuple[Group, ...]
    exact: bool
    """Compute environments in blocks of a fixed size, so that results are equal bit for bit for any number of replicas."""
    shards: int
    """Learner shards. Unlike the number of replicas, the number of shards changes the results (`docs/law.md`)."""
    max_lag: int
    """The largest age, in updates, of the parameters that a worker reads; 0 is lockstep."""
    merge: str
    """"all": the learner waits for every worker; "any": the learner takes each worker's part as it arrives."""
    name: str
    """The name of the preset, or a name that the user chose."""

    def __init__(
        self,
        *groups: Group,
        exact: bool = False,
        shards: int = 1,
        max_lag: int = 0,
        merge: str = "all",
        name: str = "custom",
    ):
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "exact", exact)
        object.__setattr__(self, "shards", shards)
        object.__setattr__(self, "max_lag", max_lag)
        object.__setattr__(self, "merge", merge)
        object.__setattr__(self, "name", name)
        if not groups or not all(isinstance(group, Group) for group in groups):
            raise LayoutError(f"{self!r} needs groups.", fix='Write Layout(Group("env", "actor"), Group("learner")).')
        roles = [role for group in groups for role in group.roles]
        twice = sorted({role for role in roles if roles.count(role) > 1})
        if twice:
            raise LayoutError(f"{self!r} names the role `{twice[0]}` twice.", fix="A role belongs to one group.")
        if not name.isprintable():
            raise LayoutError(f"The layout's name {name!r} has characters that are not printed.", fix="Use a word.")
        if merge not in ("all", "any"):
            raise LayoutError(f"merge={merge!r} is not known.", fix='Use "all" or "any".')
        if max_lag < 0:
            raise LayoutError(f"max_lag={max_lag} is negative.", fix="Use 0 for a run in lockstep.")

    def __repr__(self) -> str:
        options = ["exact=True"] * self.exact + [f"shards={self.shards}"] * (self.shards > 1)
        options += [f"max_lag={self.max_lag}"] * (self.max_lag > 0) + [f"merge={self.merge!r}"] * (self.merge != "all")
        return f"Layout({', '.join([*map(repr, self.groups), *options])})"

    def group_of(self, role: Role) -> Group:
        """The group of a role. A role that no group names belongs to the group of the learner.

        If no group names the learner either, the role belongs to the last group without replicas. If all groups have replicas, the
        role belongs to the last group.
        """
        named = {r: group for group in self.groups for r in group.roles}
        undivided = [group for group in self.groups if group.replicas is None]
        return named.get(role) or named.get("learner") or (undivided or list(self.groups))[-1]

    def num_blocks(self, group: Group, num_envs: int) -> int | None:
        """The number of blocks of a group's environments: one per replica (more with `exact`), or one per device if devices share
        the learner shards.

        None for a group that is one site with all environments.
        """
        if group.replicas is None and group.devices > 1 and self.shards > 1:
            return group.devices
        if group.replicas is None or not self.exact:
            return group.replicas
        # At least two environments per block: XLA compiles a product with a single row differently, which changes rounding.
        return max(n for n in range(1, MAX_BLOCKS + 1) if num_envs % n == 0 and (n == 1 or num_envs // n >= 2))

    @property
    def axes(self) -> list[AxisName]:
        """The names of the mapped axes that groups divide; empty if all groups divide environments."""
        return list(dict.fromkeys(group.axis for group in self.groups if group.axis))

    def sites(self, roles: Iterable[Role], num_envs: int, lengths: Mapping[AxisName, int] = {}) -> Sites:
        """The sites of this layout for an algorithm with these roles. Raises LayoutError if the layout does not fit.

        `lengths`: the lengths of the layout's `axes`, as far as they are known.
        """
        roles = list(roles)
        self.check_counts(num_envs)
        for axis in self.axes:
            self._check_axis(axis, lengths.get(axis, 0))
        for role in (role for group in self.groups for role in group.roles):
            self._check_known(role, roles)
        used = {self.group_of(role).name for role in roles} | {self.group_of("learner").name}
        return Sites(
            group_of={role: self.group_of(role).name for role in roles},
            replicas={
                g.name: g.replicas or lengths[g.axis] if g.axis else self.num_blocks(g, num_envs)
                for g in self.groups
                if g.name in used
            },
            axis_of={g.name: g.axis for g in self.groups if g.name in used and g.axis},
            lengths={axis: lengths[axis] for axis in self.axes},
            default=self.group_of("learner").name,
            num_envs=num_envs,
            shards=self.shards,
            num_workers=self.num_workers,
        )

    @property
    def is_relaxed(self) -> bool:
        """True if sites need not wait for each other, so that results depend on timing."""
        return self.max_lag > 0 or self.merge == "any"

    @property
    def num_workers(self) -> int:
        """With merge="any", the number of workers, whose parts the learner takes one at a time; else 1."""
        return next((g.replicas for g in self.groups if g.replicas), 1) if self.merge == "any" else 1

    def _check_merge(self) -> None:
        divided = [group for group in self.groups if group.replicas is not None]
        fits = len(divided) == 1 and len(self.groups) == 2 and not self.axes
        if self.merge == "any" and (not fits or self.shards > 1 or self.exact):
            raise LayoutError(
                f'{self!r}: merge="any" needs one group with replicas (the workers) and one group without (the learner). It '
                "allows no axis, no shards and no exact.",
                fix='Write Layout(Group("env", "actor", replicas=4), Group("learner"), merge="any", max_lag=8).',
            )

    def _check_axis(self, axis: AxisName, count: int) -> None:
        if axis in (ENV_AXIS, SHARD_AXIS):
            raise LayoutError(
                f"{self!r} divides the axis {axis!r}, a name that Choreo uses itself.",
                fix="To divide environments, leave out axis. For an axis of your own, use a different name.",
            )
        if not count:
            raise LayoutError(
                f"The layout divides an axis {axis!r}, but no fragment is called directly under a vmap of that axis_name.",
                fix=f'Call the fragments of one {axis} under jax.vmap(..., axis_name="{axis}"). If scan, jit, grad or checkpoint '
                "stands between the vmap and the fragment, make the function that you give to vmap a fragment.",
            )
        for group in self.groups:
            if group.axis == axis and group.replicas and count % group.replicas:
                raise LayoutError(
                    f"The axis {axis!r} has size {count}, and cannot be divided evenly among {group.replicas} replicas of "
                    f"`{group.name}`.",
                    fix=f"Use {count} replicas, or leave out replicas.",
                )

    def check_counts(self, num_envs: int) -> None:
        """Raise LayoutError if `merge` does not fit the groups, or if environments or shards cannot be divided evenly."""
        self._check_merge()
        self._check_shards(num_envs)
        if self.axes and self.shards > 1:
            raise LayoutError(
                f"{self!r} divides the axis {self.axes[0]!r}, and has {self.shards} learner shards.",
                fix="Use one shard.",
            )
        for group in self.groups:
            self._check_divides(group, num_envs)

    def _check_shards(self, num_envs: int) -> None:
        shards = self.shards
        if shards < 1 or num_envs % shards:
            near, more = _nearest_divisors(num_envs, shards), _round_up(num_envs, max(shards, 1))
            raise LayoutError(
                f"{num_envs} environments cannot be divided evenly among {shards} learner shards.",
                fix=f"Use {' or '.join(map(str, near))} shards, or {more} environments.",
            )
        if shards > 1 and self.exact:
            raise LayoutError(f"exact=True cannot be combined with {shards} learner shards: the shapes of arrays at a site "
                              "depend on how many shards the site has.",
                              fix="Leave out exact, or use one shard.")  # fmt: skip

    def _check_known(self, role: Role, roles: list[Role]) -> None:
        if role in roles or role in STANDARD_ROLES:
            return
        close = difflib.get_close_matches(role, [*roles, *STANDARD_ROLES], n=1)
        hint = f"Did you mean `{close[0]}`?" if close else f"Its roles are {', '.join(f'`{r}`' for r in roles)}."
        raise LayoutError(f"The layout names a role `{role}`, which the algorithm does not have.", fix=hint)

    def _check_divides(self, group: Group, num_envs: int) -> None:
        if group.axis:
            return
        blocks, shards = self.num_blocks(group, num_envs), self.shards
        wanted = group.replicas or (group.devices if group.devices > 1 else None)
        if wanted is None or (blocks is None and shards > 1):
            return
        if shards > 1 and shards % wanted:
            more = _round_up(shards, wanted)
            raise LayoutError(
                f"{shards} learner shards cannot be divided evenly among {wanted} replicas of `{group.name}`.",
                fix=f"Every replica must have the same number of whole shards: use {more} shards (--shards {more}), or a "
                "different number of replicas.",
            )
        total, what = (blocks or 1, "block") if self.exact else (num_envs, "environment")
        if total % wanted:
            near, more = _nearest_divisors(total, wanted), _round_up(num_envs, wanted)
            part, option = ("replicas", "worker") if group.replicas else ("devices", "device")
            ways = f"Use {' or '.join(map(str, near))} {option if near == [1] else f'{option}s'}"
            raise LayoutError(
                f"{total} {what}{'s' if total > 1 else ''} cannot be divided evenly among {wanted} {part} of `{group.name}`.",
                fix=f"{ways}." if self.exact else f"{ways}, or {more} environments (--num-envs {more}).",
            )


def _nearest_divisors(total: int, wanted: int) -> list[int]:
    """The two divisors of `total` that are nearest to `wanted`, the smaller one first."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    return sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:2])


def _round_up(number: int, factor: int) -> int:
    """The smallest multiple of `factor` that is not less than `number`."""
    return -(-number // factor) * factor
