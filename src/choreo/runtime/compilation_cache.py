"""Compiled programs are kept on disk, so that the second run of anything starts at once.

They live in the user's cache folder; `CHOREO_CACHE=/some/folder` moves them, `CHOREO_CACHE=off` turns it off. A
folder the user set in JAX itself is left alone.
"""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

MAX_BYTES = 2 * 1024**3
"""Older programs are dropped beyond this. Setting it also makes JAX lock the folder, so processes may share it."""


def use_compilation_cache() -> Path | None:
    """Turn the cache on, if it is not; the folder, or None if it is off."""
    folder = cache_folder()
    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return Path(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]
    if folder is None:
        return None
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # JAX looks once, at the first compilation, which may already have been
    return folder


def cache_folder() -> Path | None:
    """Where compiled programs go by the environment variables; None if they are not kept."""
    chosen = os.environ.get("CHOREO_CACHE")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "choreo" / "jax"
