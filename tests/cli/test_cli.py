"""The commands of `choreo`: output, exit codes and errors."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from choreo.cli import arguments
from choreo.cli.main import main
from choreo.layouts import ALIASES, PRESETS, Group, Layout, central, coarse, multi_learner, sebulba
from choreo.runs import checkpoint, resolve
from choreo.runs.config import RunConfig
from choreo.runs.folder import RunFolder
from choreo.runs.progress import progress_line
from choreo.runs.training import load
from choreo.runtime.compilation_cache import cache_folder

TINY = f"{Path(__file__).parents[1] / 'tiny.py'}:Tiny"
CARTPOLE = "jax:CartPole-v1"
TRAIN = ["train", TINY, CARTPOLE, "--total-steps", "1280"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fails(capsys, *args, code=2):
    """Run a command that must fail with exit code `code` and without a traceback. Returns its standard error."""
    assert main(list(args)) == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


# Training.


def test_with_json_stdout_has_only_one_line_and_everything_else_goes_to_stderr(capsys):
    assert main([*TRAIN, "--steps", "512", "--seed", "3", "--out", "x", "--json"]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    summary = json.loads(line)
    wanted = {"return", "train_return", "env_steps", "seconds", "steps_per_second", "compile_seconds", "params_hash"}
    assert wanted <= set(summary)
    assert summary["env_steps"] == 512
    assert "compiling" in err and "Tiny 100%  512 steps" in err and "return (greedy, 100 fresh episodes)" in err
    assert "choreo check" not in err
    run = load("x")
    assert run.config.seed == 3
    assert checkpoint.sha256(run.params) == summary["params_hash"]
    assert run.evaluate(episodes=100).mean == summary["return"]


def test_train_prints_a_table_and_makes_a_new_numbered_folder(capsys):
    for _ in range(2):
        assert main([*TRAIN, "--steps", "512", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "runs/tiny-CartPole-v1-0.2" in out and "steps per second" in out
    assert sorted(p.name for p in Path("runs").iterdir()) == ["tiny-CartPole-v1-0", "tiny-CartPole-v1-0.2"]


def test_hyper_parameters_are_the_fields_of_the_dataclass():
    options = ["--learning-rate", "0.25", "--unroll", "4", "--no-centred", "--num-envs", "4"]
    assert main([*TRAIN, "--steps", "2e1", "--out", "x", "--quiet", *options]) == 0
    run = load("x")
    assert (run.algo.learning_rate, run.algo.unroll, run.algo.centred) == (0.25, 4, False)
    assert run.env.num_envs == 4 and run.config.steps == 20


def test_evaluate_and_resume_give_the_same_results_as_train(capsys):
    assert main([*TRAIN, "--steps", "512", "--out", "x", "--quiet", "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert main(["evaluate", "x", "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["return"] == trained["return"] and evaluated["episodes"] == 100
    assert main(["evaluate", "x", "--episodes", "7"]) == 0
    assert re.match(r"Tiny  jax:CartPole-v1  return \d+\.\d ± \d+\.\d over 7 episodes", capsys.readouterr().out)
    assert main(["resume", "x", "--steps", "1_024", "--quiet", "--json"]) == 0
    resumed = json.loads(capsys.readouterr().out)
    assert main([*TRAIN, "--steps", "1024", "--out", "whole", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params_hash"] == resumed["params_hash"]


def test_overwrite_replaces_a_run_and_nothing_else(capsys):
    command = [*TRAIN, "--steps", "512", "--out", "x", "--quiet", "--overwrite"]
    assert main(command) == 0
    Path("x/tensorboard").mkdir()
    assert main(command) == 0
    assert not Path("x/tensorboard").exists()
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("mine")
    capsys.readouterr()
    err = fails(capsys, *TRAIN, "--out", "mine", "--overwrite", code=1)
    assert err.startswith("RunError: mine is not empty.") and Path("mine/thesis.tex").exists()


def test_ctrl_c_says_where_the_last_checkpoint_is_and_leaves_nothing_half_written(tmp_path):
    command = [sys.executable, "-m", "choreo", *TRAIN[:3], "--steps", "1e9", "--checkpoint-every", "64", "--out", "x"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        deadline = time.monotonic() + 120
        while not Path("x/checkpoint.safetensors").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.stderr and process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    done = checkpoint.iteration(Path("x/checkpoint.safetensors"))
    assert f"Interrupted. Last checkpoint: x/checkpoint.safetensors (iteration {done})." in err
    assert "Continue with `choreo resume x`." in err and "Traceback" not in err
    assert sorted(os.listdir("x")) == ["checkpoint.safetensors", "graph.svg", "metrics.jsonl", "run.toml"]
    assert len(load("x").rows) == done
    assert all(json.loads(line) for line in Path("x/metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_stdout_ends_the_command_quietly(unbuffered):
    """In `choreo --help | head -1`, stdout is closed when `head` has read one line."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "choreo", "--help"]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(writer, "wb") as closed_pipe:
        ran = subprocess.run(command, stdout=closed_pipe, stderr=subprocess.PIPE, env=env, check=False)
    assert ran.stderr == b"" and ran.returncode == 1


