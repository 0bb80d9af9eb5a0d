"""merge="any": `init` is run for all environments, `iterate` for those of one worker. Checks that the two fit."""

from dataclasses import replace

import jax

from choreo.errors import AlgorithmError, PartitionError
from choreo.partition.carry import block_type, is_type, leaf_text, named, same_leaf, same_structure
from choreo.partition.place import Sites
from choreo.partition.program import Axis, Port, Program
from choreo.partition.trace import Traced


def uncut_leaf(name: str, whole: Traced, part: Traced) -> AlgorithmError | None:
    """With merge="any", `init` is run for all environments, `iterate` for those of one worker: each leaf must be a block of
    the whole, or the same."""
    axes, num_workers = iter(whole.carry_axes), whole.num_envs // part.num_envs
    if not same_structure(jax.tree.structure(whole.carry), jax.tree.structure(part.carry)):
        raise AlgorithmError(
            f"`{name}.init` returns a carry whose structure depends on the number of environments.",
            fix="Let the number of environments change shapes only: one array with an env axis in place of many arrays.",
        )
    rows = zip(jax.tree_util.tree_leaves_with_path(whole.carry), jax.tree.leaves(part.carry), strict=True)
    for (path, leaf), own in rows:
        expected = block_type(leaf, next(axes), num_workers) if is_type(leaf) else leaf
        if not same_leaf(expected, own):
            said = [leaf_text(each) for each in (leaf, own)]
            return AlgorithmError(
                f"`carry{jax.tree_util.keystr(path)}` of `{name}` is {said[0]} for {whole.num_envs} environments and {said[1]} "
                f'for {part.num_envs}; with merge="any" a worker has {part.num_envs} of them, and its block is cut along an '
                f"axis of exactly {whole.num_envs}.",
                fix="Give it an axis of its own for environments, as in [num_envs, 4] in place of [4 * num_envs], or a shape that "
                'does not depend on their number. Or use merge="all".',
            )
    return None


def blocks_of_workers(iterate: Program, traced: Traced, sites: Sites) -> Program:
    """The program of one worker, whose share of the carry is a block of the whole."""
    num_carry = traced.iterate.block.num_carry

    def block(port: Port, axis: Axis) -> Port:
        own = {group: (ref, axis if sites.size(group) else None) for group, (ref, _) in port.held.items()}
        if axis is not None and not all(sites.size(group) for group in own):
            raise PartitionError(
                f'With merge="any" the learner hears one worker at a time, and `{named(port.name)}`, which it keeps, has the '
                "environments of all of them.",
                fix='Use merge="all" (with max_lag, workers need not wait for it); with replay, the layout apex.',
            )
        if axis is None and all(sites.size(group) for group in own) and _is_written(iterate, port, num_carry):
            raise PartitionError(
                f'With merge="any" every worker would have its own `{named(port.name)}`, which has no env axis.',
                fix='Let the learner compute it (a fragment of the role `learner` or `update`), or use merge="all".',
            )
        return replace(port, held=own)

    ins, outs = (
        tuple(block(port, traced.carry_axes[i]) if i < num_carry else port for i, port in enumerate(ports))
        for ports in (iterate.ins, iterate.outs)
    )
    return replace(iterate, ins=ins, outs=outs)


def _is_written(iterate: Program, port: Port, num_carry: int) -> bool:
    before, after = (next(p for p in ports[:num_carry] if p.name == port.name) for ports in (iterate.ins, iterate.outs))
    return any(before.held[group][0] != after.held[group][0] for group in before.held)
