"""The passes, in order: from an algorithm and a group for each role to one program in which every site takes part.

`partition` runs all passes except `trace`, whose result it gets.

trace       algorithm, environment -> graphs of `init` and `iterate`
place       a home for every op and value: the group that computes it
relax       only if the layout is relaxed: before `demand`, copies glue to the groups that read its results;
            after `cut`, marks the transfers whose values may be out of date
demand      which group needs which piece of which value
cut         one global order of segments, transfers and split loops
draw_ahead  draws the random numbers of loops that call Python before these loops begin
donate      which results may take over the memory of an input
"""

from collections.abc import Callable
from dataclasses import replace

from choreo.partition.cut import cut
from choreo.partition.demand import needs_of
from choreo.partition.donate import donate
from choreo.partition.draw_ahead import draw_ahead
from choreo.partition.place import Sites, place
from choreo.partition.program import Program
from choreo.partition.relax import copy_for_readers
from choreo.partition.trace import Traced
from choreo.partition.verify import verify_program


def partition(
    traced: Traced,
    sites: Sites,
    *,
    init_sites: Sites | None = None,
    relaxed: Callable[[Program], Program] | None = None,
) -> tuple[Program, Program]:
    """The programs of `init` and `iterate`. `init` leaves each of its results at the groups where `iterate` reads this result.

    `init_sites`: the sites of `init`, if they divide the environments differently from `sites`; `relaxed`: marks the transfers
    whose values may be out of date; None for a layout in lockstep.
    """
    graph = traced.iterate
    placement = place(graph, sites, traced.carry_axes)
    if relaxed:
        graph, copies = copy_for_readers(graph, placement)
        placement = place(graph, sites, traced.carry_axes, glue_at=copies) if copies else placement
    body = graph.body
    outputs = {}
    for position in range(body.num_carry, len(body.outs)):
        home = placement.home(body.outs[position]) or sites.default
        outputs[position] = {home: placement.natural(body.outs[position], home)}
    iterate = cut(graph, needs_of(placement, body, outputs), outputs)

    # Unless `init_sites` says otherwise, `init` is placed as if there were one shard. Its results are then where `iterate` reads
    # them, because block r of the environments has the same environments as block r of the shards.
    init_sites = init_sites or replace(sites, shards=1)
    held = {
        i: {group: traced.carry_axes[i] if init_sites.size(group) and not sites.size(group) else axis
            for group, (_, axis) in port.held.items()}
        for i, port in enumerate(iterate.ins[: body.num_carry])
    }  # fmt: skip
    homes = {i: next(iter(groups)) for i, groups in held.items()}
    init_placement = place(traced.init, init_sites, wanted_at=homes)
    init = cut(traced.init, needs_of(init_placement, traced.init.body, held), held)
    iterate = relaxed(verify_program(iterate)) if relaxed else verify_program(iterate)
    return verify_program(init), donate(verify_program(draw_ahead(iterate)), num_carry=body.num_carry)
