"""Make the environments of one site, either as one vector environment or as separate environments."""

import dataclasses
from dataclasses import dataclass

from choreo.host.batch import Batch
from choreo.host.gymnasium import GymBatch
from choreo.host.probe import EnvForm
from choreo.host.sources import Source
from choreo.host.vector import VectorBatch


@dataclass(frozen=True, kw_only=True)
class MakeBatch:
    """A function from the numbers of a site's environments to the `Batch` of these environments."""

    source: Source
    """How one environment is made."""
    form: EnvForm = dataclasses.field(compare=False)
    """The form of the environments, `probe(source)`; not compared, because it follows from `source`."""
    info_keys: tuple[str, ...] = ()
    """Names of the numbers in `info` that become metrics."""
    wide: bool = False
    """Whether JAX computes in 64 bits."""

    exact = True
    """Tells `HostObjects` not to check or copy the results: a batch checks the results of its environments itself, and never
    changes an array that it returned."""

    def __call__(self, envs: range) -> Batch:
        make = VectorBatch if self.form.vector else GymBatch
        return make(envs, self.source, form=self.form, info_keys=self.info_keys, wide=self.wide)
