"""Compares the versions and the CPU of a worker's host with this machine, to tell whether the worker computes the same results.

    versions     choreo, jax, jaxlib, numpy, Python, packages of the environment     different: refused, unless allow_versions
    bits         the CPU, XLA_FLAGS                                                  different: a warning; with same_bits, refused

With different versions, the same program can give different results. For a different kind of CPU, XLA compiles the program
to different instructions, which may round differently. Versions are read from the metadata of packages, so this module does
not import JAX.
"""

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from choreo.errors import RunError

ALWAYS = ("choreo", "jax", "jaxlib", "numpy")
"""The packages that are compared for every run."""
NONE = "none"
"""The version of a package that is not installed."""


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions, CPU and XLA_FLAGS of a process."""

    packages: Mapping[str, str]
    """The version of each package, and of `python`."""
    cpu: str
    """The name of the CPU."""
    cpu_features: str
    """A hash of the instruction sets of the CPU. XLA compiles for these instruction sets."""
    xla_flags: str
    """XLA_FLAGS, sorted."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Versions":
        return cls(**data)


def this_machine(packages: Iterable[str]) -> Versions:
    """The `Versions` of this process; `packages` are the packages of the environment."""
    cpu, features = cpu_of(_read("/proc/cpuinfo"))
    found = {name: _version(name) for name in dict.fromkeys((*ALWAYS, *packages))}
    return Versions(
        packages=found | {"python": platform.python_version()},
        cpu=cpu,
        cpu_features=features,
        xla_flags=" ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),
    )


def compare(host: str, there: Versions, here: Versions) -> "Differences":
    """The differences between a host and this machine. `there` describes the host, and `here` this machine."""
    packages = {
        name: (there.packages.get(name, NONE), version)
        for name, version in here.packages.items()
        if there.packages.get(name, NONE) != version
    }
    bits = {}
    if (there.cpu, there.cpu_features) != (here.cpu, here.cpu_features):
        bits["CPU"] = tuple(f"{v.cpu}, features {v.cpu_features}" for v in (there, here))
    if there.xla_flags != here.xla_flags:
        bits["XLA_FLAGS"] = there.xla_flags, here.xla_flags
    return Differences(host=host, packages=packages, bits=bits)


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The differences between a host and this machine. Each difference is (value on the host, value on this machine)."""

    host: str
    """The name of the host in error messages."""
    packages: Mapping[str, tuple[str, str]]
    """The packages whose versions differ. Different versions can give different results."""
    bits: Mapping[str, tuple[str, str]]
    """The other differences. They can make the same program round differently."""

    @property
    def recorded(self) -> dict[str, str]:
        """The host's side of each difference, for run.toml; empty if nothing differs."""
        return {name: there for name, (there, _) in (*self.packages.items(), *self.bits.items())}

    @property
    def warning(self) -> str | None:
        """The warning for the user if the run accepts the differences, or None if nothing differs."""
        if not self.recorded:
            return None
        listed = _listed({**self.packages, **self.bits})
        return f"It has {listed}. The results may not be the same bit for bit (see level 1 in docs/law.md)."

    def check(self, *, allow_versions: bool, same_bits: bool) -> None:
        """Raise RunError if versions differ and `allow_versions` is False. With `same_bits`, raise for every difference."""
        if same_bits and self.recorded:
            raise RunError(
                f"Host {self.host} has {_listed({**self.packages, **self.bits})}. Its results may not be the same bit for bit.",
                fix="Use a host like this machine, or leave out --same-bits (same_bits=True).",
            )
        if self.packages and not allow_versions:
            raise RunError(
                f"Host {self.host} has {_listed(self.packages)}. Other versions can give other results.",
                fix=f"{self._how_to_install()}, or accept the difference: --allow-versions (allow_versions=True).",
            )

    def _how_to_install(self) -> str:
        wanted = [f"{name}=={here}" for name, (_, here) in self.packages.items() if name != "python" and here != NONE]
        steps = [f"pip install {' '.join(wanted)}"] if wanted else []
        if "python" in self.packages:
            steps.append(f"Python {self.packages['python'][1]}")
        return (
            f"Install the same versions there ({', and '.join(steps)})" if steps else "Install the same versions here"
        )


def _listed(different: Mapping[str, tuple[str, str]]) -> str:
    def value(name: str, of: str) -> str:
        return repr(of) if name == "XLA_FLAGS" else of

    return "; ".join(
        f"{'Python' if name == 'python' else name} {value(name, there)} (this machine: {value(name, here)})"
        for name, (there, here) in different.items()
    )


def cpu_of(cpuinfo: str) -> tuple[str, str]:
    """The name of the first CPU in the text of /proc/cpuinfo, and a hash of its features.

    If the text lacks one of these fields, the machine type (for example x86_64) is used instead.
    """
    lines = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    features = fields.get("flags", fields.get("Features", platform.machine()))
    digest = hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()
    return fields.get("model name", platform.machine()), digest[:12]


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError:  # not Linux
        return ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return NONE
