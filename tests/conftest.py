"""The strict world every test lives in.

Warnings are errors (pyproject.toml), types do not promote silently, shapes do not broadcast across ranks, annotated
shapes are checked at run time, and a test that leaves a thread or a process behind fails.

XLA compiles in haste: most of the time of these tests would go into optimising programs that run for milliseconds. Tests
marked `optimised` are compiled as users' programs are, in a run of their own: `pytest -m optimised`.
"""

import atexit
import gc
import os
import platform
import shutil
import signal
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "CHOREO_TEST_RUN" not in os.environ:  # pytest itself; its workers inherit the folder
    # One new cache for the whole run: a program found in a user's cache is a program these tests did not compile.
    os.environ["CHOREO_TEST_RUN"] = os.environ["CHOREO_CACHE"] = tempfile.mkdtemp(prefix="choreo-tests-")
    os.environ["XDG_STATE_HOME"] = os.path.join(
        os.environ["CHOREO_CACHE"], "state"
    )  # not the list of the user's own runs
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
jax.config.update("jax_num_cpu_devices", 4)  # for layouts on several devices; everything else uses the first
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if jax.__version_info__ < (0, 11):
    compiled_once.install()

# The wrappers that check annotations are no lines of a user's.
source_info_util.register_exclusion("<@beartype(")
source_info_util.register_exclusion(str(Path(jaxtyping.__file__).parent))

HASTE = "--xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX --xla_cpu_parallel_codegen_split_count=1"
"""Simple fusions halve the time again. Without the instructions that multiply and add in one rounding, the compiler cannot
choose how often to round. A program in one piece compiles in a fifth less, and takes fewer memory maps. The XLA of JAX 0.11
and later ends the process at the first of these flags."""
MAPS = Path("/proc/self/maps")
UNCHECKED = (
    "algos", "laws", "faults", "docs", "users", "test_benchmarks.py", "test_cli.py", "test_documented.py",
    "test_plan_printer.py", "test_profile.py", "test_replay.py", "test_spaces.py", "test_training.py", "test_warm_start.py",
    "test_who_waits.py", *(("graph", "partition") if jax.__version_info__ < (0, 11) else ()),
)  # fmt: skip
"""Folders and files of tests that run or plan whole programs. Checking every call takes a third of their time; the parts
have tests of their own, in which they are checked. Those of the graph are checked in the run with the newest JAX."""


def pytest_configure(config: pytest.Config) -> None:
    """Before the first program is compiled; processes that the tests start inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what is in its background so
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(
        20_000, 10, 10
    )  # traces are many small objects that live: looking through them takes a tenth of the time
    gc.freeze()
    if config.option.markexpr in ("learning", "optimised"):
        return
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.__version_info__ < (0, 11) and platform.machine() == "x86_64":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {HASTE}"


hypothesis.settings.register_profile(
    "choreo",
    deadline=None,  # the first example compiles
    derandomize=True,  # the same examples for everybody: a change that fails here fails in CI
    print_blob=True,
)
hypothesis.settings.load_profile("choreo")


def _promoting(fn):
    def call(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return fn(*args, **kwargs)

    return call


# Adam's bias correction is `1 - decay**count` with an int32 count, which strict promotion refuses. The values are those
# of standard promotion; everything else in optax, equinox and flax that we use is strict already.
optax.tree.bias_correction = _promoting(optax.tree.bias_correction)


_jaxtyped = jaxtyping.jaxtyped


def _jaxtyped_unless_disabled(*args, **kwargs):
    """A function defined within a function is decorated whenever the outer one runs: not where nothing is checked."""
    return (lambda fn: fn) if jaxtyping.config.jaxtyping_disable else _jaxtyped(*args, **kwargs)


jaxtyping.jaxtyped = _jaxtyped_unless_disabled


@pytest.fixture(autouse=True)
def annotations_are_checked_in_tests_of_parts(request: pytest.FixtureRequest):
    folders = request.path.relative_to(request.config.rootpath).parts
    jaxtyping.config.update("jaxtyping_disable", any(folder in UNCHECKED for folder in folders))
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def the_kernel_has_maps_left():
    """Every compiled program holds some memory maps. Linux gives a process 65,530; XLA ends the process at the next one."""
    yield
    _tests.append(None)
    # To count them takes 30 ms when there are many.
    if len(_tests) % 25 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 45_000:
        compiled_once.forget()
        jax.clear_caches()


_tests: list[None] = []
"""One for each test that has run in this process."""


@pytest.fixture(autouse=True)
def no_thread_or_process_is_left():
    """Whatever a test starts, it also joins."""
    threads, processes = set(threading.enumerate()), _children()
    yield
    deadline = time.monotonic() + 2.0
    while (left := _left(threads, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"the test left running: {', '.join(left)}"


def _left(threads: set[threading.Thread], processes: set[psutil.Process]) -> list[str]:
    # The authenticator of connections is started once and stays, as ZeroMQ's own threads do.
    started = [t for t in threading.enumerate() if t not in threads and t.name != "choreo-authenticator"]
    return [f"thread {t.name}" for t in started] + [f"process {p.pid} ({p.name()})" for p in _children() - processes]


def _children() -> set[psutil.Process]:
    # Python starts one resource tracker with the first shared-memory block and keeps it until it exits itself.
    return {p for p in psutil.Process().children(recursive=True) if not _is_resource_tracker(p)}


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True  # it ended while we looked


_cells: dict[str, bool] = {}
"""Cells of the law matrix that have run, and whether they hold."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and "laws/test_matrix.py::test_cell[" in report.nodeid:
        _cells[report.nodeid.partition("[")[2].removesuffix("]")] = report.passed


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run of the whole matrix writes it into the docs."""
    if hasattr(session.config, "workerinput") or not _cells:
        return
    from laws import matrix

    if len(_cells) == len(matrix.CELLS):
        page = matrix.page({(algo, layout) for algo, layout in matrix.CELLS if _cells.get(f"{algo}-{layout}")})
        if page != matrix.PAGE.read_text():
            matrix.PAGE.write_text(page)
