"""A run can begin with the weights of another run (`init_from`).

If the other run has the same seed and was never trained, its weights are those that `init` makes. Then the results do not change.
"""

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from choreo import networks
from choreo.algos import DQN, PPO
from choreo.errors import AlgorithmError, RunError
from choreo.runs import checkpoint, resolve
from choreo.runs.config import RunConfig
from choreo.runs.folder import RunFolder
from choreo.runs.training import load, resume, train
from choreo.runs.warm_start import Weights

Tiny = resolve.algorithm_class(f"{Path(__file__).parents[1] / 'tiny.py'}:Tiny")
CARTPOLE = "jax:CartPole-v1"
PER_ITERATION = 16 * 8
SMALL_PPO = PPO(
    unroll=8, minibatch_size=32, epochs=1, total_steps=10_000, network=functools.partial(networks.mlp, hidden=(8,))
)


def run_tiny(iterations=2, **options):
    return train(Tiny(total_steps=10 * PER_ITERATION), CARTPOLE, steps=iterations * PER_ITERATION, **options)


def make_config(algo, *, seed=0, num_envs=8):
    options = dict.fromkeys(("eval_every", "stop_at_return", "checkpoint_every"))
    env, layout = resolve.environment(CARTPOLE, num_envs), resolve.layout("fused")
    return RunConfig(
        algo=algo, env=env, layout=layout, steps=1, seed=seed, runtime="inprocess", eval_episodes=1, **options
    )


def write_run(path, algo, *, change=lambda train: train, **options):
    """Write a run folder whose checkpoint is the carry that `init` makes. `change` can replace the train state of this carry."""
    config = make_config(algo, **options)
    carry = initial_carry(config)
    path.mkdir()
    RunFolder(path).write_config(config.to_toml())
    checkpoint.save(RunFolder(path).checkpoint, carry._replace(train=change(carry.train)), iteration=0)
    return path


def initial_carry(config):
    key, _ = jax.random.split(config.key)  # a runtime splits the key in the same way
    return jax.jit(lambda key: config.algo.init(config.env, key))(key)


def begin(algo, path):
    """The train state with which a run of `algo` would begin, with `init_from=path`."""
    config = make_config(algo)
    return Weights.read(config, path).put_into(initial_carry(config)).train


def ones(train_state):
    return train_state._replace(weights=jnp.ones_like(train_state.weights), iterations=jnp.full((), 9, jnp.int32))


def params_hash(run):
    return run.training_summary["params_hash"]


class TwoTrain(NamedTuple):
    online: jax.Array
    target: jax.Array
    inner: Any


@dataclass(frozen=True, kw_only=True)
class Twice(Tiny):
    """An algorithm that keeps its weights twice, like an algorithm with a target network."""

    def init(self, env, key):
        carry = super().init(env, key)
        return carry._replace(train=TwoTrain(carry.train.weights, carry.train.weights, carry.train))

    def policy(self, train):
        return train.online

    def with_policy(self, train, params):
        return TwoTrain(params, params, train.inner._replace(weights=params))


# Which weights are taken.


@pytest.mark.parametrize(
    ("layout", "runtime"),
    # Workers are tested only in `make test-long`, because tests/laws/test_runtimes.py already checks that workers continue from a
    # carry as the runtime `inprocess` does.
    [("fused", "inprocess"), ("coarse", "inprocess"), pytest.param("coarse", "local", marks=pytest.mark.long)],
)
def test_the_weights_of_an_untrained_run_change_nothing(tmp_path, layout, runtime):
    first = write_run(tmp_path / "first", Tiny(), seed=3)
    plain = run_tiny(3, seed=3, layout=layout, runtime="inprocess")
    begun = run_tiny(3, seed=3, layout=layout, runtime=runtime, init_from=first)
    assert params_hash(begun) == params_hash(plain)
    assert begun.metrics["loss"].tolist() == plain.metrics["loss"].tolist()


@pytest.mark.long
def test_the_weights_of_an_untrained_ppo_change_nothing(tmp_path):
    first = write_run(tmp_path / "first", SMALL_PPO, seed=5, num_envs=4)
    plain, begun = (
        train(SMALL_PPO, CARTPOLE, steps=64, num_envs=4, seed=5, init_from=init_from) for init_from in (None, first)
    )
    assert params_hash(begun) == params_hash(plain)


def test_init_from_takes_the_weights_but_no_counters(tmp_path):
    first = write_run(tmp_path / "first", Tiny(), change=ones)
    train_state = begin(Tiny(), first)
    assert (np.asarray(train_state.weights) == 1).all() and int(train_state.iterations) == 0


def test_the_weights_may_come_from_a_run_with_different_code_and_number_of_environments(tmp_path):
    first = write_run(tmp_path / "first", Tiny(squash=lambda obs: obs), change=ones, num_envs=4)
    with pytest.raises(RunError, match="cannot be made again"):
        load(first)
    assert (np.asarray(begin(Tiny(), first).weights) == 1).all()


def test_with_policy_puts_the_weights_into_the_train_state(tmp_path):
    first = write_run(tmp_path / "first", Twice(), change=lambda t: t._replace(online=t.online + 1))
    train_state = begin(Twice(), first)
    for weights in (train_state.online, train_state.target, train_state.inner.weights):
        assert (np.asarray(weights) == 1).all()


