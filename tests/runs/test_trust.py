"""A run.toml from a stranger must not run code. These tests state which entries are data, which name code, and when code is run."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import gymnasium
import jax
import optax
import pytest
import tomli_w

import choreo
from choreo import algos, envs, networks
from choreo.cli.main import main
from choreo.errors import LayoutError, RunError, UntrustedError
from choreo.networks import deterministic, q_cnn
from choreo.runs import public_names, resolve, toml_values
from choreo.runs.config import RunConfig
from choreo.runs.folder import RunFolder
from tiny import Tiny

CARTPOLE = "jax:CartPole-v1"
TINY = f"{Path(__file__).parents[1] / 'tiny.py'}:Tiny"


# The table of public names, and the entries that are data.


def test_a_public_name_has_no_colon_and_names_one_value():
    names = [name for named in public_names.kinds().values() for name in named]
    assert len(names) == len(set(names)) and not any(":" in name for name in names)
    assert all(public_names.name_of(value) == name for name, value in public_names.table().items())


@pytest.mark.parametrize("value", [
    *(cls() for cls in algos.ALGOS.values()),
    choreo.PPO(network=networks.lstm, optimizer=optax.sgd),
    choreo.PPO(network=functools.partial(networks.mlp, hidden=(8, 8)), optimizer=functools.partial(optax.adam, b1=0.5)),
    choreo.DQN(network=functools.partial(q_cnn, width=256), value_range=(-1.0, 1.0)),
    choreo.TD3(network=functools.partial(deterministic, hidden=[8])),
    choreo.Layout(choreo.Group("env", "actor", replicas=2, device="cpu"), choreo.Group("learner"), max_lag=2),
    jax.nn.relu,
    {"text": "x", "numbers": [1, 2.5, None, (True,)]},
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_values_of_choreo_are_data(value):
    described = toml_values.describe(value)
    assert ":" not in tomli_w.dumps({"x": described})
    back = toml_values.rebuild(tomllib.loads(tomli_w.dumps({"x": described}))["x"], at="x")
    assert repr(back) == repr(value)


@pytest.mark.parametrize("name, kwargs", [
    (CARTPOLE, {}), (CARTPOLE, {"time_limit": 100}), ("CartPole-v1", {"max_episode_steps": 5}), ("gymnax:Catch-bsuite", {}),
    ("CartPole-v1", {"vectorization_mode": "vector_entry_point"}), ("FrozenLake-v1", {"desc": ["SF", "HG"]}),
    ("gymnax:CartPole-v1", {"max_steps_in_episode": 20}), ("gymnasium:CartPole-v1", {"info_keys": ("late",)}),
])  # fmt: skip
def test_environments_with_public_names_are_data(name, kwargs):
    env = envs.make(name, 3, **kwargs)
    described = tomllib.loads(tomli_w.dumps(toml_values.describe_environment(env)))
    assert described["name"] == name.removeprefix("gymnasium:") and described["num_envs"] == 3
    assert toml_values.rebuild_environment(described) == env


def test_a_users_environment_inside_vmap_env_is_code():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Long(envs.cartpole.CartPole):
        pass

    # Make `Long` importable, like a class at the top level of this file.
    Long.__qualname__, globals()["Long"] = "Long", Long
    described = toml_values.describe_environment(envs.VmapEnv(env=Long(), num_envs=2))
    assert described["class"] == "VmapEnv"
    with pytest.raises(UntrustedError, match=r"`environment.env.class = .*test_trust.*:Long\"`"):
        toml_values.rebuild_environment(described)
    assert toml_values.rebuild_environment(described, trust=True) == envs.VmapEnv(env=Long(), num_envs=2)


@pytest.mark.parametrize("name", [
    "os:system", "evil.py:x", "/tmp/evil.py:x", "evil_module:Id-v0", "gymnasium:evil_module:Id-v0", "gymnax:evil.py:x",
    "gymnax:", "envpool:a/b:c", "jax:CartPole-v1:x", "GymV21Environment-v0", "GymV26Environment-v0", "GymV26Environment",
    "Hopper-v2", "Registered-v0", "Wrapped-v0",
])  # fmt: skip
def test_environments_with_other_names_are_code(name):
    gymnasium.register("Registered-v0", "os:system")
    gymnasium.register("Wrapped-v0", "gymnasium.envs.classic_control:CartPoleEnv",
                       additional_wrappers=(gymnasium.wrappers.TimeAwareObservation.wrapper_spec(),))  # fmt: skip
    try:
        with pytest.raises(UntrustedError, match=f'`environment.name = "{name}"`'):
            toml_values.rebuild_environment({"name": name, "num_envs": 2})
    finally:
        del gymnasium.registry["Registered-v0"], gymnasium.registry["Wrapped-v0"]


def test_an_unknown_environment_is_not_code():
    for name in ("CartPol-v1", "gymnax:CartPol-v1", "CartPole-v99"):
        with pytest.raises(RunError, match=f"`environment` of this run is `{name}`, which no longer exists"):
            toml_values.rebuild_environment({"name": name, "num_envs": 2})


@pytest.mark.parametrize("argument, value", [
    ("xml_file", "ant"), ("base_path", "x"), ("map_name", "../x"), ("map_name", "~x"), ("map_name", "a\\b"), ("map_name", "x.xml"),
    ("map_name", "a:b"), ("x", {"name": "mlp"}), ("x", [{"class": "Layout"}]), ("x", {"dict": {"file_name": "x"}}),
])  # fmt: skip
def test_an_argument_that_is_not_plain_data_is_code(argument, value):
    with pytest.raises(UntrustedError, match=f"`environment.kwargs.{argument} = "):
        toml_values.rebuild_environment({"name": "CartPole-v1", "num_envs": 2, "kwargs": {argument: value}})


@pytest.mark.parametrize("data, message", [
    ({"name": ["CartPole-v1"], "num_envs": 2}, "`environment` of this run needs a `name`, which is a text"),
    ({"name": "CartPole-v1", "num_envs": 2, "kwargs": "x"}, "and `kwargs`, if given, must be a table"),
    ({"name": "CartPole-v1", "num_envs": "x"}, "`environment.num_envs = 'x'` of this run is not a number of environments"),
    ({"name": "CartPole-v1", "num_envs": True}, "is not a number of environments"),
    ({"name": "CartPole-v1", "num_envs": 2, "kwargs": {"num_envs": 3}}, "`environment.kwargs.num_envs` of this run is not an argument"),
    ({"name": "CartPole-v1", "num_envs": 2, "kwargs": {"env_id": "x"}}, "`environment.kwargs.env_id` of this run is not an argument"),
    ({"class": "VmapEnv", "fields": {"env": 3, "num_envs": 2}}, "`env` cannot be 3 in `VmapEnv`"),
])  # fmt: skip
def test_an_environment_of_the_wrong_form_is_refused(data, message):
    with pytest.raises(RunError, match=message):
        toml_values.rebuild_environment(data)


@pytest.mark.parametrize("data, message", [
    ({"class": "mlp"}, "`x.class` of this run is not a class"),
    ({"class": "ppo", "fields": []}, "`x.fields` is not a table"),
    ({"class": "ppoo"}, "`x.class` of this run is `ppoo`. There is no public name `ppoo`.\nDid you mean"),
    ({"class": "ppo", "fields": {"unrol": 3}}, "there is no `unrol` in `ppo`"),
    ({"class": "ppo", "fields": {"unroll": {"tuple": []}}}, r"`unroll` cannot be \(\) in `ppo`"),
    ({"class": "ppo", "fields": {"network": {"name": "optax.adam"}}}, "`network` cannot be <function adam.* in `ppo`"),
    ({"class": "ppo", "fields": {"network": {"name": "q_mlp"}}}, "`network` cannot be <function q_mlp.* in `ppo`"),
    ({"class": "ppo", "fields": {"optimizer": {"name": "mlp"}}}, "`optimizer` cannot be <function mlp.* in `ppo`"),
    ({"partial": {"name": "mlp"}, "args": [], "kwargs": {"hidden": "wide"}}, "`hidden` cannot be 'wide' in `mlp`"),
    ({"partial": {"name": "optax.adam"}, "args": [], "kwargs": {"b1": "x"}}, "`b1` cannot be 'x' in `optax.adam`"),
    ({"class": "Group", "fields": {"roles": "env"}}, "`roles` cannot be 'env' in `Group`"),
    ({"class": ["ppo"]}, "`x` of this run cannot be made again from its run.toml"),
    ({"unknown": "<lambda>"}, "it was <lambda>"),
])  # fmt: skip
def test_data_of_the_wrong_form_is_refused(data, message):
    with pytest.raises(RunError, match=message):
        toml_values.rebuild(data, at="x")


@pytest.mark.parametrize("data, entry", [
    ({"name": "os:system"}, 'x.name = "os:system"'),
    ({"class": "subprocess:Popen"}, 'x.class = "subprocess:Popen"'),
    ({"class": "choreo.algos.ppo:PPO"}, 'x.class = "choreo.algos.ppo:PPO"'),
    ({"partial": {"name": "os:system"}, "args": [], "kwargs": {}}, "x.partial = "),
    ({"partial": {"name": "mlp"}, "args": [1], "kwargs": {}}, "x.partial = "),
    ({"partial": {"name": "ppo"}, "args": [], "kwargs": {}}, "x.partial = "),
    ({"class": "ppo", "fields": {"network": {"name": "a:b"}}}, 'x.network.name = "a:b"'),
    ([{"tuple": [{"dict": {"y": {"name": "a:b"}}}]}], 'x[0][0].y.name = "a:b"'),
])  # fmt: skip
def test_code_is_refused_and_the_error_names_its_entry(data, entry):
    with pytest.raises(UntrustedError) as error:
        toml_values.rebuild(data, at="x")
    assert entry in str(error.value) and "--trust" in str(error.value)


# When code is run.


def write_run(folder: Path, *, algo: Any = None) -> Path:
    """Write the run.toml of a run that was never started. By default, its algorithm is the user's code. Returns the path."""
    options: dict[str, Any] = {"steps": 16, "seed": 0, "runtime": None, "eval_every": None, "eval_episodes": 1}
    algo, options = algo or resolve.algorithm(TINY), options | {"stop_at_return": None, "checkpoint_every": None}
    config = RunConfig(algo=algo, env=envs.make(CARTPOLE, 2), layout=choreo.fused(), **options)
    folder.mkdir(parents=True)
    RunFolder(folder).write_config(config.to_toml())
    return folder / "run.toml"


