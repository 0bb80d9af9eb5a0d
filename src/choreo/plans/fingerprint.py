"""The fingerprint of a plan: two plans are equal if they print the same (apart from warnings) and their workers receive the same
programs."""

import hashlib
import re
from collections.abc import Iterable, Mapping

from jax import export

from choreo.partition.program import Loop, Program, Segment, Step, walk
from choreo.plans.export import export_program
from choreo.plans.exported_fn import ExportedFn
from choreo.types import GroupName


def hash_programs(text: str, programs: Iterable[Program], replicas: Mapping[GroupName, int | None]) -> str:
    """SHA-256 of a text and of the programs in the form that workers receive. `replicas`: how many replicas each group has."""
    digest = hashlib.sha256(text.encode())
    for program in programs:
        for step, _ in walk(export_program(program, replicas, replicas).steps):
            digest.update(_describe(step).encode())
            if isinstance(step, Segment):
                digest.update(_code(step).encode())
    return digest.hexdigest()


def _describe(step: Step) -> str:
    if isinstance(step, Segment):
        return f"{step.group} {step.name} {step.ins} {step.outs} {step.donated}"
    return f"{step.length} {step.reverse} {step.parts}" if isinstance(step, Loop) else repr(step)


def _code(segment: Segment) -> str:
    """A segment as text, without source lines. So the fingerprint does not change if the user's code moves within its file."""
    assert isinstance(segment.fn, ExportedFn)
    text = export.deserialize(bytearray(segment.fn.serialized)).mlir_module()
    text = re.sub(r" ?loc\((?:[^()]|\([^()]*\))*\)", "", text)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#loc"))