# Training from a run.toml.


def write_run_toml(folder, *, layout=None, **options):
    """Write the run.toml of a run that was never started. Returns the path of the file."""
    config = RunConfig(
        algo=resolve.algorithm_class(TINY)(learning_rate=0.25),
        env=resolve.environment(CARTPOLE, 4),
        layout=layout or coarse(workers=2),
        **({"steps": 100, "seed": 3, "runtime": "inprocess", "eval_episodes": 20} | OPTIONAL | options),
    )
    Path(folder).mkdir(parents=True)
    RunFolder(folder).write_config(config.to_toml())
    return f"{folder}/run.toml"


OPTIONAL: dict[str, Any] = {"eval_every": None, "stop_at_return": None, "checkpoint_every": None}


def test_training_from_a_run_toml_repeats_the_run(capsys):
    options = ["--eval-every", "2", "--eval-episodes", "3", "--seed", "7"]
    assert main([*TRAIN, "--steps", "256", "--out", "runs/x", "--quiet", "--json", *options]) == 0
    before = json.loads(capsys.readouterr().out)
    assert main(["train", "runs/x/run.toml", "--quiet", "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["path"] == "runs/tiny-CartPole-v1-7"
    assert after["params_hash"] == before["params_hash"] and after["return"] == before["return"]
    assert load(after["path"]).config == load("runs/x").config


def test_options_beside_a_run_toml_replace_those_of_the_file(capsys):
    file = write_run_toml("runs/x", stop_at_return=1e9, checkpoint_every=2)
    changes = ["--seed", "1", "--no-centred", "--unroll", "4", "--num-envs", "2", "--workers", "1", "--steps", "40"]
    assert main(["train", file, *changes, "--out", "y", "--quiet"]) == 0
    config = load("y").config
    assert (config.algo.learning_rate, config.algo.centred, config.algo.unroll) == (0.25, False, 4)
    assert (config.seed, config.steps, config.env.num_envs, config.layout) == (1, 40, 2, coarse(workers=1))
    assert (config.stop_at_return, config.checkpoint_every) == (1e9, 2)


def test_the_option_workers_changes_a_layout_of_a_run_toml_only_if_the_layout_is_a_preset(capsys):
    file = write_run_toml("runs/x", layout=coarse(workers=2, exact=True))
    assert main(["graph", file]) == 0
    assert "env+actor" in capsys.readouterr().out
    assert main(["graph", file, "--workers", "1"]) == 0
    one = capsys.readouterr().out
    assert (
        main(["graph", TINY, CARTPOLE, "--num-envs", "4", "--layout", "coarse", "--exact", "--learning-rate", "0.25"])
        == 0
    )
    assert capsys.readouterr().out == one
    own = write_run_toml("runs/own", layout=Layout(Group("env", replicas=2), Group("actor"), Group("learner")))
    err = fails(capsys, "graph", own, "--workers", "4")
    assert err.startswith("UsageError: --workers cannot change the layout of this run")
    assert "Layout `fused` takes no `workers`" in fails(capsys, "graph", file, "--layout", "fused", "--workers", "4")


@pytest.mark.parametrize(
    ("before", "options", "after"),
    [
        (coarse(2, exact=True), ["--no-exact"], coarse(2)),
        (coarse(2), ["--max-lag", "2"], coarse(2, max_lag=2)),
        (coarse(2, max_lag=2), ["--workers", "4", "--max-lag", "0"], coarse(4)),
        # The number of shards changes the results, so the option --workers keeps the number of shards.
        (multi_learner(4), ["--workers", "2"], multi_learner(2, shards=4)),
        (sebulba(2, 2), ["--learners", "1", "--shards", "4"], sebulba(2, 1, shards=4)),
        (central(2, max_lag=4, merge="any"), ["--merge", "all"], central(2, shards=1, max_lag=4)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.name,
)
def test_options_change_the_layout_of_a_run_toml(before, options, after):
    """Checks the layout that `train` would use, without training."""
    run_toml = write_run_toml("x", layout=before)
    parser = arguments.make_parser("graph", "")
    arguments.add_layout(parser, default=None)
    parser.add_argument("--num-envs")
    parsed, _, _ = arguments.parse_named(parser, [run_toml, *options])
    assert arguments.layout_of(parsed) == after


def test_the_help_of_a_run_toml_shows_its_hyper_parameters(capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", write_run_toml("runs/x"), "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "--learning-rate" in text and "default: 0.25" in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[run]", "[run", "x/run.toml is not valid TOML: Expected"),
        ("[environment]", "[env]", "x/run.toml has no table [environment].\nUse the run.toml of a run"),
        ("seed = 3", "sede = 3", "x/run.toml has an unknown option `sede` in [run].\nDid you mean `seed`?"),
        ("seed = 3", "", "x/run.toml has no `seed` in [run].\n"),
        ("seed = 3", 'seed = "3"', "x/run.toml says `seed = '3'` in [run], which must be of type int.\n"),
        ("seed = 3", "seed = true", "x/run.toml says `seed = True` in [run], which must be of type int.\n"),
        ("seed = 3", "seed = -3", "seed=-3 is not between 0 and 2**32 - 1.\n"),
        (
            "learning_rate = 0.25",
            "lerning_rate = 0.25",
            "x/run.toml gives `Tiny` a hyper-parameter `lerning_rate`, which it does not have.\nDid you mean `learning_rate`?",
        ),
        (
            "learning_rate = 0.25",
            'learning_rate = "fast"',
            "x/run.toml says `learning_rate = 'fast'` in [algorithm.fields], which must be of type float.\nCorrect it; the default of",
        ),
        (":Tiny", ":Tinny", "`algorithm` of this run is `"),
        (
            'name = "jax:CartPole-v1"',
            'nam = "jax:CartPole-v1"',
            "`environment` of this run needs a `name`, which is a text, and `kwargs`, if given, must be a table",
        ),
        ('name = "coarse"', "nam = 3", "`layout` of this run cannot be made again: there is no `nam` in `Layout`.\n"),
        (
            'class = "Layout"',
            'class = "Layuot"',
            "`layout.class` of this run is `Layuot`. There is no public name `Layuot`.\n",
        ),
    ],
)
def test_the_error_about_a_wrong_run_toml_names_the_entry(capsys, old, new, message):
    file = Path(write_run_toml("x"))
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    err = fails(capsys, "train", str(file), "--trust", code=1)
    assert err.startswith(f"RunError: {message}")
    assert os.listdir() == ["x"] and os.listdir("x") == ["run.toml"]


def test_a_run_toml_stands_for_an_algorithm_and_an_environment(capsys):
    file = write_run_toml("x")
    assert "`jax:Pendulum-v1` is one argument too many: x/run.toml already names" in fails(
        capsys, "train", file, "jax:Pendulum-v1"
    )
    assert fails(capsys, "train", "x", "--seed", "1") == (
        "UsageError: `x` is a run folder.\nName its file: choreo train x/run.toml\n"
    )
    assert "gone.toml cannot be read: No such file or directory" in fails(capsys, "train", "gone.toml", code=1)


# Starting from the weights of another run.


def test_init_from_begins_with_the_weights_of_another_run(capsys):
    assert main([*TRAIN, "--steps", "256", "--out", "first", "--quiet"]) == 0
    # With a learning rate of 0, a run ends with the weights that it began with.
    command = [*TRAIN, "--steps", "128", "--learning-rate", "0", "--init-from", "first", "--quiet", "--json"]
    capsys.readouterr()
    assert main([*command, "--out", "second"]) == 0
    begun = json.loads(capsys.readouterr().out)
    assert begun["params_hash"] == load("first").training_summary["params_hash"]
    # run.toml records --init-from, so training from the file begins with the same weights.
    assert main(["train", "second/run.toml", "--seed", "1", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params_hash"] == begun["params_hash"]
    err = fails(capsys, *TRAIN, "--init-from", "first", "--out", "first", "--overwrite")
    assert err == "UsageError: --overwrite would remove first, the run of --init-from.\nChoose another --out.\n"
    assert "gone does not exist" in fails(
        capsys, *TRAIN, "--init-from", "gone", "--out", "second", "--overwrite", code=1
    )
    assert Path("first/run.toml").exists() and Path("second/run.toml").exists()


# Graphs, lists and help.


def test_graph_prints_fragments_or_draws_a_plan(capsys):
    assert main(["graph", TINY, CARTPOLE]) == 0
    fragments = capsys.readouterr().out
    assert "learn" in fragments
    assert main(["graph", TINY, CARTPOLE, "--layout", "coarse", "--workers", "2", "-o", "plan.svg"]) == 0
    assert capsys.readouterr().out == "Wrote plan.svg.\n"
    assert "<svg" in Path("plan.svg").read_text()
    assert main(["graph", TINY, CARTPOLE, "--layout", "coarse", "--workers", "2", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert costs["plan"].startswith("Tiny on jax:CartPole-v1, 8 environments: Layout(")
    assert [step["replicas"] for step in costs["iterate"]["steps"]] == [2, 1]
    assert costs["iterate"]["nbytes"] == sum(each["total_nbytes"] for each in costs["iterate"]["crossings"]) > 0
    assert "--json needs --layout." in fails(capsys, "graph", TINY, CARTPOLE, "--json")
    both = ("--layout", "coarse", "--json", "-o", "plan.svg")
    assert "--json prints, and -o writes a picture." in fails(capsys, "graph", TINY, CARTPOLE, *both)
    err = fails(capsys, "graph", TINY, CARTPOLE, "--workers", "2")
    assert err == "UsageError: --workers needs --layout.\nAdd --layout coarse.\n"
    assert "--max-lag needs --layout." in fails(capsys, "graph", TINY, CARTPOLE, "--max-lag", "2")
    assert "There is no folder gone" in fails(capsys, "graph", TINY, CARTPOLE, "-o", "gone/x.svg")


@pytest.mark.parametrize(("kind", "name"), [("algos", "ppo"), ("envs", "jax:CartPole-v1"), ("layouts", "fused")])
def test_list_prints_the_known_names(capsys, kind, name):
    assert main(["list", kind]) == 0
    assert any(line.split()[0] == name for line in capsys.readouterr().out.splitlines())


def test_list_layouts_names_the_systems_that_use_each_layout(capsys):
    assert main(["list", "layouts"]) == 0
    presets, others = capsys.readouterr().out.split("\n\nother names:\n")
    lines = {line.split()[0]: line for line in presets.splitlines()}
    assert set(lines) == set(PRESETS)
    stands_for = {
        "fused": ("Anakin", "PureJaxRL", "WarpDrive", "MSRL GPUOnly"),
        "coarse": ("Acme", "IMPALA", "MSRL SingleLearnerCoarse"),
        "fine": ("SEED RL", "MSRL SingleLearnerFine"),
        "multi_learner": ("data parallel", "DD-PPO", "MSRL MultiLearner"),
        "sebulba": ("Sebulba", "Cleanba"),
        "central": ("parameter server", "A3C", "MSRL Central"),
        "per_agent": ("MAPPO", "MSRL Environments"),
    }
    assert all(system in lines[name] for name, systems in stands_for.items() for system in systems)
    assert all(alias in others for alias in ALIASES)
    assert re.search(r"^seed_rl, single_learner_fine +fine$", others, re.MULTILINE)
    assert re.search(r"^a3c +central --merge any", others, re.MULTILINE)
    assert max(map(len, presets.splitlines())) <= 130


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (["--layout", "multi_learner", "--workers", "2", "--shards", "4"], "shards=4)"),
        (["--layout", "sebulba", "--workers", "4", "--learners", "2", "--max-lag", "1"], "shards=4, max_lag=1)"),
        (["--layout", "anakin", "--devices", "2"], "devices=2), shards=2)"),
        (["--layout", "seed-rl", "--workers", "2", "--exact"], "exact=True)"),
        (["--layout", "a3c", "--workers", "2"], "max_lag=4, merge='any')"),
    ],
)
def test_options_are_passed_to_the_layout(capsys, options, layout):
    assert main(["graph", "a2c", CARTPOLE, "--num-envs", "8", *options]) == 0
    assert layout in " ".join(capsys.readouterr().out.split())


def test_every_command_has_help(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    commands = ("train", "graph", "evaluate", "resume", "replay", "compare", "list")
    assert all(f"choreo {command} " in text for command in commands)
    assert main([]) == 2
    for command in commands:
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        assert f"choreo {command}" in capsys.readouterr().out


def test_the_help_of_an_algorithm_shows_the_docstrings_of_its_fields(capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", TINY, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "--stop-at-return" in text
    assert "--learning-rate" in text and "Step size of the gradient ascent." in text
    with pytest.raises(SystemExit):
        main(["train", "ppo", "--help"])
    assert "--gae-lambda" in capsys.readouterr().out


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"choreo \d+\.\d+.*\n", capsys.readouterr().out)


def test_the_progress_line_fits_a_terminal():
    row = {
        "env_steps": 184_320,
        "train_return": 318.24,
        "eval_return": 401.5,
        "policy_loss": 0.04129,
        "value_loss": 7.0,
    }
    line = progress_line("PPO", row, total_steps=300_000, steps_per_second=211_000.0)
    assert line == "PPO  61%  184k steps  211k steps/s  return 318  eval 402  loss 0.0413  0:00 left"
    assert len(line) <= 80
    early = {"env_steps": 128, "train_return": float("nan")}
    assert progress_line("PPO", early, total_steps=1280, steps_per_second=1.0) == (
        "PPO  10%  128 steps  1 steps/s  19:12 left"
    )


def test_environment_variables_choose_the_folder_of_compiled_programs(monkeypatch):
    monkeypatch.setenv("CHOREO_CACHE", "off")
    assert cache_folder() is None
    monkeypatch.setenv("CHOREO_CACHE", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    monkeypatch.delenv("CHOREO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/choreo/jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/choreo/jax"


# Wrong commands.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "UsageError: There is no command `trian`.\nDid you mean `train`?\n"),
        (["train", "pqo", CARTPOLE], "UnknownNameError: There is no algorithm `pqo`.\nDid you mean `ppo`?"),
        (["train", "ppo", "jax:Cartpole"], "UnknownNameError: There is no environment `jax:Cartpole`.\nDid you mean"),
        ([*TRAIN, "--layout", "corse"], "UnknownNameError: There is no layout `corse`.\nDid you mean `coarse`?"),
        (
            [*TRAIN, "--workers", "2"],
            "LayoutError: Layout `fused` takes no `workers`.\nLayouts that take it: coarse, fine",
        ),
        (
            [*TRAIN, "--layout", "fine", "--max-lag", "2"],
            "LayoutError: Layout `fine` takes no `max_lag`.\nLayouts that take it: coarse, sebulba, central, apex.\n",
        ),
        ([*TRAIN, "--layout", "coarse", "--merge", "some"], "LayoutError: merge='some' is not known.\nUse "),
        (
            [*TRAIN, "--layout", "gone.py:two_stage"],
            "UnknownNameError: There is no file `gone.py` for `gone.py:two_stage`.\nGive a path relative to this folder.\n",
        ),
        (
            ["train", "dqn", CARTPOLE, "--layout", "apex", "--buffers", "2"],
            "LayoutError: 1 buffer shard cannot be divided equally among 2 replicas of `buffer`.",
        ),
        (["check", "ppo"], "UsageError: `choreo check` needs an algorithm and an environment, in this order"),
        (
            ["check", TINY, CARTPOLE, "--iterations", "0"],
            "UsageError: --iterations 0 compares nothing.\nGive 1 or more.",
        ),
        (
            ["check", TINY, CARTPOLE, "--tolerance", "-1"],
            "UsageError: --tolerance -1.0 is neither 0 nor positive.\nGive 0 to require",
        ),
        (
            ["check", TINY, CARTPOLE, "--layout", "coarse", "--workers", "4", "--num-envs", "6"],
            "LayoutError: 6 environ",
        ),
        ([*TRAIN, "--runtime", "rai"], "UnknownNameError: There is no runtime `rai`.\nKnown: inprocess, local."),
        ([*TRAIN, "--step", "5"], "UsageError: There is no option `--step`.\nDid you mean `--steps`"),
        (
            [*TRAIN, "--lerning-rate", "5"],
            "UsageError: There is no option `--lerning-rate`.\nDid you mean `--learning-rate`",
        ),
        (
            [*TRAIN, "--steps", "many"],
            "UsageError: Argument --steps: `many` is not a whole number.\nSee `choreo train --help`.\n",
        ),
        ([*TRAIN, "--steps"], "UsageError: Argument --steps: expected one argument.\n"),
        (
            ["train", "--steps", "5", "ppo", CARTPOLE],
            "UsageError: `choreo train` needs an algorithm and an environment",
        ),
        (["train", "ppo"], "UsageError: `choreo train` needs an algorithm and an environment, in this order"),
        (["evaluate", "x", "--episode", "5"], "UsageError: There is no option `--episode`.\nDid you mean `--episodes`"),
        (["evaluate"], "UsageError: The following arguments are required: run.\n"),
        (["list", "environments"], "UsageError: Argument kind: invalid choice: 'environments'"),
    ],
)
def test_a_wrong_command_prints_two_lines_and_exits_with_2(capsys, args, message):
    err = fails(capsys, *args)
    assert err.startswith(message)
    assert len(err.splitlines()) == 2
    assert os.listdir() == []


def test_a_command_that_fails_exits_with_1(capsys):
    Path("file").write_text("mine")
    err = fails(capsys, *TRAIN, "--out", "file", code=1)
    assert err == "RunError: file is a file; a run needs a folder.\nChoose another --out, or remove the file.\n"
    assert "gone does not exist" in fails(capsys, "evaluate", "gone", code=1)
    assert "gone does not exist" in fails(capsys, "resume", "gone", code=1)
    assert main([*TRAIN, "--nan-at", "1", "--steps", "512", "--quiet", "--out", "x"]) == 1
    assert "DivergedError: The run diverged: `loss` is nan at iteration 1 of 4." in capsys.readouterr().err


def test_choreo_traceback_shows_the_traceback(monkeypatch):
    from choreo.errors import UnknownNameError

    monkeypatch.setenv("CHOREO_TRACEBACK", "1")
    with pytest.raises(UnknownNameError):
        main(["train", "pqo", CARTPOLE])


def test_an_error_in_the_users_code_keeps_its_traceback():
    Path("broken.py").write_text("from dataclasses import dataclass\n\nclass MyPPO:\n    unroll = 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        main(["train", "broken.py:MyPPO", CARTPOLE])
