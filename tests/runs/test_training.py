import dataclasses
import math
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo import envs, loops
from choreo.errors import AlgorithmError, ChoreoError, DivergedError, EnvError, LayoutError, RunError, UnknownNameError
from choreo.layouts import coarse, fused
from choreo.runs import checkpoint, resolve, toml_values
from choreo.runs.algorithm_checks import RESERVED
from choreo.runs.config import RunConfig
from choreo.runs.episode_returns import EpisodeReturns
from choreo.runs.folder import RunFolder
from choreo.runs.run import Run, Timing
from choreo.runs.training import load, resume, train

TINY = f"{Path(__file__).parents[1] / 'tiny.py'}:Tiny"
Tiny = resolve.algorithm_class(TINY)
CARTPOLE = "jax:CartPole-v1"
PER_ITERATION = 16 * 8


def run_tiny(iterations=6, *, fields=None, **options):
    # `total_steps` is the same for runs of all lengths, so that all these runs share one compiled program.
    return train(
        Tiny(**({"total_steps": 10 * PER_ITERATION} | (fields or {}))),
        CARTPOLE,
        steps=iterations * PER_ITERATION,
        **options,
    )


def make_config(**fields):
    options = {"layout": None, "steps": 1, "seed": 0, "runtime": "inprocess", "eval_every": None, "eval_episodes": 1}
    return RunConfig(**(options | {"stop_at_return": None, "checkpoint_every": None} | fields))


def without_seconds(rows):
    # NaN becomes None, because NaN is not equal to itself.
    return [{k: None if v != v else v for k, v in row.items() if k != "seconds"} for row in rows]


@dataclass(frozen=True, kw_only=True)
class Untouchable:
    """An algorithm that fails when it is traced. Tests use it to show that an error is raised before tracing."""

    unroll: int = 4

    def init(self, env, key):
        raise AssertionError("traced")

    def iterate(self, env, carry, key): ...
    def policy(self, train): ...
    def act(self, params, obs, key, *, greedy=False): ...


# One run.


def test_a_run_has_metrics_parameters_and_a_summary():
    run = run_tiny(5)
    assert run.metrics["iteration"].tolist() == [0, 1, 2, 3, 4]
    assert run.metrics["env_steps"].tolist() == [128, 256, 384, 512, 640]
    assert np.isfinite(run.metrics["loss"]).all()
    assert run.params.shape == (4, 2)
    assert run.path is None and run.env.num_envs == 8
    summary = run.summary
    assert summary["env_steps"] == 640
    assert summary["return"] == run.evaluate(episodes=100).mean
    assert summary["train_return"] == run.train_return
    assert summary["params_hash"] == checkpoint.sha256(run.params)
    assert summary["compile_seconds"] < summary["seconds"]
    assert summary["steps_per_second"] > 0


def test_training_raises_the_return():
    run = run_tiny(400, fields={"learning_rate": 0.1, "total_steps": None})
    assert run.train_return > 2 * np.nanmean(run.metrics["episode_return"][:10])


def test_steps_are_rounded_up_to_whole_iterations():
    run = train(Tiny(total_steps=10 * PER_ITERATION), CARTPOLE, steps=2 * PER_ITERATION + 1)
    assert len(run.rows) == 3
    assert run.algo.total_steps == 10 * PER_ITERATION


def test_equal_seeds_give_equal_runs():
    one, again, other = (run_tiny(2, seed=seed) for seed in (0, 0, 1))
    one_hash, again_hash, other_hash = (run.training_summary["params_hash"] for run in (one, again, other))
    assert one_hash == again_hash != other_hash
    assert one.summary["return"] == again.summary["return"]


def test_evaluations_and_checkpoints_do_not_change_the_parameters():
    plain = run_tiny(6)
    busy = run_tiny(6, eval_every=2, eval_episodes=3, checkpoint_every=3)
    assert plain.training_summary["params_hash"] == busy.training_summary["params_hash"]
    measured = np.isfinite(busy.metrics["eval_return"])
    assert measured.tolist() == [False, True, False, True, False, True]


