"""`choreo check` chooses small sizes, prints a table, and exits with 1 if a result differs too much."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from choreo import envs
from choreo.algos import DQN, PPO
from choreo.cli import check
from choreo.cli.check import few_envs, small
from choreo.cli.main import main
from choreo.layouts import apex, coarse, fused, multi_learner
from choreo.testing.layouts import Deviation
from tiny import Tiny

TINY = f"{Path(__file__).parents[1] / 'tiny.py'}:Tiny"
CARTPOLE = "jax:CartPole-v1"


def test_a_correct_layout_passes(capsys):
    assert main(["check", TINY, CARTPOLE, "--layout", "coarse", "--workers", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        "Tiny on jax:CartPole-v1, 6 environments, unroll=8, 3 iterations: Layout(Group('env', 'actor', "
    )
    assert "jax.jit(iterate)" in out and out.endswith("changes nothing but time, as far as these iterations show.\n")
    assert err == ""


def test_a_check_with_python_environments_prints_json(capsys):
    assert main(["check", TINY, "CartPole-v1", "--layout", "fine", "--num-envs", "2", "--unroll", "4", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["ok"] and found["num_envs"] == 2 and found["unroll"] == 4 and found["iterations"] == 3
    names = {deviation["name"] for deviation in found["deviations"]}
    assert {"carry.train.weights", "carry.position.obs", "metrics['loss']", "metrics['episode_return']"} <= names
    assert {deviation["allowed"] for deviation in found["deviations"]} == {
        0.0
    }  # 0, because every site computes whole arrays


@pytest.fixture
def found(monkeypatch):
    """Two deviations, one of them not allowed. `choreo check` reports them without running the algorithm."""
    loss = Deviation(name="metrics['loss']", difference=0.5, allowed=0.0, reference="jax.jit(iterate)")
    found = [dataclasses.replace(loss, name="carry.train.weights", difference=0.0), loss]
    monkeypatch.setattr(check, "deviations", lambda *_, **__: found.copy())
    monkeypatch.setattr(check, "check_algorithm", lambda *_: None)
    return found


def test_a_deviation_is_printed_and_gives_exit_code_1(found, capsys):
    args = ["check", TINY, CARTPOLE, "--iterations", "2"]
    assert main(args) == 1
    out, err = capsys.readouterr()
    assert "metrics['loss']" in out and "1 other" in out and "nothing but time" not in out
    assert err == (
        "PartitionError: After 2 iterations in this layout, `metrics['loss']` differs by 5.0e-01 from jax.jit(iterate); "
        "the largest allowed difference is 0.\nPlease report this program: Choreo should have refused to make a wrong plan.\n"
    )
    assert main([*args, "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert not verdict["ok"] and verdict["worst"]["name"] == "metrics['loss']"


def test_a_fragment_that_is_wrongly_marked_independent_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vouched = Path(TINY.rpartition(":")[0]).read_text()
    vouched = vouched.replace('@choreo.fragment("actor")', '@choreo.fragment("actor", independent=True)')
    vouched = vouched.replace("logits = ", "obs = jnp.where(eqxi.unvmap_any(obs[0] > 0), obs, -obs)\n        logits = ")
    Path("mine.py").write_text("import equinox.internal as eqxi\n" + vouched)
    assert main(["check", "mine.py:Tiny", CARTPOLE, "--layout", "coarse"]) == 1
    assert capsys.readouterr().err == (
        "AlgorithmError: The fragment `act` is marked independent=True, but environments mix in it: with negative numbers in the "
        "other rows of the batch, the result for one environment changes.\nLeave out independent=True: Choreo then refuses the "
        "layouts in which the result would depend on how environments are divided.\n"
    )


def test_python_numbers_as_metrics_pass_and_a_forgotten_mark_gives_a_warning(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = Path(TINY.rpartition(":")[0]).read_text().replace('@choreo.fragment("learner")', "")
    Path("mine.py").write_text(text.replace('{"loss": value,', '{"loss": value, "unroll": self.unroll, "lr": 0.5,'))
    assert main(["check", "mine.py:Tiny", CARTPOLE, "--layout", "coarse"]) == 0
    out, err = capsys.readouterr()
    assert "nothing but time" in out and err.startswith(
        "Warning: No fragment has the role `learner`, for which coarse has"
    )


def test_an_algorithm_without_marks_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    marked = Path(TINY.rpartition(":")[0]).read_text()
    Path("mine.py").write_text(
        marked.replace('@choreo.fragment("actor")', "").replace('@choreo.fragment("learner")', "")
    )
    assert main(["check", "mine.py:Tiny", CARTPOLE]) == 1
    assert "No function called by `Tiny.iterate` carries a role." in capsys.readouterr().err


def test_train_suggests_check_for_an_algorithm_in_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ["train", TINY, CARTPOLE, "--steps", "64", "--unroll", "8", "--layout", "coarse", "--runtime", "inprocess"]
    assert main(args) == 0
    line = f"To test that the layout changes nothing but time: `choreo check {TINY} {CARTPOLE} --layout coarse`.\n"
    assert capsys.readouterr().err.endswith(line)


@pytest.mark.parametrize(
    ("layout", "num_envs"),
    [(fused(), 6), (coarse(2), 6), (coarse(4), 8), (coarse(2, exact=True), 8), (multi_learner(4), 8), (apex(3, 2), 12)],
)
def test_a_check_uses_few_environments_that_the_layout_can_divide(layout, num_envs):
    assert few_envs(Tiny(), layout) == num_envs
    layout.check_counts(num_envs)


def test_sizes_at_their_defaults_are_made_small():
    env = envs.make(CARTPOLE, 6)
    assert small(PPO(), env, fused(), 3) == PPO(unroll=8, minibatch_size=24, epochs=2, total_steps=144)
    assert small(PPO(unroll=12), env, fused(), 3).unroll == 12  # 12 is not the default, so the user chose it
    dqn = small(DQN(), env, apex(2, 1), 3)
    # One iteration stores enough steps to learn.
    assert dqn.unroll * env.num_envs >= dqn.min_size >= dqn.batch_size == 8
    assert dqn.capacity == 4 * dqn.min_size


@dataclass(frozen=True, kw_only=True)
class Particular(Tiny):
    """An algorithm that refuses short iterations."""

    unroll: int = 16

    def init(self, env, key):
        assert self.unroll >= 16
        return super().init(env, key)


def test_an_algorithm_that_refuses_small_sizes_keeps_its_defaults():
    assert small(Particular(), envs.make(CARTPOLE, 6), fused(), 3).unroll == 16
