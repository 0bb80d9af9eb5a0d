"""The settings of JAX that Choreo changes while it works, and restores afterwards.

    jax_compilation_cache_dir, ..._max_size, jax_persistent_cache_min_compile_time_secs     see compilation_cache.py
    jax_cpu_enable_async_dispatch, jax_num_cpu_devices                                      JAX reads them when it starts

If the user has chosen the value of a setting, Choreo does not change this setting (for asynchronous dispatch: only if the user
chose it by an environment variable). After JAX has started, Choreo cannot restore
the number of devices: JAX then refuses to change this number.
"""

import contextlib
import os
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from choreo import _compat
from choreo.envs.base import Env
from choreo.envs.gymnasium import HostEnv
from choreo.layouts.base import Layout

DEVICES, DISPATCH, CACHE = "jax_num_cpu_devices", "jax_cpu_enable_async_dispatch", "jax_compilation_cache_dir"
OURS = (
    CACHE,
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    DISPATCH,
    DEVICES,
)
"""The settings that `put_back` restores. It leaves all other settings alone, because the user's code may change them."""


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Return a context manager that, at its end, restores the settings that Choreo has changed, as far as JAX allows it."""
    before = {name: jax.config.values[name] for name in OURS}
    try:
        yield
    finally:
        changed = {name for name, value in before.items() if jax.config.values[name] != value}
        for name in changed:
            with contextlib.suppress(RuntimeError):  # JAX has started, and refuses the change
                jax.config.update(name, before[name])
        if CACHE in changed:
            compilation_cache.reset_cache()  # otherwise JAX continues to write into Choreo's folder


def prepare(layout: Layout, env: Env | None = None) -> None:
    """Set the number of CPU devices that the layout needs, and turn off asynchronous dispatch for Python environments.

    JAX reads both settings when it starts. If JAX has started already, this function does nothing. Values that the user has chosen
    are kept.
    """
    if _compat.clients_exist():
        return
    devices = max(group.devices for group in layout.groups)
    if devices > 1 and not _user_made_devices():
        jax.config.update(DEVICES, devices)  # has an effect on machines without accelerators
    if isinstance(env, HostEnv) and DISPATCH.upper() not in os.environ:
        # A loop over Python environments waits for every action: dispatching to another thread only costs time.
        jax.config.update(DISPATCH, False)


def _user_made_devices() -> bool:
    return jax.config.values[DEVICES] >= 0 or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