def test_a_run_ends_at_the_first_boundary_that_has_reached_stop_at_return():
    assert len(run_tiny(6, eval_every=2, eval_episodes=5, stop_at_return=1.0).rows) == 2
    assert len(run_tiny(6, eval_every=2, eval_episodes=5, stop_at_return=1e9).rows) == 6
    # Without evaluations, the mean return of the training episodes decides.
    assert len(run_tiny(6, checkpoint_every=3, stop_at_return=1.0).rows) == 3


def test_on_iteration_sees_every_iteration_and_may_end_the_run():
    seen = []

    def watch(iteration, metrics):
        seen.append((iteration, metrics["loss"]))
        return iteration == 2

    run = run_tiny(6, on_iteration=watch, checkpoint_every=2)
    assert [i for i, _ in seen] == [0, 1, 2, 3]  # the run ends at the next boundary, which is after four iterations
    assert [loss for _, loss in seen] == run.metrics["loss"].tolist()


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.integers(1, 5000), st.sampled_from([1, 8, 512]), st.none() | st.integers(1, 60), st.none() | st.integers(1, 60)
)
def test_every_evaluation_and_checkpoint_is_at_a_boundary(iterations, num_envs, eval_every, checkpoint_every):
    config = make_config(
        algo=Tiny(),
        env=resolve.environment(CARTPOLE, num_envs),
        steps=iterations * 16 * num_envs,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
    )
    boundaries = [0]
    while boundaries[-1] < iterations:
        boundaries.append(config.next_boundary(boundaries[-1]))
    assert boundaries[-1] == iterations
    for every in (eval_every, config.checkpoint_period):
        assert set(range(every or iterations, iterations, every or iterations)) <= set(boundaries)
    # A chunk that is longer than all earlier chunks needs a new compilation. So all chunks except the last have the same length.
    lengths = np.diff(boundaries)
    assert len(set(lengths[:-1])) <= 1


def test_train_return_is_the_mean_of_the_last_hundred_episodes():
    returns = EpisodeReturns([])
    assert math.isnan(returns.add({"episodes": 0.0, "episode_return": math.nan}))
    assert returns.add({"episodes": 60.0, "episode_return": 1.0}) == 1.0
    assert (
        returns.add({"episodes": 60.0, "episode_return": 2.0}) == 1.5
    )  # the last row alone has fewer than 100 episodes
    assert (
        returns.add({"episodes": 40.0, "episode_return": 4.0}) == (60 * 2 + 40 * 4) / 100
    )  # the last two rows have 100 episodes
    assert returns.add({"episodes": 0.0, "episode_return": math.nan}) == (60 * 2 + 40 * 4) / 100
    assert returns.add({"episodes": 500.0, "episode_return": 7.0}) == 7.0


# The run folder.


def test_a_run_folder_has_exactly_the_files_of_a_run(tmp_path):
    out = tmp_path / "runs" / "x"
    out.mkdir(parents=True)  # an empty folder is accepted
    run = run_tiny(4, out=out)
    files = ["checkpoint.safetensors", "curve.png", "graph.svg", "metrics.jsonl", "run.toml", "summary.json"]
    assert sorted(p.name for p in out.iterdir()) == files
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "graph.svg").read_text()
    assert without_seconds(RunFolder(out).read_metrics()) == without_seconds(run.rows)


def test_a_loaded_run_equals_the_run_that_was_trained(tmp_path):
    run = run_tiny(4, out=tmp_path / "x")
    loaded = load(tmp_path / "x")
    assert loaded.algo == run.algo and loaded.env == run.env
    assert loaded.config == run.config
    assert loaded.training_summary == run.training_summary
    np.testing.assert_array_equal(loaded.evaluate(episodes=7).returns, run.evaluate(episodes=7).returns)
    obs = np.array([0.1, -0.2, 0.3, 0.4], np.float32)
    assert loaded.act(obs) == np.argmax(np.tanh(obs) @ np.asarray(run.params))


def test_act_takes_one_observation_and_needs_a_key_to_sample(tmp_path):
    run = run_tiny(1)
    with pytest.raises(EnvError, match=re.escape("An observation of jax:CartPole-v1 has shape [4], not [8, 4].")):
        run.act(np.zeros((8, 4)))
    with pytest.raises(RunError, match="samples an action, and needs a key"):
        run.act(np.zeros(4), greedy=False)
    sampled = {int(run.act(np.zeros(4), greedy=False, key=jax.random.key(i))) for i in range(20)}
    assert sampled == {0, 1}


