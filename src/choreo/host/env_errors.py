"""Errors for environments that raise an exception or return something wrong."""

from typing import Any

import numpy as np

from choreo.errors import EnvError


def env_raised(name: str, which: str, part: str, error: BaseException) -> EnvError:
    """The EnvError for the exception `error`, which an environment raised in its method `part`."""
    return EnvError(
        f"{which} of `{name}` raised {type(error).__name__} in {part}: {error}",
        fix="The traceback shows where this happened in the environment's code.",
    )


def describe(result: Any) -> str:
    """A short description of a wrong result for an error message: `3 values`, `an array int32[4]`."""
    if isinstance(result, tuple):
        return f"{len(result)} values"
    if isinstance(result, np.ndarray):
        return f"an array {result.dtype}{list(result.shape)}"
    return f"a {type(result).__name__}"
