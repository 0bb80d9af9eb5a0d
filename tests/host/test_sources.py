"""A `Source` makes environments. A pickled source can be used in a process that does not have the user's program."""

import os
import pickle
import subprocess
import sys
import threading

import pytest

from choreo.errors import EnvError
from choreo.host.make_batch import MakeBatch
from choreo.host.probe import probe
from choreo.host.sources import Source
from choreo.runs import resolve
from host.toys import Count

PLAY = """
import pickle, sys
make = pickle.load(sys.stdin.buffer)
import numpy as np
block = make(range(2, 4))
token, obs = block.reset(np.array([7, 8], np.uint32))
token, obs, *_ = block.step(token, np.ones(2, np.int32))
block.close()
print(obs.tolist())
print("jax" in sys.modules, *(name for name in sys.modules if "choreo_user" in name or name == "__user__"))
print(int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) // 1024)
"""


def play_elsewhere(source: Source) -> list[str]:
    """Step two environments in a new process, which receives only a pickled object. Return the lines that the process prints."""
    make = MakeBatch(source=source, form=probe(source))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PLAY], input=pickle.dumps(make), capture_output=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_a_process_that_only_steps_environments_needs_no_jax_and_little_memory():
    obs, imported, megabytes = play_elsewhere(Source.of_id("CartPole-v1", {}))
    assert imported == "False"
    assert int(megabytes) <= 60


USER_FILE = """
import gymnasium
import numpy as np
from beside import LENGTH

class Ramp(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, slope):
        self.slope = slope

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.observe(), {}

    def observe(self):
        return np.array([self.time * self.slope], np.float32)

    def step(self, action):
        self.time += 1
        return self.observe(), 1.0, self.time == LENGTH, False, {}

def make_env(slope=1.0):
    return Ramp(slope)
"""


def test_a_users_file_is_pickled_by_value(tmp_path):
    (tmp_path / "my_env.py").write_text(USER_FILE)
    (tmp_path / "beside.py").write_text("LENGTH = 4\n")
    env = resolve.environment(f"{tmp_path}/my_env.py:make_env", 4, slope=2)
    obs, imported, _ = play_elsewhere(env.source)
    assert obs == "[[2.0], [2.0]]" and imported == "False"


def test_a_lambda_with_a_class_of_the_same_script_is_pickled_by_value(tmp_path):
    """The script is `__main__` in the process that pickles, and does not exist in the process that unpickles."""
    script = tmp_path / "script.py"
    script.write_text(
        USER_FILE.replace("from beside import LENGTH", "LENGTH = 4")
        + """
import pickle, sys
from choreo.host.make_batch import MakeBatch
from choreo.host.probe import probe
from choreo.host.sources import Source

slope = 3
source = Source.of_factory(lambda: Ramp(slope), {})
sys.stdout.buffer.write(pickle.dumps(MakeBatch(source=source, form=probe(source))))
"""
    )
    made = subprocess.run([sys.executable, script], capture_output=True, timeout=120)
    assert made.returncode == 0, made.stderr.decode()
    script.unlink()
    done = subprocess.run([sys.executable, "-c", PLAY], input=made.stdout, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines()[0] == "[[3.0], [3.0]]"


def test_a_source_that_is_unpickled_in_the_same_process_equals_the_original():
    def make():
        return Count()

    for source in (Source.of_factory(make, {}), Source.of_id("CartPole-v1", {"options": [1, {"a": 2.0}]})):
        again = pickle.loads(pickle.dumps(source))
        assert again == source and hash(again) == hash(source)
        assert again.factory_call is source.factory_call


def test_sources_are_equal_if_their_functions_and_arguments_are_equal():
    make = lambda: Count()  # noqa: E731
    assert Source.of_factory(make, {"a": [1]}) == Source.of_factory(make, {"a": [1]})
    assert Source.of_factory(make, {"a": [1]}) != Source.of_factory(make, {"a": (1,)})
    assert Source.of_factory(make, {}) != Source.of_factory(lambda: Count(), {})
    assert Source.of_factory(Count, {}) == Source.of_factory(Count, {})
    assert Source.of_id("CartPole-v1", {"x": 1}) != Source.of_id("CartPole-v1", {"x": True})
    assert Source.of_id("CartPole-v1", {}) != Source.of_id("CartPole-v1", {}, vector=True)


def test_the_name_of_a_source_is_that_of_its_factory():
    def make_it():
        return Count()

    assert Source.of_factory(make_it, {}).name == "make_it"
    assert Source.of_factory(Count, {}).name == "Count"
    assert Source.of_factory(lambda: Count(), {}).name.startswith("lambda at test_sources.py:")


def test_a_factory_that_cannot_be_pickled_is_refused():
    lock = threading.Lock()
    source = Source.of_factory(lambda: lock and Count(), {})
    assert source.make()
    with pytest.raises(EnvError, match="`lambda at .*` cannot be sent to another process: TypeError: .*lock"):
        pickle.dumps(source)