def test_act_with_a_recurrent_network_returns_the_next_recurrent_state():
    from choreo import networks
    from choreo.algos import PPO

    algo, env = PPO(network=networks.lstm), resolve.environment(CARTPOLE)
    config = make_config(algo=algo, env=env)
    carry = jax.jit(lambda key: algo.init(env, key))(config.key)
    run = Run(config=config, train_state=carry.train, rows=[], timing=Timing(), path=None)
    obs = np.full(4, 0.1, np.float32)
    action, memory = run.act(obs)
    assert action.shape == ()
    _, later = run.act(obs, memory)
    assert jax.tree.structure(later) == jax.tree.structure(memory)
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), memory, later)))


def test_an_out_folder_that_cannot_be_used_is_refused_before_anything_is_traced(tmp_path):
    file, full, old, below = tmp_path / "file", tmp_path / "full", tmp_path / "old", tmp_path / "file" / "x"
    file.write_text("mine")
    full.mkdir()
    (full / "thesis.tex").write_text("mine")
    run_tiny(1, out=old)
    for place, message, fix in [
        (file, f"{file} is a file; a run needs a folder.", "Choose another --out, or remove the file."),
        (below, f"{below} cannot be made: {file} is a file.", "Choose another --out."),
        (full, f"{full} is not empty.", "Choose another --out, or empty it."),
        (old, f"{old} is not empty.", f"Continue it with `choreo resume {old}`"),
    ]:
        with pytest.raises(RunError, match=re.escape(message)) as error:
            train(Untouchable(), CARTPOLE, steps=100, out=place)
        assert fix in str(error.value)
    assert file.read_text() == "mine" and (full / "thesis.tex").read_text() == "mine"


def test_a_folder_that_a_run_is_writing_to_is_refused(tmp_path):
    def interfere(iteration, metrics):
        with pytest.raises(RunError, match="Another process is writing a run into"):
            train(Untouchable(), CARTPOLE, steps=100, out=tmp_path / "x")
        with pytest.raises(RunError, match="Another process is writing a run into"):
            resume(tmp_path / "x")

    run_tiny(2, out=tmp_path / "x", checkpoint_every=1, on_iteration=lambda i, m: interfere(i, m) if i == 1 else None)


