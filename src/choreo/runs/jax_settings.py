"""What Choreo sets in JAX while it works. It is put back afterwards, and nothing is set that the user has set.

    jax_compilation_cache_dir, ..._max_size, jax_persistent_cache_min_compile_time_secs     see cache.py
    jax_cpu_enable_async_dispatch, jax_num_cpu_devices                                      read once, when JAX starts

JAX refuses to change the number of devices once it has started: that one stays, if it was Choreo that started it.
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
"""What the user's code sets beside these, in a file that `train` imports, say, is for the user to put back."""


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """After this block, the settings that Choreo changes are what they were before it, as far as JAX allows."""
    before = {name: jax.config.values[name] for name in OURS}
    try:
        yield
    finally:
        changed = {name for name, value in before.items() if jax.config.values[name] != value}
        for name in changed:
            with contextlib.suppress(RuntimeError):  # too late: JAX has started
                jax.config.update(name, before[name])
        if CACHE in changed:
            compilation_cache.reset_cache()  # else JAX would go on writing into our folder


def prepare(layout: Layout, env: Env | None = None) -> None:
    """Set what JAX reads when it starts; if it has been used in this process, or the user has said otherwise, nothing."""
    if _compat.clients_exist():
        return
    devices = max(group.devices for group in layout.groups)
    if devices > 1 and not _user_made_devices():
        jax.config.update(DEVICES, devices)  # on a machine without accelerators, JAX sees so many
    if isinstance(env, HostEnv) and DISPATCH.upper() not in os.environ:
        # Who steps Python environments waits for every action: handing the work to another thread only costs time.
        jax.config.update(DISPATCH, False)


def _user_made_devices() -> bool:
    return jax.config.values[DEVICES] >= 0 or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
