"""Keeps compiled programs on disk, so that the second run of a plan does not compile them again.

Programs that compile in less than 0.3 s are not kept. The kept programs are in a folder of the user's cache.
`CHOREO_CACHE=/some/folder` chooses a different folder, and `CHOREO_CACHE=off` turns the cache off. If the user has set a
cache folder in JAX itself, JAX uses that folder, and Choreo changes no settings of JAX's cache.
"""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

MAX_BYTES = 2 * 1024**3
"""The largest size of the cache. If the cache would become larger, JAX deletes the least recently used programs. With a limit,
JAX also locks the folder during each access, so several processes can share the folder."""


def use_compilation_cache() -> Path | None:
    """Turn the cache on, if it is not on already. Returns its folder, or None if the user turned the cache off."""
    folder = cache_folder()
    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return Path(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]
    if folder is None:
        return None
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX reads these settings only at the first compilation, which may have happened already. So make JAX read them again.
    compilation_cache.reset_cache()
    return folder


def cache_folder() -> Path | None:
    """The folder for compiled programs, from the environment variables, or None if the cache is turned off."""
    chosen = os.environ.get("CHOREO_CACHE")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "choreo" / "jax"
