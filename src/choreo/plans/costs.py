"""The costs of a plan, as data: what each site computes, what crosses between groups, and how many seconds this takes.

    Costs          costs of `init` and of `iterate`; where the seconds come from
    ProgramCosts   the costs of one program, in the order of its steps
    StepCost       one segment or host call: how often it runs, FLOPs, bytes, seconds
    Crossing       one transfer between two groups: how often, in how many messages, how many bytes, seconds

The printer, the drawing and `choreo graph --json` read these values, so that they show the same numbers. `program_costs.py` makes
them from a program. A number that is not known is None, never 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from choreo.errors import ChoreoError
from choreo.graph.text import format_type
from choreo.partition.program import Move
from choreo.plans.step_times import Phase, StepPhase, StepTimes
from choreo.types import GroupName, Role


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a machine is, as the user states it. Seconds are estimated from these rates, which count for every process."""

    flops_per_s: float
    """Floating-point operations per second of one process."""
    bytes_per_s: float
    """Bytes per second between two processes."""
    seconds_per_message: float
    """The seconds that every message takes, in addition to the time for its bytes."""

    def __post_init__(self):
        for field in fields(self):
            value, may_be_0 = getattr(self, field.name), field.name == "seconds_per_message"
            if not (value > 0 or may_be_0 and value == 0) or math.isinf(value):
                raise ChoreoError(
                    f"Rates({field.name}={value!r}) is not a {'number of seconds' if may_be_0 else 'rate'}.",
                    fix=f"Give a finite number {'that is not negative' if may_be_0 else 'above 0'}; measure it on the machine "
                    "that will run the plan.",
                )


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What one segment or host call computes, at each replica of its group.

    "Each time" means: each time that a replica runs the step.
    """

    group: GroupName
    name: str
    """The names of the fragments in the step, joined by "+"; "glue" if there are none."""
    roles: tuple[Role, ...]
    """The roles of the fragments; for a host call, none are recorded."""
    on_host: bool
    """True for a host call: Python on numpy arrays."""
    number: int
    """The position of the step among the steps of its group; a profile names the step by this number."""
    replicas: int
    """How many replicas run the step, as the printed plan counts them: one process each, with all its blocks and devices."""
    blocks: int
    """How many blocks of environments (or of shards) each of these processes computes each time; more than 1 with `exact`, or on
    several devices."""
    times: int
    """How often each replica runs the step while the program runs once."""
    flops: int | None
    """Floating-point operations each time, at each replica; None: unknown, as for Python. See `flops.py` for what counts."""
    flops_at_least: bool
    """True if `flops` is a lower bound, because the rounds of a `while` loop are not known."""
    largest_product: int
    """Multiplications in the largest matrix product or convolution."""
    input_nbytes: int | None
    """Bytes of the arrays that the step reads each time, at each replica; None for a host call."""
    output_nbytes: int | None
    """Bytes of the arrays that the step returns each time, at each replica; None for a host call."""
    seconds: float | None = None
    """Mean measured or estimated seconds each time, at each replica; None: neither measured nor estimated."""

    @property
    def total_flops(self) -> int | None:
        """FLOPs of all replicas together while the program runs once."""
        return None if self.flops is None else self.replicas * self.times * self.flops

    @property
    def total_seconds(self) -> float | None:
        """Seconds of each replica while the program runs once."""
        return None if self.seconds is None else self.times * self.seconds

    def to_dict(self) -> dict[str, Any]:
        """All fields and totals as plain data."""
        return _plain(self) | {"total_flops": self.total_flops, "total_seconds": self.total_seconds}


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One transfer of a program, with its size. "Each time" means: each time that the transfer happens."""

    src: GroupName
    dst: GroupName
    src_number: int
    """The position of the transfer among the steps of `src`; a profile names the transfer by this number."""
    dst_number: int
    """The position of the transfer among the steps of `dst`."""
    moves: tuple[Move, ...]
    """The values that cross. Each label is the user's name for the value, or "" if the value has no name."""
    times: int
    """How often the transfer happens while the program runs once."""
    num_messages: int
    """Messages each time: one for every pair (sender, receiver) in which the receiver gets something from the sender."""
    nbytes: int
    """Bytes each time, over all messages."""
    seconds: float | None = None
    """Measured or estimated seconds each time, for all messages one after the other; None: neither measured nor
    estimated."""
    wait_seconds: float | None = None
    """Measured seconds that a receiver waits for one message, on average; None: not measured, or nobody has to wait."""

    @property
    def message_nbytes(self) -> int:
        """Mean size of a message, rounded up."""
        return -(-self.nbytes // self.num_messages)

    @property
    def total_messages(self) -> int:
        """Messages while the program runs once."""
        return self.times * self.num_messages

    @property
    def total_nbytes(self) -> int:
        """Bytes while the program runs once."""
        return self.times * self.nbytes

    @property
    def total_seconds(self) -> float | None:
        """Seconds while the program runs once."""
        return None if self.seconds is None else self.times * self.seconds

    def to_dict(self) -> dict[str, Any]:
        """All fields and totals as plain data. A value is a pair: its name and its type, such as `f32[8,4]`."""
        values = [{"label": move.label, "type": format_type(move.aval)} for move in self.moves]
        totals = {name: getattr(self, name) for name in ("total_messages", "total_nbytes", "total_seconds")}
        return _plain(self) | {"moves": values} | totals


@dataclass(frozen=True, kw_only=True)
class ProgramCosts:
    """What all groups compute, and everything that crosses between them, while a program runs once."""

    name: str
    """The name of the program: "init" or "iterate"."""
    steps: tuple[StepCost, ...]
    """Segments and host calls, in the order of the program."""
    crossings: tuple[Crossing, ...]
    """Transfers, in the order of the program."""

    @property
    def num_messages(self) -> int:
        return sum(crossing.total_messages for crossing in self.crossings)

    @property
    def nbytes(self) -> int:
        """Bytes that cross."""
        return sum(crossing.total_nbytes for crossing in self.crossings)

    @property
    def flops(self) -> int | None:
        """FLOPs of all replicas of all groups; None if the FLOPs of a segment are unknown. Host calls are left out."""
        totals = [step.total_flops for step in self.steps if not step.on_host]
        known = [total for total in totals if total is not None]
        return sum(known) if len(known) == len(totals) else None

    @property
    def flops_at_least(self) -> bool:
        """True if `flops` is a lower bound."""
        return self.flops is not None and any(step.flops_at_least for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """All costs and totals as plain data."""
        return {
            "name": self.name,
            "steps": [step.to_dict() for step in self.steps],
            "crossings": [crossing.to_dict() for crossing in self.crossings],
            "num_messages": self.num_messages,
            "nbytes": self.nbytes,
            "flops": self.flops,
            "flops_at_least": self.flops_at_least,
        }


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a plan: everything except the seconds is known before the plan runs."""

    init: ProgramCosts
    iterate: ProgramCosts
    """The costs of one iteration."""
    seconds_are: Literal["unknown", "measured", "estimated"] = "unknown"
    """Where the seconds of all steps and crossings come from."""

    @property
    def largest_product(self) -> int:
        """Multiplications in the largest matrix product or convolution of one iteration at one replica."""
        return max((step.largest_product for step in self.iterate.steps), default=0)

    def measured(self, times: StepTimes) -> "Costs":
        """These costs, with the seconds that a run of the plan has measured. What the run did not measure is None."""

        def step_seconds(program: str, step: StepCost) -> float | None:
            mean = times.mean_seconds(StepPhase(program, step.group, step.number, "run"))  # for one block
            return None if mean is None else step.blocks * mean

        def crossing_seconds(program: str, crossing: Crossing) -> tuple[float | None, float | None]:
            def mean(group: GroupName, number: int, phase: Phase) -> float | None:
                return times.mean_seconds(StepPhase(program, group, number, phase))

            sent = mean(crossing.src, crossing.src_number, "send")
            handed = mean(crossing.dst, crossing.dst_number, "hand over")
            seconds = handed if sent is None else sent * crossing.num_messages
            return seconds, mean(crossing.dst, crossing.dst_number, "wait")

        return self._with_seconds("measured", step_seconds, crossing_seconds)

    def estimated(self, rates: Rates) -> "Costs":
        """These costs, with seconds that follow from the user's rates. A step has no seconds if its FLOPs are
        unknown or only a lower bound."""

        def step_seconds(program: str, step: StepCost) -> float | None:
            return None if step.flops is None or step.flops_at_least else step.flops / rates.flops_per_s

        def crossing_seconds(program: str, crossing: Crossing) -> tuple[float | None, float | None]:
            return crossing.num_messages * rates.seconds_per_message + crossing.nbytes / rates.bytes_per_s, None

        return self._with_seconds("estimated", step_seconds, crossing_seconds)

    def _with_seconds(
        self,
        seconds_are: Literal["measured", "estimated"],
        of_step: Callable[[str, StepCost], float | None],
        of_crossing: Callable[[str, Crossing], tuple[float | None, float | None]],
    ) -> "Costs":
        def timed(costs: ProgramCosts) -> ProgramCosts:
            steps = tuple(replace(step, seconds=of_step(costs.name, step)) for step in costs.steps)
            times = [(crossing, *of_crossing(costs.name, crossing)) for crossing in costs.crossings]
            crossings = tuple(replace(each, seconds=sent, wait_seconds=waited) for each, sent, waited in times)
            return replace(costs, steps=steps, crossings=crossings)

        return Costs(init=timed(self.init), iterate=timed(self.iterate), seconds_are=seconds_are)

    def to_dict(self) -> dict[str, Any]:
        """All costs as plain data, for JSON."""
        return {
            "init": self.init.to_dict(),
            "iterate": self.iterate.to_dict(),
            "largest_product": self.largest_product,
            "seconds_are": self.seconds_are,
        }


def _plain(cost: StepCost | Crossing) -> dict[str, Any]:
    found = ((field.name, getattr(cost, field.name)) for field in fields(cost))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found}