def test_a_run_of_this_account_needs_no_trust_but_a_copy_does(tmp_path, capsys):
    file = write_run(tmp_path / "mine")
    assert RunConfig.read(file).algo == resolve.algorithm(TINY)
    shutil.copytree(tmp_path / "mine", tmp_path / "theirs")
    theirs = tmp_path / "theirs" / "run.toml"
    with pytest.raises(UntrustedError) as error:
        RunConfig.read(theirs)
    assert str(error.value) == (
        f'The run names code, which was not run: `algorithm.class = "{TINY}"`.\n'
        f"  at  {theirs}\n"
        "This account did not write the file, or the file was changed or moved since. If you trust its author, add --trust "
        "(trust=True), which runs all of this code."
    )
    assert RunConfig.read(theirs, trust=True).algo == RunConfig.read(file).algo
    assert RunConfig.read(theirs, algo=Tiny()).algo == Tiny()
    file.write_bytes(file.read_bytes() + b"\n")  # a change that somebody else could have made
    with pytest.raises(UntrustedError):
        RunConfig.read(file)


@pytest.mark.parametrize("command", ["train", "graph", "check", "evaluate", "resume", "replay"])
def test_every_command_refuses_code_without_trust(tmp_path, capsys, command):
    write_run(tmp_path / "mine")
    shutil.copytree(tmp_path / "mine", tmp_path / "theirs")
    what = str(tmp_path / "theirs" / ("run.toml" if command in ("train", "graph", "check") else ""))
    assert main([command, what]) == 1
    err = capsys.readouterr().err
    assert err.startswith("UntrustedError: The run names code, which was not run: `algorithm.class")
    # With --trust, the command goes on, and stops at a later error.
    more = {"train": ["--steps", "0"], "graph": ["--layout", "corse"], "check": ["--iterations", "0"]}.get(command, [])
    assert main([command, what, "--trust", *more]) != 0
    err = capsys.readouterr().err
    assert "names code" not in err and any(words in err for words in ("0", "corse", "no checkpoint"))