def test_dqn_gives_the_weights_to_its_target_network_too(tmp_path):
    small = DQN(network=functools.partial(networks.q_mlp, hidden=(8,)))

    def add_one(train):
        return train._replace(params=train.params._replace(network=jax.tree.map(lambda x: x + 1, train.params.network)))

    first = write_run(tmp_path / "first", small, change=add_one, seed=3)
    train_state = begin(small, first)
    jax.tree.map(np.testing.assert_array_equal, train_state.target, train_state.params.network)
    assert (np.asarray(jax.tree.leaves(train_state.params.network)[-1]) == 1).all()  # `init` makes the last bias 0


# run.toml records the origin of the weights.


def test_a_run_records_the_origin_of_its_weights(tmp_path):
    first = write_run(tmp_path / "first", Tiny(), change=ones)
    begun = run_tiny(2, out=tmp_path / "begun", init_from=str(first), seed=1)
    assert np.abs(np.asarray(begun.params) - 1).max() < 0.5 and int(begun.train_state.iterations) == 2
    origin = load(tmp_path / "begun").config.init_from
    assert origin == begun.config.init_from
    assert (Path(origin.path), origin.params_hash) == (first.resolve(), checkpoint.sha256(np.ones((4, 2), np.float32)))
    # Resuming does not need the other run.
    RunFolder(first).checkpoint.unlink()
    assert len(resume(tmp_path / "begun", steps=3 * PER_ITERATION).rows) == 3


def test_weights_that_have_changed_since_they_were_recorded_are_refused(tmp_path):
    first, config = write_run(tmp_path / "first", Tiny()), make_config(Tiny())
    origin = Weights.read(config, first).origin
    assert Weights.read(config, origin).origin == origin
    RunFolder(first).checkpoint.unlink()
    write_run(tmp_path / "other", Tiny(), change=ones)
    RunFolder(tmp_path / "other").checkpoint.rename(RunFolder(first).checkpoint)
    with pytest.raises(RunError, match="are not those that the run began with") as error:
        Weights.read(config, origin)
    assert f"Give --init-from {first}" in str(error.value)


# Weights that are refused before anything is written.


def refused(error, message, algo, tmp_path):
    with pytest.raises(error, match=re.escape(message)) as caught:
        train(algo, CARTPOLE, steps=1, init_from=tmp_path / "first", out=tmp_path / "x")
    assert not (tmp_path / "x").exists()
    return str(caught.value)


def test_weights_of_a_different_shape_are_refused(tmp_path):
    first = write_run(tmp_path / "first", Tiny(), change=lambda t: t._replace(weights=jnp.zeros((6, 2))))
    text = refused(
        RunError, "`.train.weights` is float32[6, 2] in the folder and float32[4, 2] in this run", Tiny(), tmp_path
    )
    assert text.startswith(f"The weights in {first} do not fit: ")
    assert f"see {first / 'run.toml'}." in text


def test_weights_of_a_different_algorithm_are_refused(tmp_path):
    write_run(tmp_path / "first", Tiny())
    refused(RunError, "`.train.online` (float32[4, 2]) of this run is not in the folder", Twice(), tmp_path)


def test_weights_are_refused_if_only_one_run_normalises_observations(tmp_path):
    """A network that was trained on normalised observations is useless without their mean and variance (`moments`)."""
    scaled = replace(SMALL_PPO, normalise_obs=True)
    write_run(tmp_path / "first", scaled)
    refused(RunError, "`.train.params.moments.mean` of the folder is not in this run", SMALL_PPO, tmp_path)
    (tmp_path / "first").rename(tmp_path / "scaled")
    write_run(tmp_path / "first", SMALL_PPO)
    refused(RunError, "`.train.params.moments.mean` (float32[4]) of this run is not in the folder", scaled, tmp_path)


def test_a_policy_that_computes_its_parameters_needs_with_policy(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Doubled(Tiny):
        def policy(self, train):
            return train.weights * 2

    @dataclass(frozen=True, kw_only=True)
    class Halved(Doubled):
        def with_policy(self, train, params):
            return train._replace(weights=params / 2)

    first = write_run(tmp_path / "first", Tiny(), change=ones)
    text = refused(AlgorithmError, "`Doubled.policy` computes the parameters", Doubled(), tmp_path)
    assert "Add `with_policy(train, params) -> train` to `Doubled`" in text
    train_state = begin(Halved(), first)
    assert (np.asarray(train_state.weights) == 1).all() and int(train_state.iterations) == 0


def test_with_policy_must_return_a_train_state_of_the_same_shapes(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Tiny):
        def with_policy(self, train, params):
            return train._replace(weights=params[0])

    write_run(tmp_path / "first", Tiny())
    message = "`.train.weights` was float32[4, 2] and becomes float32[2]"
    assert "`Wrong.with_policy`" in refused(AlgorithmError, message, Wrong(), tmp_path)


def test_a_folder_without_run_or_checkpoint_is_refused(tmp_path):
    refused(RunError, "first does not exist.", Tiny(), tmp_path)
    RunFolder(write_run(tmp_path / "first", Tiny())).checkpoint.unlink()
    refused(RunError, "There is no checkpoint at", Tiny(), tmp_path)
