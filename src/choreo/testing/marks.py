"""`unmarked`: run an algorithm as if it had no marks (`@choreo.fragment`), to compare this run with a run that has marks."""

import contextlib
from collections.abc import Iterator

from choreo import roles


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """Within the `with` statement every fragment calls its plain function, without Choreo's cache of traced functions.

    The reference of the law (docs/law.md) is computed in this way. Otherwise `jax.jit(iterate)` and the plan would use the same
    cache, and the comparison could not find a mistake of the cache.

    >>> import choreo, jax.numpy as jnp
    >>> @choreo.fragment("actor")
    ... def scale(x, factor): return x * factor
    >>> with choreo.testing.unmarked():
    ...     float(scale(jnp.float32(2.0), 3.0))
    6.0
    """
    with roles.unmarked(True):
        yield
