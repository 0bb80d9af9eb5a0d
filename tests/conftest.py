"""The strict settings under which every test runs.

Warnings are errors (pyproject.toml), types do not promote silently, shapes do not broadcast across ranks, annotated
shapes are checked at run time (but not in `UNCHECKED`), and a test fails if it leaves a thread or a process behind.

XLA compiles without most optimisations, because the programs of the tests run only for milliseconds, and optimising them would
take most of the time. The programs of tests marked `optimised` or `learning` are compiled like users' programs, in separate
runs: `pytest -m optimised` and `pytest -m learning`.
"""

import atexit
import gc
import os
import platform
import shutil
import signal
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "CHOREO_TEST_RUN" not in os.environ:  # the main process; xdist workers inherit the folder
    # Each test run gets a new compilation cache. Programs in the user's cache would not be compiled again, so the tests would not
    # show whether these programs compile.
    os.environ["CHOREO_TEST_RUN"] = os.environ["CHOREO_CACHE"] = tempfile.mkdtemp(prefix="choreo-tests-")
    # Test runs must not appear in the user's list of runs.
    os.environ["XDG_STATE_HOME"] = os.path.join(os.environ["CHOREO_CACHE"], "state")
    atexit.register(shutil.rmtree, os.environ["CHOREO_CACHE"], ignore_errors=True)
os.environ["MPLBACKEND"] = "agg"

import threading
import time
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import optax
import psutil
import pytest
from jax.extend import source_info_util

import compiled_once
from choreo.runtime.compilation_cache import use_compilation_cache

use_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_num_cpu_devices", 4)  # for layouts on several devices; everything else uses the first device
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if jax.__version_info__ < (0, 11):
    compiled_once.install()

# Error messages show a line of the user's file. The wrappers that check annotations must not appear as that line.
source_info_util.register_exclusion("<@beartype(")
source_info_util.register_exclusion(str(Path(jaxtyping.__file__).parent))

FAST_COMPILATION = "--xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX --xla_cpu_parallel_codegen_split_count=1"
"""XLA flags. The first selects simple fusions, which halve the compilation time. The second excludes fused multiply-add
instructions, so that the rounding does not depend on the compiler's choice of instructions. The third keeps the
generated code undivided, which needs a fifth less time and fewer memory maps. With JAX 0.11 and later, the first flag makes XLA
abort the process."""
MAPS = Path("/proc/self/maps")
UNCHECKED = (
    "algos", "laws", "faults", "docs", "plans", "users", "test_benchmarks.py", "test_cli.py", "test_documented.py",
    "test_profile.py", "test_replay.py", "test_spaces.py", "test_training.py", "test_warm_start.py",
    "test_who_waits.py", *(("graph", "partition") if jax.__version_info__ < (0, 11) else ()),
)  # fmt: skip
"""Folders and files of tests that run or plan whole programs. Annotations are not checked in these tests, because the checks
would take a third of the time. In the tests of single modules, annotations are checked. In the tests of `graph` and `partition`,
annotations are checked only with JAX 0.11 and later."""


def pytest_configure(config: pytest.Config) -> None:
    """Set the compiler's options before the first program is compiled; child processes inherit them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs with SIGINT ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Traces consist of many long-lived small objects. With the default thresholds, the garbage collector would take a tenth of the
    # time.
    gc.set_threshold(20_000, 10, 10)
    gc.freeze()
    if config.option.markexpr in ("learning", "optimised"):
        return
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.__version_info__ < (0, 11) and platform.machine() == "x86_64":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILATION}"


hypothesis.settings.register_profile(
    "choreo",
    deadline=None,  # the first example includes a compilation
    derandomize=True,  # the same examples on every machine, so that a failure can be reproduced
    print_blob=True,
)
hypothesis.settings.load_profile("choreo")


def _promoting(fn):
    def call(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return fn(*args, **kwargs)

    return call


# Adam's bias correction is `1 - decay**count` with an int32 count, which strict promotion refuses. So `bias_correction` gets
# standard promotion. All other functions that we use of optax, equinox and flax work with strict promotion.
optax.tree.bias_correction = _promoting(optax.tree.bias_correction)


_jaxtyped = jaxtyping.jaxtyped


def _jaxtyped_unless_disabled(*args, **kwargs):
    """While checks are disabled, do not decorate: inner functions would be decorated each time their outer function runs."""
    return (lambda fn: fn) if jaxtyping.config.jaxtyping_disable else _jaxtyped(*args, **kwargs)


jaxtyping.jaxtyped = _jaxtyped_unless_disabled


@pytest.fixture(autouse=True)
def check_annotations(request: pytest.FixtureRequest):
    folders = request.path.relative_to(request.config.rootpath).parts
    jaxtyping.config.update("jaxtyping_disable", any(folder in UNCHECKED for folder in folders))
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def limit_memory_maps():
    """Clear JAX's caches before XLA aborts: each compiled program holds memory maps, and Linux allows 65,530 per process."""
    yield
    _tests.append(None)
    # Counting many maps takes 30 ms, so they are counted only after every 25th test.
    if len(_tests) % 25 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 45_000:
        compiled_once.forget()
        jax.clear_caches()


_tests: list[None] = []
"""One entry for each test that has run in this process."""


@pytest.fixture(autouse=True)
def no_thread_or_process_is_left():
    """Fail a test that leaves a thread or a process behind."""
    threads, processes = set(threading.enumerate()), _children()
    yield
    deadline = time.monotonic() + 2.0
    while (left := _left(threads, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"the test left running: {', '.join(left)}"


def _left(threads: set[threading.Thread], processes: set[psutil.Process]) -> list[str]:
    # The thread that authenticates connections is started once and runs until the process ends, like ZeroMQ's own threads.
    started = [t for t in threading.enumerate() if t not in threads and t.name != "choreo-authenticator"]
    return [f"thread {t.name}" for t in started] + [f"process {p.pid} ({p.name()})" for p in _children() - processes]


def _children() -> set[psutil.Process]:
    # Python starts one resource tracker with the first shared-memory block, and keeps it until the process exits.
    return {p for p in psutil.Process().children(recursive=True) if not _is_resource_tracker(p)}


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True  # the process ended in the meantime


_cells: dict[str, bool] = {}
"""Cells of the law matrix that have run, and whether they passed."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and "laws/test_matrix.py::test_cell[" in report.nodeid:
        _cells[report.nodeid.partition("[")[2].removesuffix("]")] = report.passed


def pytest_sessionfinish(session: pytest.Session) -> None:
    """After a run of the whole law matrix, write its results into the docs."""
    if hasattr(session.config, "workerinput") or not _cells:
        return
    from laws import matrix

    if len(_cells) == len(matrix.CELLS):
        page = matrix.page({(algo, layout) for algo, layout in matrix.CELLS if _cells.get(f"{algo}-{layout}")})
        if page != matrix.PAGE.read_text():
            matrix.PAGE.write_text(page)
