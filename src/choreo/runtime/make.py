"""The runtimes by name, and the choice of the runtime for a plan."""

from collections.abc import Callable
from typing import Any


def make_runtime(name: str | None, plan: Any, **options: Any) -> Any:
    """Make the runtime of this name for a plan.

    If `name` is None, the runtime is `local` with a cluster or for a plan with several processes, and otherwise `inprocess`.
    """
    if name is None and options.get("cluster") is not None:
        name = "local"
    return RUNTIMES[name or ("local" if plan.num_processes > 1 else "inprocess")](plan, **options)


# Import the module of a runtime only when this runtime is made: a run configuration needs only the names of the runtimes.


def _inprocess(plan: Any, **options: Any) -> Any:
    from choreo.runtime.inprocess import InProcess

    return InProcess(plan, profile=options["profile"], replay=options.get("replay"))


def _local(plan: Any, **options: Any) -> Any:
    from choreo.runtime.local import Local

    options.pop("replay", None)  # only `InProcess` can replay a log
    return Local(plan, **options)


RUNTIMES: dict[str, Callable[..., Any]] = {"inprocess": _inprocess, "local": _local}
"""For each name of a runtime, the function that makes the runtime."""
