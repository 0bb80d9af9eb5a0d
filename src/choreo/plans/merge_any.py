"""merge="any": `init` is traced for all environments, `iterate` for the environments of one worker. Check that the two fit."""

from dataclasses import replace

import jax

from choreo.errors import AlgorithmError, PartitionError
from choreo.partition.carry import block_type, is_type, leaf_text, named, same_leaf, same_structure
from choreo.partition.place import Sites
from choreo.partition.program import Axis, Port, Program
from choreo.partition.trace import Traced


def indivisible_leaf_error(name: str, whole: Traced, part: Traced) -> AlgorithmError | None:
    """Return an error about the first leaf of a worker's carry that is neither a block of the same leaf in `whole` nor
    equal to it; None if there is no such leaf.

    `name` is the algorithm's name. `whole` is the algorithm traced for all environments, `part` for those of one worker.
    Raises AlgorithmError if the carries of both have different structures.
    """
    axes, num_workers = iter(whole.carry_axes), whole.num_envs // part.num_envs
    if not same_structure(jax.tree.structure(whole.carry), jax.tree.structure(part.carry)):
        raise AlgorithmError(
            f"`{name}.init` returns a carry whose structure depends on the number of environments.",
            fix="Let the number of environments change shapes only: one array with an env axis in place of many arrays.",
        )
    rows = zip(jax.tree_util.tree_leaves_with_path(whole.carry), jax.tree.leaves(part.carry), strict=True)
    for (path, leaf), worker_leaf in rows:
        expected = block_type(leaf, next(axes), num_workers) if is_type(leaf) else leaf
        if not same_leaf(expected, worker_leaf):
            texts = [leaf_text(each) for each in (leaf, worker_leaf)]
            return AlgorithmError(
                f"`carry{jax.tree_util.keystr(path)}` of `{name}` is {texts[0]} for {whole.num_envs} environments and {texts[1]} "
                f'for {part.num_envs}. With merge="any" a worker has {part.num_envs} of the {whole.num_envs} environments, so its '
                f"part must be a block of an axis of length {whole.num_envs}; this leaf has no such axis.",
                fix="Give the leaf an axis for environments, as in [num_envs, 4] in place of [4 * num_envs], or a shape that "
                'does not depend on the number of environments. Or use merge="all".',
            )
    return None


def iterate_of_one_worker(iterate: Program, traced: Traced, sites: Sites) -> Program:
    """Return `iterate` of one worker, where each port of the carry says along which axis the worker holds a block.

    Refuses a leaf with an env axis that the learner holds, and a leaf without an env axis that the workers change.
    """
    num_carry = traced.iterate.body.num_carry

    def block(port: Port, axis: Axis) -> Port:
        held = {group: (ref, axis if sites.size(group) else None) for group, (ref, _) in port.held.items()}
        if axis is not None and not all(sites.size(group) for group in held):
            raise PartitionError(
                f'With merge="any" the learner takes the results of one worker at a time, but `{named(port.name)}`, which the '
                "learner keeps, has the environments of all workers.",
                fix='Use merge="all" (with max_lag, workers need not wait for the learner). With replay, use the layout apex.',
            )
        if axis is None and all(sites.size(group) for group in held) and _is_written(iterate, port, num_carry):
            raise PartitionError(
                f'With merge="any" every worker would compute a different `{named(port.name)}`. The workers\' values cannot be '
                "combined, because this leaf has no env axis.",
                fix='Let the learner compute it (a fragment of the role `learner` or `update`), or use merge="all".',
            )
        return replace(port, held=held)

    ins, outs = (
        tuple(block(port, traced.carry_axes[i]) if i < num_carry else port for i, port in enumerate(ports))
        for ports in (iterate.ins, iterate.outs)
    )
    return replace(iterate, ins=ins, outs=outs)


def _is_written(iterate: Program, port: Port, num_carry: int) -> bool:
    """True if an iteration changes this leaf of the carry."""
    before, after = (next(p for p in ports[:num_carry] if p.name == port.name) for ports in (iterate.ins, iterate.outs))
    return any(before.held[group][0] != after.held[group][0] for group in before.held)
