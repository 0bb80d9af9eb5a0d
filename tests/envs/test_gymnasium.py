"""Gymnasium environments: equality, types, steps under `jax.jit`, descriptions in run.toml, command-line arguments, errors."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from choreo import envs
from choreo.cli import arguments, main
from choreo.errors import EnvError, RunError, UnknownNameError
from choreo.runs import resolve, toml_values
from choreo.testing import check_env
from host.toys import Count, Faulty, Masked, Nested
from tiny import Tiny


def make_count(length=3):
    return Count(length)


def test_environments_with_equal_settings_are_equal_and_have_equal_hashes():
    env = envs.make("CartPole-v1", 4)
    assert env == envs.make("CartPole-v1", 4) == envs.make("gymnasium:CartPole-v1", 4)
    assert hash(env) == hash(envs.make("CartPole-v1", 4))
    assert env.with_num_envs(8) == envs.make("CartPole-v1", 8) != env
    assert env.name == "CartPole-v1" and isinstance(env, envs.Env)
    assert env.observation_space == gymnasium.make("CartPole-v1").observation_space


def test_tracing_makes_no_environment():
    made = []
    env = envs.from_factory(lambda: made.append(1) or Count(), 4)
    assert len(made) == 1
    carry = jax.eval_shape(lambda key: Tiny().init(env, key), jax.random.key(0))
    jax.eval_shape(lambda carry, key: Tiny().iterate(env, carry, key), carry, jax.random.key(0))
    assert len(made) == 1


def test_the_spaces_of_an_edited_class_are_read_again():
    """The test imitates an edit in a notebook: the same function later makes an environment of a different class."""
    cell = {"made": Count}
    make = lambda: cell["made"]()  # noqa: E731
    before, same = envs.from_factory(make, 2), envs.from_factory(make, 2)
    cell["made"] = Masked
    after = envs.from_factory(make, 2)
    assert before == same != after
    assert isinstance(after.observation_space, gymnasium.spaces.Dict)
    _, obs = after.reset(after.keys(jax.random.key(0)))
    assert sorted(obs) == ["action_mask", "obs"]


def test_steps_under_jit_equal_those_of_gymnasium():
    env = envs.make("CartPole-v1", 3, max_episode_steps=6)
    single = [gymnasium.make("CartPole-v1", max_episode_steps=6) for _ in range(3)]
    keys = env.keys(jax.random.key(3))
    state, obs = jax.jit(env.reset)(keys)
    first = [e.reset(seed=int(seed)) for e, seed in zip(single, jax.vmap(jax.random.bits)(keys), strict=True)]
    np.testing.assert_array_equal(obs, [obs for obs, _ in first])
    _, ts = jax.jit(lambda state, actions: jax.lax.scan(env.step, state, actions))(state, jnp.ones((20, 3), jnp.int32))
    ts = jax.tree.map(np.asarray, ts)
    for t in range(20):
        for i, e in enumerate(single):
            expected, reward, terminated, truncated, _ = e.step(1)
            np.testing.assert_array_equal(ts.next_obs[t, i], expected)
            assert (ts.reward[t, i], ts.discount[t, i]) == (reward, not terminated)
            assert ts.last[t, i] == (terminated or truncated)
            if terminated or truncated:
                expected, _ = e.reset()
            np.testing.assert_array_equal(ts.obs[t, i], expected)


def test_an_algorithm_runs_on_a_python_environment():
    env, algo = envs.make("CartPole-v1", 4), Tiny()
    carry = jax.jit(algo.init, static_argnums=0)(env, jax.random.key(0))
    iterate = jax.jit(algo.iterate, static_argnums=0)
    for i in range(3):
        carry, metrics = iterate(env, carry, jax.random.key(i))
    assert carry.position.env_state.tolist() == [3 * algo.unroll] * 4
    assert metrics["episodes"] > 0 and metrics["episode_return"] == metrics["episode_length"]


def test_nested_observations_have_types_of_at_most_32_bits_or_64_with_x64():
    env = envs.from_factory(Nested, 2)
    _, obs = env.reset(env.keys(jax.random.key(0)))
    assert jax.tree.map(lambda x: x.dtype.name, obs) == {
        "a": ("int32", "int8"), "image": "uint8", "m": "int32", "z": "float32"
    }  # fmt: skip
    state = jnp.zeros(2, jnp.int32)
    _, ts = env.step(state, {"push": jnp.zeros((2, 2)), "jump": jnp.ones(2, jnp.int32)})
    assert jax.tree.structure(ts.obs) == jax.tree.structure(obs) == jax.tree.structure(ts.next_obs)
    with jax.enable_x64(True):
        _, obs = env.reset(env.keys(jax.random.key(0)))
        assert (obs["z"].dtype, obs["m"].dtype) == (jnp.float64, jnp.int64)


def test_info_keys_become_metrics():
    env, algo = envs.from_factory(Count, 4, info_keys="time,late"), Tiny(unroll=4)
    assert env.info_keys == ("time", "late")
    carry = algo.init(env, jax.random.key(0))
    _, metrics = jax.jit(algo.iterate, static_argnums=0)(env, carry, jax.random.key(1))
    assert (metrics["episode_time"], metrics["episode_late"], metrics["episodes"]) == (3, 1, 4)


def test_actions_of_a_wrong_shape_are_refused_while_tracing():
    env = envs.make("CartPole-v1", 4)
    with pytest.raises(EnvError, match=r"`CartPole-v1` was given actions of shape \[4, 2\], not \[4\]"):
        jax.eval_shape(env.step, jnp.zeros(4, jnp.int32), jnp.zeros((4, 2)))


@pytest.mark.parametrize("what, kwargs", [
    ("CartPole-v1", {"max_episode_steps": 20}), ("Pendulum-v1", {}), ("Taxi-v4", {}), (Nested, {}), (Masked, {}),
    ("CartPole-v1", {"vectorization_mode": "vector_entry_point"}),
])  # fmt: skip
def test_environments_keep_the_contract_unless_they_share_a_random_stream(what, kwargs):
    env = resolve.environment(what, 3, **kwargs)
    if "vectorization_mode" in kwargs:  # these environments share one random stream
        with pytest.raises(EnvError, match="depend on the "):
            check_env(env, steps=40)
    else:
        check_env(env, steps=40)


def test_check_env_shows_the_error_of_an_environment():
    with pytest.raises(EnvError, match="Environment 0 of `Faulty` raised ValueError in step: the motor is on fire"):
        check_env(envs.from_factory(Faulty, 3, fault="raise"), steps=20)


@pytest.mark.parametrize("make, kwargs", [
    (lambda: envs.make("CartPole-v1", 3), {"name": "CartPole-v1", "num_envs": 3}),
    (lambda: envs.make("CartPole-v1", 3, max_episode_steps=5), {"kwargs": {"max_episode_steps": 5}}),
    (lambda: envs.make("CartPole-v1", 3, vectorization_mode="vector_entry_point"),
     {"kwargs": {"vectorization_mode": "vector_entry_point"}}),
    (lambda: envs.from_factory(make_count, 3, length=2, info_keys=("late",)),
     {"kwargs": {"length": 2, "info_keys": {"tuple": ["late"]}}}),
    (lambda: envs.from_factory(Count, 3), {}),
])  # fmt: skip
def test_run_toml_makes_an_equal_environment(make, kwargs):
    described = toml_values.describe_environment(make())
    assert described == described | kwargs
    assert toml_values.rebuild_environment(described, trust=True) == make()


def test_a_lambda_cannot_be_made_again_from_run_toml():
    described = toml_values.describe_environment(envs.from_factory(lambda: Count(), 2))
    with pytest.raises(
        RunError, match="`environment` of this run cannot be made again from its run.toml: it was <function"
    ):
        toml_values.rebuild_environment(described)


def test_a_function_in_a_users_file_makes_environments(tmp_path):
    file = tmp_path / "my_env.py"
    file.write_text("from host.toys import Count\n\ndef make_env(length=3):\n    return Count(length)\n")
    env = resolve.environment(f"{file}:make_env", 2, length=4)
    described = toml_values.describe_environment(env)
    assert described == {"name": f"{file}:make_env", "num_envs": 2, "kwargs": {"length": 4}}
    assert toml_values.rebuild_environment(described, trust=True) == env and env.name == "make_env"
    with pytest.raises(UnknownNameError, match="no name in .*my_env.py `make_evn`"):
        resolve.environment(f"{file}:make_evn")
    with pytest.raises(RunError, match="`environment` of this run is `.*gone.py:make_env`, which no longer exists"):
        toml_values.rebuild_environment({"name": f"{tmp_path}/gone.py:make_env", "num_envs": 2}, trust=True)


def test_classes_functions_and_values_give_environments():
    from choreo.envs.cartpole import CartPole

    assert resolve.environment(CartPole, 4) == envs.make("jax:CartPole-v1", 4)
    assert resolve.environment(lambda: envs.make("jax:CartPole-v1", 1), 4) == envs.make("jax:CartPole-v1", 4)
    assert resolve.environment(CartPole(), 4) == envs.make("jax:CartPole-v1", 4)
    assert resolve.environment(envs.make("CartPole-v1", 3)).num_envs == 3
    assert resolve.environment("gymnasium.envs.classic_control.cartpole:CartPoleEnv", 2).name == "CartPoleEnv"


def test_wrong_environments_are_refused():
    with pytest.raises(EnvError, match="A Count was given; 8 environments cannot be made from it.\n.*lambda: MyEnv"):
        resolve.environment(Count())
    with pytest.raises(EnvError, match="`difficulty` can be given only with a name, function or class"):
        resolve.environment(envs.make("CartPole-v1", 3), difficulty=3)
    with pytest.raises(EnvError, match="needs at least one environment, not num_envs=0"):
        envs.make("CartPole-v1", 0)
    with pytest.raises(EnvError, match="vectorization_mode='async' is not known"):
        envs.make("CartPole-v1", 2, vectorization_mode="async")
    with pytest.raises(UnknownNameError, match="no environment `CartPol-v1`"):
        envs.make("CartPol-v1", 2)


def test_envpool_keeps_the_contract_and_is_made_again_from_run_toml():
    pytest.importorskip("envpool", reason="the extra choreo[envpool] is not installed")
    env = envs.make("envpool:CartPole-v1", 3, num_threads=1)
    check_env(env, steps=40)
    described = toml_values.describe_environment(env)
    assert described == {"name": "envpool:CartPole-v1", "num_envs": 3, "kwargs": {"num_threads": 1}}
    assert toml_values.rebuild_environment(described) == env
    with pytest.raises(UnknownNameError, match="no environment `envpool:CartPol-v1`"):
        envs.make("envpool:CartPol-v1", 2)


def test_arguments_of_environments_are_parsed_from_the_command_line():
    args = ["--seed", "1", "--env.max-episode-steps=7", "--env.name=tall", "--env.sizes=(1, 2)", "--env.sutton=true"]
    rest, settings = arguments.env_settings([*args, "--unroll=8"])
    assert rest == ["--seed", "1", "--unroll=8"]
    assert settings == {"max_episode_steps": 7, "name": "tall", "sizes": (1, 2), "sutton": True}
    for wrong in ("--env.difficulty", "--env.=3", "--env.1a=3"):
        with pytest.raises(arguments.UsageError, match="is not an argument of an environment"):
            arguments.env_settings([wrong])
    with pytest.raises(arguments.UsageError, match="an option of the run"):
        arguments.env_settings(["--env.num_envs=3"])


def test_arguments_on_the_command_line_reach_the_environment(tmp_path, capsys):
    file = tmp_path / "my_env.py"
    file.write_text("from host.toys import Count\n\ndef make_env(length):\n    return Count(length)\n")
    assert main.main(["graph", "ppo", f"{file}:make_env", "--env.length=4", "--num-envs", "4", "--unroll", "64"]) == 0
    assert "step" in capsys.readouterr().out
    assert main.main(["graph", "ppo", f"{file}:make_env", "--env.lenght=4"]) == 1
    assert "`make_env` could not be made: TypeError: make_env() got an unexpected keyword" in capsys.readouterr().err