def test_trust_without_a_run_toml_is_refused(capsys):
    assert main(["graph", "ppo", CARTPOLE, "--trust"]) == 2
    assert "--trust is only for a run.toml; code that you name yourself is always run." in capsys.readouterr().err


def test_only_a_run_with_code_is_put_on_the_list_of_own_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert RunConfig.read(write_run(tmp_path / "x", algo=choreo.PPO())).algo == choreo.PPO()
    assert not (tmp_path / "state").exists()
    write_run(tmp_path / "y")
    assert (tmp_path / "state" / "choreo" / "runs").read_text().endswith(f"  {tmp_path / 'y' / 'run.toml'}\n")


@pytest.mark.parametrize("old, new, message", [
    ('class = "Layout"', 'class = "Group"', "`layout` of this run cannot be made again: there is no `exact` in `Group`"),
    ('class = "ppo"', 'class = "Layout"', "gives `Layout` a hyper-parameter `learning_rate`, which it does not have"),
    ("seed = 0", "seed = 0\ninit_from = 3", r"`run.init_from` cannot be made again from"),
    ("seed = 0", 'seed = 0\ninit_from = {path = 3, params_hash = "0"}', "`path` and `params_hash` must be texts"),
    ("seed = 0", "seed = " + "9" * 5000, "is not valid TOML: Exceeds the limit"),
    ("seed = 0", "seed = 0\nx = " + "[" * 10**5 + "]" * 10**5, "is nested too deeply"),
    ('name = "fused"', 'name = "\\u001b[2J"', r'has characters that are not printable: "\\x1b\[2J"'),
    ('name = "fused"', '"\\u202e" = 3', r'has characters that are not printable: "\\u202e"'),
])  # fmt: skip
def test_a_run_toml_of_the_wrong_form_is_refused(tmp_path, old, new, message):
    file = tmp_path / "x" / "run.toml"
    write_run(tmp_path / "x", algo=choreo.PPO())
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(RunError, match=message):
        RunConfig.read(file)


