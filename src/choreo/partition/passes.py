"""From a traced algorithm and homes for its roles to a program for every site.

trace    algorithm x environment -> graphs of `init` and `iterate`
place    a home for every op and value
relax    what may be out of date; glue that is computed at its reader for that
demand   who needs which piece of which value
cut      one global order of segments, transfers and split loops
ahead    random numbers, before the loops that use them
donate   whose memory may be taken over
"""

from collections.abc import Callable
from dataclasses import replace

from choreo.partition.ahead import draw_ahead
from choreo.partition.cut import cut
from choreo.partition.demand import find_needs
from choreo.partition.donate import donate
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
    """The programs of `init` and `iterate`: what `init` computes lies where `iterate` reads it.

    `init_sites`: how `init` divides the environments, where `iterate` does it otherwise. `relaxed` says what may be out of
    date.
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
    iterate = cut(graph, find_needs(placement, body, outputs), outputs)

    # `init` is the same for any number of shards: block r of E environments holds those of block r of the shards.
    init_sites = init_sites or replace(sites, shards=1)
    held = {
        i: {group: traced.carry_axes[i] if init_sites.size(group) and not sites.size(group) else axis
            for group, (_, axis) in port.held.items()}
        for i, port in enumerate(iterate.ins[: body.num_carry])
    }  # fmt: skip
    homes = {i: next(iter(groups)) for i, groups in held.items()}
    init_placement = place(traced.init, init_sites, wanted_at=homes)
    init = cut(traced.init, find_needs(init_placement, traced.init.body, held), held)
    iterate = relaxed(verify_program(iterate)) if relaxed else verify_program(iterate)
    return verify_program(init), donate(verify_program(draw_ahead(iterate)), num_carry=body.num_carry)
