"""The limit of open files. If a run needs more files, Choreo raises the limit, or refuses the run before any worker starts."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from choreo.errors import RunError
from choreo.runtime.coordinator import open_files
from choreo.runtime.coordinator.cluster import Cluster, Host
from choreo.runtime.coordinator.deployment import Deployment
from choreo.runtime.coordinator.launching import launchers_of
from choreo.runtime.coordinator.local_launcher import LocalLauncher
from choreo.runtime.coordinator.silence import Silence
from choreo.runtime.coordinator.wiring import choose_carriers
from choreo.runtime.local import Local
from faults.scenes import KEY, cartpole

HERE, THERE = Host(address="127.0.0.1"), Host(address="10.0.0.2", port=7000)


def star(num_workers: int, carrier: str) -> dict[tuple[str, str, str], str]:
    """For every worker: a channel to the learner, and a channel from the learner."""
    pairs = [(f"env-{i}", "learner") for i in range(num_workers)]
    return {(*pair, ""): carrier for src, dst in pairs for pair in ((src, dst), (dst, src))}


def hosts(num_workers: int, host: Host) -> dict[str, Host]:
    return {"learner": host} | {f"env-{i}": host for i in range(num_workers)}


def test_some_120_workers_need_more_than_the_usual_limit(monkeypatch):
    monkeypatch.setattr(open_files, "raise_limit", lambda: 1024)
    open_files.check_limit(star(40, "shm"), hosts(40, HERE))
    with pytest.raises(RunError) as refused:
        open_files.check_limit(star(120, "shm"), hosts(120, HERE))
    needed = open_files.files_needed(star(120, "shm"), hosts(120, HERE))
    assert str(refused.value) == (
        f"This run has 121 workers and needs {needed:,} open files, but this process may open only 1,024.\n"
        "Raise the hard limit (`ulimit -Hn`; see /etc/security/limits.conf), or use fewer workers."
    )
    assert 1444 < needed < 2000


def test_files_of_workers_on_other_hosts_count_there():
    assert open_files.files_needed(star(100, "tcp"), hosts(100, THERE)) < open_files.files_needed(
        star(100, "tcp"), hosts(100, HERE) | {f"env-{i}": THERE for i in range(100)}
    )


@pytest.mark.parametrize("layout", ["fine x2", "three sites"])
@pytest.mark.parametrize("carrier", ["shm", "tcp"])
def test_a_run_opens_no_more_files_than_were_counted(layout, carrier, monkeypatch):
    """Counts the open files of the coordinator each time after it has started a worker, and again when the run has started."""
    plan = cartpole(layout)
    deployment = Deployment.of(plan, Cluster.local(), over_tcp=carrier == "tcp")
    carriers = choose_carriers(deployment, launchers_of(deployment, None, Silence()))
    assert set(carriers.values()) == {carrier}
    needed = open_files.files_needed(carriers, deployment.hosts) - open_files.RESERVE
    seen = []
    start = LocalLauncher.start

    def start_and_count(*args):
        started = start(*args)
        seen.append(psutil.Process().num_fds())
        return started

    monkeypatch.setattr(LocalLauncher, "start", start_and_count)
    with contextlib.closing(Local(plan, carrier=carrier)) as local:
        local.start(KEY)
        seen.append(psutil.Process().num_fds())
    assert len(seen) > 3
    assert max(seen) <= needed


SCRIPT = """
import resource, sys
soft, hard = int(sys.argv[1]), int(sys.argv[2])
import choreo
from faults.scenes import KEY, cartpole, play
from choreo.runtime.local import Local
plan = cartpole("fine x2")
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    play(Local(plan))
    print("ran with", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except choreo.errors.RunError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "says"),
    [
        (40, 2048, r"ran with 2048"),
        (40, 60, r"This run has 3 workers and needs \d+ open files, but this process may open only 60\."),
    ],
    ids=["raised", "refused"],
)
def test_a_process_with_a_low_limit(soft, hard, says):
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(soft), str(hard)], cwd=tests, capture_output=True, text=True, timeout=120
    )
    assert re.match(says, done.stdout), done