@pytest.mark.parametrize(
    "data", [{"none": True}, {"tuple": [1]}, {"class": "Group", "fields": {"roles": ["env"]}}, {"name": "mlp"}]
)
@pytest.mark.parametrize("table", ["algorithm", "environment", "layout"])
def test_a_table_of_the_wrong_type_is_refused(tmp_path, table, data):
    config = tomllib.loads(write_run(tmp_path / "x", algo=choreo.PPO()).read_text())
    with pytest.raises(RunError, match=f"`{table}` in run.toml has the wrong type: "):
        RunConfig.from_toml(config | {table: data})


# The other files of a run folder.


ROW = {"iteration": 0, "env_steps": 8, "seconds": 0.5, "train_return": 1.0, "episodes": 1, "episode_return": None}


@pytest.mark.parametrize("line", [
    "3", "[]", "{}", json.dumps(ROW | {"loss": "x"}), json.dumps(ROW | {"loss": [1]}), json.dumps(ROW | {"iteration": 1.5}),
    json.dumps(ROW | {"env_steps": None}), json.dumps(ROW | {"loss": 10**400}), "[" * 10**5 + "]" * 10**5,
    json.dumps({name: value for name, value in ROW.items() if name != "seconds"}),
    json.dumps({name: value for name, value in ROW.items() if name != "train_return"}), '{"x": ' + "9" * 5000 + "}",
], ids=lambda line: line[:20])  # fmt: skip
def test_a_line_that_is_not_a_row_of_metrics_is_refused(tmp_path, line):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(f"{json.dumps(ROW)}\n{line}\n")
    with pytest.raises(RunError, match="Line 2 of .*metrics.jsonl is not a row of metrics: "):
        folder.read_metrics()


def test_text_with_control_characters_is_refused(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(json.dumps(ROW | {"\x1b[2J": 1.0}) + "\n")
    folder.log.write_text(json.dumps(["\x1b[2J", 1, 1]) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps({"params_hash": "\x1b[2J"}))
    for read in (folder.read_metrics, folder.read_log, folder.read_summary):
        with pytest.raises(RunError, match=r'has characters that are not printable: "\\x1b\[2J"'):
            read()


@pytest.mark.parametrize("line", ['["x", 1]', '["x", "1", 1]', "{}", "oops"])
def test_a_log_of_the_wrong_form_is_refused(tmp_path, line):
    RunFolder(tmp_path).log.write_text(f"{line}\n")
    with pytest.raises(RunError, match="Line 1 of .*reads.jsonl is not an entry of the log"):
        RunFolder(tmp_path).read_log()


@pytest.mark.parametrize("text", ["[]", "oops", '{"seconds": []}', '{"seconds": ' + "9" * 400 + "}"])
def test_a_summary_of_the_wrong_form_is_refused(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(RunError, match="summary.json is not the summary of a run"):
        RunFolder(tmp_path).read_summary()


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "run" / "sub").mkdir(parents=True)
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "victim")
    for use in (RunFolder(tmp_path / "run").open, RunFolder(tmp_path / "run").check_not_in_use):
        with pytest.raises(RunError, match="Refused to open .*.lock: it is a symbolic link"):
            use()
    assert not (tmp_path / "victim").exists()