def test_a_run_that_fails_while_it_is_traced_leaves_no_folder(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Broken(Tiny):
        def iterate(self, env, carry, key):
            raise ZeroDivisionError("my bug")

    with pytest.raises(ZeroDivisionError, match="my bug"):
        train(Broken(), CARTPOLE, steps=100, out=tmp_path / "runs" / "x")
    assert list(tmp_path.iterdir()) == []


def test_an_algorithm_with_a_lambda_among_its_fields_must_be_passed_to_load(tmp_path):
    algo = Tiny(squash=lambda obs: obs)
    run = train(algo, CARTPOLE, steps=1, out=tmp_path / "x")
    with pytest.raises(RunError, match="`algorithm.squash` of this run cannot be made again") as error:
        load(tmp_path / "x")
    assert "choreo.load(path, algo=...)" in str(error.value)
    loaded = load(tmp_path / "x", algo=algo)
    assert loaded.training_summary["params_hash"] == run.training_summary["params_hash"]


def test_folders_that_are_not_runs_are_refused(tmp_path):
    with pytest.raises(RunError, match="gone does not exist"):
        load(tmp_path / "gone")
    with pytest.raises(RunError, match="is not a run folder: it has no run.toml"):
        load(tmp_path)
    (tmp_path / "run.toml").write_text("not = = toml")
    with pytest.raises(RunError, match="is not valid TOML"):
        load(tmp_path)


# Interrupted and resumed runs.


def interrupt_at(iteration):
    def on_iteration(i, metrics):
        if i == iteration:
            raise KeyboardInterrupt

    return on_iteration


def test_a_resumed_run_equals_the_uninterrupted_run(tmp_path):
    whole = run_tiny(7, out=tmp_path / "whole", checkpoint_every=2, eval_every=2, eval_episodes=3)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(7, out=tmp_path / "x", checkpoint_every=2, eval_every=2, eval_episodes=3, on_iteration=interrupt_at(5))
    assert checkpoint.iteration(tmp_path / "x" / "checkpoint.safetensors") == 4
    assert len(RunFolder(tmp_path / "x").read_metrics()) == 6  # four rows before the checkpoint, and two after it
    assert len(load(tmp_path / "x").rows) == 4
    resumed = resume(tmp_path / "x")
    assert resumed.training_summary["params_hash"] == whole.training_summary["params_hash"]
    assert without_seconds(resumed.rows) == without_seconds(whole.rows)
    assert without_seconds(RunFolder(tmp_path / "x").read_metrics()) == without_seconds(whole.rows)
    file = "checkpoint.safetensors"
    assert (tmp_path / "x" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_finished_run_can_be_resumed_to_more_steps(tmp_path):
    whole = run_tiny(6)
    run_tiny(4, out=tmp_path / "x")
    with pytest.raises(RunError, match="x is finished: 4 iterations, 512 steps") as error:
        resume(tmp_path / "x")
    assert "--steps 1024" in str(error.value)
    longer = resume(tmp_path / "x", steps=6 * PER_ITERATION)
    assert longer.training_summary["params_hash"] == whole.training_summary["params_hash"]
    assert load(tmp_path / "x").config.steps == 6 * PER_ITERATION


def test_the_default_horizon_is_the_number_of_steps_of_the_run_also_after_resume(tmp_path):
    run = train(Tiny(), CARTPOLE, steps=3 * PER_ITERATION + 1, out=tmp_path / "x")
    assert run.algo.total_steps == 4 * PER_ITERATION  # rounded up to whole iterations
    longer = resume(tmp_path / "x", steps=8 * PER_ITERATION)
    np.testing.assert_allclose(longer.metrics["rate"][4], 0.1 * (1 - 4 / 8), rtol=1e-6)


def test_an_incomplete_last_line_of_metrics_is_ignored(tmp_path):
    run_tiny(3, out=tmp_path / "x")
    with open(tmp_path / "x" / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 3, "los')
    assert len(load(tmp_path / "x").rows) == 3


def test_a_run_with_several_sites_cannot_be_resumed(tmp_path):
    run_tiny(2, out=tmp_path / "x", layout="coarse", runtime="inprocess")
    with pytest.raises(RunError, match="This run has 2 sites; only runs with one site can be resumed") as error:
        resume(tmp_path / "x", steps=1000)
    assert "--layout fused" in str(error.value)


# Runs that end with an error.


def test_a_loss_that_is_not_finite_stops_the_run_at_the_next_boundary(tmp_path):
    with pytest.raises(DivergedError, match=re.escape("`loss` is nan at iteration 5 of 8")) as error:
        run_tiny(8, fields={"nan_at": 5}, out=tmp_path / "x", checkpoint_every=2)
    assert f"last checkpoint  {tmp_path / 'x' / 'checkpoint.safetensors'} (iteration 4)" in str(error.value)
    assert "Lower the learning rate" in str(error.value)
    assert checkpoint.iteration(tmp_path / "x" / "checkpoint.safetensors") == 4
    assert np.isfinite(load(tmp_path / "x").params).all()
    assert len(RunFolder(tmp_path / "x").read_metrics()) == 6  # the last row is the one with NaN


def test_a_return_is_nan_if_no_episode_has_ended():
    run = train(Tiny(unroll=1), CARTPOLE, steps=8)
    assert np.isnan(run.metrics["episode_return"]).all() and math.isnan(run.train_return)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"algo": "pqo"}, UnknownNameError, "There is no algorithm `pqo`.\nDid you mean `ppo`?"),
        (
            {"env": "jax:CartPol-v1"},
            UnknownNameError,
            "no environment `jax:CartPol-v1`.\nDid you mean `jax:CartPole-v1`",
        ),
        ({"layout": "corse"}, UnknownNameError, "There is no layout `corse`.\nDid you mean `coarse`?"),
        ({"runtime": "inproces"}, UnknownNameError, "There is no runtime `inproces`.\nDid you mean `inprocess`?"),
        ({"algo": "gone.py:MyPPO"}, UnknownNameError, "There is no file `gone.py`"),
        ({"algo": "no_such_module:MyPPO"}, UnknownNameError, "There is no module `no_such_module`"),
        ({"algo": TINY.replace(":Tiny", ":Tinny")}, UnknownNameError, "`Tinny`.\nDid you mean `Tiny`"),
        ({"algo": f"{__file__}:run_tiny"}, AlgorithmError, "is not an algorithm, but a function"),
        ({"steps": 0}, RunError, "A run of 0 steps does nothing."),
        ({"seed": -1}, RunError, "seed=-1 is not between 0 and 2**32 - 1."),
        ({"eval_every": 0}, RunError, "eval_every=0 must be at least 1."),
        ({"loggers": ["tensorbord"], "out": "x"}, UnknownNameError, "Did you mean `tensorboard`?"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_traced(tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    arguments = {"algo": Untouchable(), "env": CARTPOLE, "steps": 100} | options
    with pytest.raises(error, match=re.escape(message)):
        train(arguments.pop("algo"), arguments.pop("env"), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_a_layout_does_not_take_is_refused():
    with pytest.raises(LayoutError, match="Layout `fused` takes no `workers`.\nLayouts that take it: coarse, fine"):
        resolve.layout("fused", workers=2)


@pytest.mark.parametrize("part", ["unroll", "init", "iterate", "policy", "act"])
def test_the_error_names_the_part_that_an_algorithm_lacks(part):
    parts = {"unroll": 4, **{name: lambda self: None for name in ("init", "iterate", "policy", "act")}}
    del parts[part]
    lacking = dataclass(frozen=True)(type("Lacking", (), parts))
    with pytest.raises(AlgorithmError, match=f"`Lacking` lacks `{part}`.\nAdd "):
        train(lacking(), CARTPOLE, steps=1)


def test_a_minibatch_size_that_does_not_divide_the_batch_is_refused_before_a_folder_is_made(tmp_path):
    from choreo.algos import PPO

    with pytest.raises(ChoreoError, match="minibatch_size=100 does not divide the 1024 steps"):
        train(PPO(minibatch_size=100), CARTPOLE, steps=1, out=tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_carry_without_train_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Bare(Tiny):
        def init(self, env, key):
            return tuple(super().init(env, key))

    with pytest.raises(AlgorithmError, match="`Bare.init` returns a tuple without `train`"):
        train(Bare(), CARTPOLE, steps=1)


@pytest.mark.parametrize(("given", "missing"), [("episodes", "episode_return"), ("episode_return", "episodes")])
def test_half_of_the_episode_metrics_is_refused(given, missing):
    algo = with_metrics(lambda metrics: {given: jnp.ones(())})
    with pytest.raises(AlgorithmError) as error:
        train(algo, CARTPOLE, steps=1)
    assert str(error.value) == (
        f"`Measured.iterate` returns a metric `{given}`, but no metric `{missing}`.\nReturn both or neither. choreo.rollout "
        "returns the metrics of episodes; see also docs/your-own-algorithm.md."
    )


def test_a_metric_that_is_an_array_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class ArrayLoss(Tiny):
        def iterate(self, env, carry, key):
            carry, metrics = super().iterate(env, carry, key)
            return carry, metrics | {"loss": metrics["loss"] * jax.numpy.ones(3)}

    with pytest.raises(AlgorithmError, match=re.escape("The metric `loss` of `ArrayLoss` has shape [3].")):
        train(ArrayLoss(), CARTPOLE, steps=1)


def with_metrics(make):
    """An algorithm like Tiny, but with other metrics: `make` takes the metrics of Tiny and returns the new metrics."""

    @dataclass(frozen=True, kw_only=True)
    class Measured(Tiny):
        def iterate(self, env, carry, key):
            carry, metrics = super().iterate(env, carry, key)
            return carry, make(metrics)

    return Measured()


def test_the_reserved_names_are_exactly_the_names_that_a_run_adds_to_a_row():
    options = {"layout": coarse(2, max_lag=1), "runtime": "inprocess", "eval_every": 1, "eval_episodes": 1}
    own = {"loss", "rate", "episodes", "episode_return", "episode_length"}
    assert set(run_tiny(1, **options).rows[0]) == own | set(RESERVED)


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names_of_metrics_are_refused(name):
    algo = with_metrics(lambda metrics: metrics | {name: jnp.zeros(())})
    for refused in (lambda: train(algo, CARTPOLE, steps=1), lambda: choreo.plan(algo, CARTPOLE)):
        with pytest.raises(AlgorithmError, match=f"`Measured.iterate` returns a metric `{name}`, which a run writes itself.\nGive"):  # fmt: skip
            refused()


def test_complex_metrics_are_refused():
    algo = with_metrics(lambda metrics: metrics | {"phase": jnp.complex64(1j)})
    with pytest.raises(
        AlgorithmError, match="The metric `phase` of `Measured` is complex64, which is not a real number."
    ):
        train(algo, CARTPOLE, steps=1)


NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int4", "uint8", "bool")


@pytest.mark.parametrize("layout", [fused(), coarse(2, max_lag=1, merge="any")], ids=["fused", "any x2"])
def test_metrics_of_every_number_type_keep_their_names_and_values(layout, tmp_path):
    def more(metrics):
        whole = {
            "episode_length": choreo.metric(jnp.int32(7), weight="episodes"),
            "episode_level": choreo.metric(jnp.int32(3), weight="episodes"),
            "episodes": choreo.metric(jnp.int32(2), reduce="sum"),
        }
        everything = metrics | whole | {name: jnp.asarray(1, name) for name in NARROW}
        return OrderedDict(sorted(everything.items(), reverse=True))

    run = train(with_metrics(more), CARTPOLE, steps=128, layout=layout, runtime="inprocess", out=tmp_path / "x")
    row = run.rows[0]
    assert [row[name] for name in NARROW] == [1] * len(NARROW)
    assert (row["episode_length"], row["episode_level"]) == (7, 3)
    assert row["episodes"] == (2 if layout.merge == "all" else 4)
    assert without_seconds(RunFolder(tmp_path / "x").read_metrics()) == without_seconds(run.rows)


def test_an_action_that_is_not_of_the_action_space_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Floats(Tiny):
        @choreo.fragment("actor")
        def act(self, params, obs, key, *, greedy=False):
            return jnp.float32(jnp.argmax(obs @ params)), ()

    for refused in (lambda: train(Floats(), CARTPOLE, steps=1), lambda: choreo.plan(Floats(), CARTPOLE)):
        with pytest.raises(AlgorithmError) as error:
            refused()
        assert str(error.value).startswith(
            "`Floats.act` returns an action float32[] for one environment, but actions are Discrete(2).\n`act` is for one "
            "environment; `iterate` vmaps it. Actions of a Discrete space are integers, as from jnp.argmax;"
        )


# Python numbers in the carry.


class Counting(NamedTuple):
    weights: jax.Array
    iterations: int
    rate: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Counter(Tiny):
    """Tiny, whose train state also holds Python values: a counter, a decaying rate and a name."""

    def init(self, env, key):
        carry = super().init(env, key)
        return carry._replace(train=Counting(carry.train.weights, 0, 0.1, "counter"))

    @choreo.fragment("learner")
    def learn(self, train, trajectory):
        grad = jnp.mean(trajectory.obs, (0, 1))[:, None] * jnp.ones((1, 2)) / (1 + jnp.float32(train.iterations))
        weights = train.weights - train.rate * grad
        loss = jnp.sum(weights) + jnp.float32(train.iterations)
        return Counting(weights, train.iterations + 1, train.rate * 0.5, train.name), {"loss": loss}


def test_a_run_with_numbers_in_its_carry_resumes_bit_for_bit(tmp_path):
    def counter(iterations, **options):
        return train(Counter(), CARTPOLE, steps=iterations * PER_ITERATION, **options)

    whole = counter(4, out=tmp_path / "whole")
    assert (int(whole.train_state.iterations), float(whole.train_state.rate)) == (4, np.float32(0.1) / 16)
    assert whole.train_state.name == "counter"
    counter(2, out=tmp_path / "x")
    # `Counter` has no schedule, so the first two iterations do not depend on the number of steps.
    resumed = resume(tmp_path / "x", steps=4 * PER_ITERATION, algo=Counter())
    loaded = load(tmp_path / "x", algo=Counter())
    for run in (resumed, loaded):
        assert same_bits(run.train_state, whole.train_state)
        assert without_seconds(run.rows) == without_seconds(whole.rows)
    begun = counter(1, init_from=tmp_path / "x")
    assert int(begun.train_state.iterations) == 1  # `init_from` takes the weights only, so the counter starts at 0


def test_python_numbers_in_the_carry_are_the_same_with_workers_and_in_process():
    options = {"steps": 3 * PER_ITERATION, "layout": coarse(2)}
    in_workers, in_process = (
        train(Counter(), CARTPOLE, runtime=runtime, **options) for runtime in ("local", "inprocess")
    )
    assert same_bits(in_workers.train_state, in_process.train_state)
    assert int(in_workers.train_state.iterations) == 3
    assert without_seconds(in_workers.rows) == without_seconds(in_process.rows)


def same_bits(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x == y if isinstance(y, str) else jax.typeof(x) == jax.typeof(y) and np.array_equal(x, y) for x, y in pairs
    )


# From values to TOML data, and back.


@dataclass(frozen=True, kw_only=True)
class Nested:
    widths: tuple[int, ...] = (1, 2)
    scale: float = 1e-3
    inner: "Nested | None" = None
    network: object = None


def test_a_value_that_was_written_as_toml_is_rebuilt():
    import functools
    import tomllib

    import tomli_w

    from choreo import networks

    network = functools.partial(networks.mlp, hidden=(8, 8))
    value = Nested(inner=Nested(widths=(), scale=float("inf")), network=network)
    text = tomli_w.dumps(toml_values.describe(value))
    back = toml_values.rebuild(tomllib.loads(text), at="value", trust=True)
    assert dataclasses.replace(back, network=None) == dataclasses.replace(value, network=None)
    assert (back.network.func, back.network.keywords) == (network.func, network.keywords)


def test_every_preset_layout_is_rebuilt():
    from choreo.layouts import PRESETS

    for preset in PRESETS.values():
        assert toml_values.rebuild(toml_values.describe(preset()), at="layout") == preset()


def test_the_error_names_a_class_that_no_longer_exists():
    with pytest.raises(RunError, match="`algorithm` of this run is `choreo.algos.ppo:PPQ`, which no longer exists"):
        toml_values.rebuild({"class": "choreo.algos.ppo:PPQ"}, at="algorithm", trust=True)


def test_plan_takes_names_of_algorithm_environment_and_layout():
    planned = choreo.plan(TINY, CARTPOLE, "coarse", num_envs=4)
    assert planned == choreo.plan(Tiny(), envs.make(CARTPOLE, 4), choreo.coarse())
    assert "env+actor" in str(planned)
    with pytest.raises(UnknownNameError, match="no layout `corse`"):
        choreo.plan(TINY, CARTPOLE, "corse")


def test_the_environment_refuses_an_action_of_the_wrong_kind():
    class Sampled(Tiny):
        def iterate(self, env, carry, key):
            sample = lambda params, obs, key: (jax.random.uniform(key), ())  # noqa: E731
            position, trajectory, episodes = loops.rollout(env, sample, carry.train.weights, carry.position, key, 4)
            return carry._replace(position=position), episodes

    with pytest.raises(
        EnvError, match=r"`jax:CartPole-v1` was given actions of type float32, but its actions are Discrete"
    ):
        choreo.train(Sampled(unroll=4), "jax:CartPole-v1", num_envs=2, steps=8)


def test_the_error_names_a_metric_that_is_too_large():
    class Large(Tiny):
        def iterate(self, env, carry, key):
            carry, metrics = super().iterate(env, carry, key)
            return carry, metrics | {"huge": 2**40}

    with pytest.raises(AlgorithmError, match=r"The metric `huge` of `Large` is 1099511627776, which is too large"):
        choreo.train(Large(unroll=4), "jax:CartPole-v1", num_envs=2, steps=8)
