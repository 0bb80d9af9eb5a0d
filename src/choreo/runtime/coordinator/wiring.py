"""The channels between workers: which pairs of workers need a channel, how large its messages are, and its two ends."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from choreo.partition.program import Transfer, walk
from choreo.plans.export import array_type
from choreo.runtime.channels.base import message_bytes
from choreo.runtime.channels.passing import ChannelKey
from choreo.runtime.channels.shm import ReceiverEnd, SenderEnd, make_shm_channel
from choreo.runtime.coordinator.deployment import Deployment
from choreo.runtime.coordinator.launcher import Launcher
from choreo.runtime.engine.backend import host_type
from choreo.runtime.engine.bundles import BUNDLE
from choreo.runtime.engine.messages import Overlap, Topology, messages

SLOTS = 2
"""How many unread messages a channel can hold, at least."""

ChannelDescriptions = dict[str, list[list[Any]]]
"""For each worker, the descriptions of its channels; see `channels/links.py`."""
Ends = dict[str, list[SenderEnd | ReceiverEnd]]
"""For each worker, the ends of shared-memory channels that it inherits."""


def choose_carriers(deployment: Deployment, launchers: Mapping[str, Launcher]) -> dict[ChannelKey, str]:
    """The carrier of each channel, which depends on the launchers of its two workers.

    Two workers with the same launcher share memory: they inherit file descriptors ("shm"), or one worker passes file
    descriptors to the other ("passed"). Two workers with different launchers use TCP ("tcp"). With `over_tcp`, all
    workers use TCP.
    """
    how = {"inherited": "shm", "passed": "passed"}

    def carrier(src: str, dst: str) -> str:
        return (
            "tcp" if deployment.over_tcp or launchers[src] is not launchers[dst] else how[launchers[src].shared_memory]
        )

    return {key: carrier(*key[:2]) for key in _channel_bytes(deployment)}


def make_channels(deployment: Deployment, carriers: Mapping[ChannelKey, str]) -> tuple[ChannelDescriptions, Ends]:
    """Describe all channels, and make the channels in shared memory. The workers themselves open the channels over TCP."""
    slots = max(SLOTS, deployment.plan.layout.max_lag + 2)
    links: ChannelDescriptions = {name: [] for name in deployment.workers}
    ends: Ends = {name: [] for name in deployment.workers}
    for (src, dst, kind), size in _channel_bytes(deployment).items():
        if (carrier := carriers[src, dst, kind]) != "shm":
            for name in (src, dst):
                links[name].append([src, dst, kind, carrier, size, slots])
            continue
        for name, end in zip((src, dst), make_shm_channel(size, slots), strict=True):
            links[name].append([src, dst, kind, "shm", *end.fds, end.slot_bytes, end.slots])
            ends[name].append(end)
    return links, ends


def _channel_bytes(deployment: Deployment) -> dict[ChannelKey, int]:
    """The size of the largest message of each channel."""
    plan, everybody = deployment.plan, Topology(me="coordinator", process_of_site=deployment.process_of_site)
    sizes: dict[ChannelKey, int] = {}
    for program, participants in ((plan.init, [everybody]), (plan.iterate, _participants(deployment, everybody))):
        for (step, _), topology in itertools.product(walk(program.steps), participants):
            if not isinstance(step, Transfer):
                continue
            kind = BUNDLE if step.lag is not None else ""
            for pair, message in messages(step, topology).items():
                if pair[0] != pair[1]:
                    sizes[*pair, kind] = max(sizes.get((*pair, kind), 0), _message_bytes(message))
    return sizes


def _participants(deployment: Deployment, everybody: Topology) -> list[Topology]:
    """Every set of processes that can take part in one run of the program `iterate`, as a topology.

    With merge="any", there is one set for each worker: this worker and the learner. Otherwise, the only set is all processes.
    """
    plan = deployment.plan
    if plan.num_workers == 1:
        return [everybody]
    learner = plan.sites.default
    return [
        Topology(me="coordinator", process_of_site={
            (group, 0): deployment.process_of_site[group, 0 if group == learner else worker]
            for group in plan.sites.replicas
        }) for worker in range(plan.num_workers)
    ]  # fmt: skip


def _message_bytes(message: list[Overlap]) -> int:
    types = [host_type(array_type(overlap.move.aval)) for overlap in message]
    # A bundle begins with two numbers. For simplicity, every message gets room for them.
    head = jax.ShapeDtypeStruct((2,), np.uint64)
    return message_bytes([head] + [
        jax.ShapeDtypeStruct(overlap.shape(shape), dtype) for overlap, (shape, dtype) in zip(message, types, strict=True)
    ])  # fmt: skip