def test_errors_escape_control_characters(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path / "\x1b[2J")]) == 1
    assert "\\x1b[2J does not exist" in capsys.readouterr().err
    error = RunError("a\x1bb\tc\nd\u202e\udc80", at="\x07", fix="\x9b")
    assert str(error) == "a\\x1bb\tc\nd\\u202e\\udc80\n  at  \\x07\n\\x9b"


def test_nothing_is_imported_from_the_current_folder(tmp_path):
    """With `-P`, the import path does not contain the current folder. The same is true for the installed script `choreo`."""
    write_run(tmp_path / "x")
    for name in ("numpy", "tiny", "evil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    command = [sys.executable, "-P", "-m", "choreo", "graph", "x/run.toml"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "learner" in ran.stdout, ran.stderr


@pytest.mark.parametrize("depth", [100, 400, 5000])
def test_a_run_toml_that_is_nested_too_deeply_is_refused(tmp_path, depth):
    """A deeply nested file could exceed the limit of Python's stack while it is parsed, or later."""
    file = tmp_path / "run.toml"
    head = '[run]\nsteps = 8\nseed = 0\neval_episodes = 1\n[environment]\nname = "jax:CartPole-v1"\nnum_envs = 2\n[layout]\n'
    file.write_text(
        f'{head}class = "Layout"\n[algorithm]\nclass = "ppo"\n[algorithm.fields]\nunroll = {"[" * depth}{"]" * depth}\n'
    )
    with pytest.raises(RunError):
        RunConfig.read(file)


def test_the_error_names_all_code_of_a_file(tmp_path):
    """A user who decides about --trust must see all the code that --trust would run."""
    file = write_run(tmp_path / "mine")
    data = tomllib.loads(file.read_text())
    data["algorithm"]["fields"]["squash"] = {"name": "other_module:f"}
    data["environment"] = {"name": "evil:Id-v0", "num_envs": 2, "kwargs": {"level_file": "x"}}
    file.write_text(tomli_w.dumps(data))
    with pytest.raises(UntrustedError) as error:
        RunConfig.read(file)
    for entry in ("environment.name", "environment.kwargs.level_file", "algorithm.class", "algorithm.squash.name"):
        assert f"`{entry} = " in str(error.value)


def test_resuming_a_strangers_run_does_not_make_it_trusted(tmp_path):
    write_run(tmp_path / "mine")
    shutil.copytree(tmp_path / "mine", tmp_path / "theirs")
    file = tmp_path / "theirs" / "run.toml"
    RunFolder(file.parent).write_config(RunConfig.read(file, trust=True).to_toml())  # as `resume --trust` does
    with pytest.raises(UntrustedError):
        RunConfig.read(file)


def test_the_name_of_a_layout_cannot_contain_a_new_line():
    with pytest.raises(
        LayoutError, match=r"The layout's name 'a\\nRunError: fake' has characters that are not printed"
    ):
        choreo.Layout(choreo.Group("learner"), name="a\nRunError: fake")


@pytest.mark.parametrize("kind", ["usetex", "pipe"])
def test_a_configuration_of_matplotlib_in_the_current_folder_is_ignored(tmp_path, kind):
    """A file `matplotlibrc` could start LaTeX, or be a pipe that blocks."""
    if kind == "pipe":
        os.mkfifo(tmp_path / "matplotlibrc")
    else:
        (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    code = "import choreo.runs.figures, matplotlib; print(matplotlib.rcParams['text.usetex'])"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("kwargs", "optimizer"),
    [
        ({"time_limit": "x"}, None),
        ({"time_limit": 10**40}, None),
        ({}, {"partial": {"name": "optax.adam"}, "args": [], "kwargs": {"learning_rate": 1.0}}),
        ({}, {"partial": {"name": "optax.adam"}, "args": [], "kwargs": {"mu_dtype": 1}}),
    ],
)
def test_values_that_an_environment_or_optimizer_cannot_take_are_refused(tmp_path, kwargs, optimizer):
    environment = {"name": CARTPOLE, "num_envs": 2} | ({"kwargs": kwargs} if kwargs else {})
    algorithm = {"class": "ppo", "fields": {"optimizer": optimizer} if optimizer else {}}
    run = {"steps": 8, "seed": 0, "eval_episodes": 1}
    file = tmp_path / "run.toml"
    file.write_text(
        tomli_w.dumps({"run": run, "environment": environment, "algorithm": algorithm, "layout": {"class": "Layout"}})
    )
    with pytest.raises(RunError, match="cannot be|do not fit"):
        RunConfig.read(file)
