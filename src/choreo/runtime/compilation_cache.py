"""Keeps compiled programs on disk, so that the second run of a plan starts at once.

They are in the user's cache folder, or in another one with `CHOREO_CACHE=/some/folder`; `CHOREO_CACHE=off` turns the cache off.
A cache folder that the user has set in JAX itself is used as it is.
"""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

MAX_BYTES = 2 * 1024**3
"""The largest size of the cache; JAX drops the oldest programs. With a limit, JAX locks the folder, so processes can share it."""


def use_compilation_cache() -> Path | None:
    """Turn the cache on, if it is not on already; returns its folder, or None if the user turned it off."""
    folder = cache_folder()
    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return Path(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]
    if folder is None:
        return None
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # JAX reads these settings once, at the first compilation, which may be over
    return folder


def cache_folder() -> Path | None:
    """The folder for compiled programs, as the environment variables say; None if they are not kept."""
    chosen = os.environ.get("CHOREO_CACHE")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "choreo" / "jax"
