"""PPO on tasks whose best return is known, and the parts of PPO against direct computations."""

import dataclasses
import functools
import runpy
from pathlib import Path

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from algos.one_gradient import (
    MEMORY,
    SMALL,
    assert_shards_equal,
    first_value,
    float_types,
    gae_by_hand,
    iterate_on_two_shards,
    learn,
    learn_task,
    trajectory_of,
)
from algos.toys import Aim, Match, Recall, batch
from choreo import envs, networks, ops
from choreo._compat import inner_jaxprs
from choreo.algos.ppo import PPO
from choreo.errors import AlgorithmError
from choreo.loops import rollout
from choreo.testing import check_algorithm

TOY = PPO(unroll=8, minibatch_size=64, learning_rate=1e-2, entropy_coef=0.0, network=SMALL)
ITERATIONS = 80
LOW_GAMMA = dataclasses.replace(TOY, gamma=0.8, max_grad_norm=10.0)
"""`TOY` with a small gamma, for tasks of a few steps."""
AIM = dataclasses.replace(TOY, total_steps=70 * 8 * 16)
"""`TOY` with a learning rate that reaches 0 before the last iteration."""


@pytest.mark.parametrize(("task", "value"), [("match", 1.0), ("two_step", 0.8)])
def test_finds_the_best_return_and_its_value(task, value):
    carry, metrics = learn_task(LOW_GAMMA, task, ITERATIONS)
    assert metrics["episode_return"][-5:].mean() >= 0.99
    np.testing.assert_allclose(first_value(carry), value, atol=0.1)


def test_finds_the_best_continuous_action():
    _, metrics = learn(AIM, batch(Aim(), 16), ITERATIONS, 0)
    assert metrics["episode_return"][-5:].mean() >= -0.01


def test_finds_the_best_return_of_recall_with_a_recurrent_network():
    algo = dataclasses.replace(TOY, network=MEMORY)
    _, metrics = learn(algo, batch(Recall(), 16), 60, 0)
    assert metrics["episode_return"][-5:].mean() >= 0.99


def test_without_memory_half_of_the_answers_in_recall_are_right():
    _, metrics = learn_task(LOW_GAMMA, "recall", ITERATIONS)
    assert abs(metrics["episode_return"][-20:].mean() - 0.5) < 0.1


def test_a_time_limit_is_bootstrapped():
    """With a reward of 1 in every step, the value is 1 / (1 - gamma) = 5.

    Without bootstrapping at the time limit of 5 steps, the value would be at most 3.4.
    """
    carry, _ = learn_task(LOW_GAMMA, "income", ITERATIONS)
    np.testing.assert_allclose(first_value(carry), 5.0, rtol=0.02)


NETWORKS = {"mlp": SMALL, "lstm": functools.partial(networks.lstm, hidden=(16,), width=8)}


@pytest.mark.parametrize(
    ("network", "env"), [pytest.param("mlp", "jax:CartPole-v1", marks=pytest.mark.long), ("lstm", "jax:Pendulum-v1")]
)
def test_ppo_passes_check_algorithm(network, env):
    algo = PPO(unroll=8, minibatch_size=16, network=NETWORKS[network], normalise_obs=True, total_steps=10_000)
    check_algorithm(algo, envs.make(env, num_envs=4))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("x64", [False, True])
def test_every_float_has_64_bits_with_x64_and_else_32(network, x64):
    with jax.enable_x64(x64):
        algo = PPO(unroll=8, minibatch_size=16, network=NETWORKS[network], normalise_obs=True, total_steps=10_000)
        out = jax.eval_shape(functools.partial(learn, algo, envs.make("jax:Pendulum-v1", num_envs=4), 2), 0)
        assert float_types(out) == {"float64" if x64 else "float32"}


def test_the_learner_recomputes_the_probabilities_of_the_actor():
    """The ratio pi / pi_old is 1 before the first update, also with memory and with ends of episodes in the sequence."""
    algo, env = PPO(unroll=11, minibatch_size=22, network=NETWORKS["lstm"]), batch(Recall(), 4)
    carry = jax.jit(algo.init, static_argnums=0)(env, jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(2), x.shape), carry.train.params)
    fresh = algo.initial_state(params)
    act = jax.jit(lambda start, key: rollout(env, algo.act, params, start, key, 11, fresh=fresh)[:2])
    # After these 11 steps, the environments are in the middle of an episode, because an episode has 2 steps.
    start, _ = act(carry.position, jax.random.key(0))
    _, trajectory = act(start, jax.random.key(1))
    sequences = jax.tree.map(lambda x: x.swapaxes(0, 1), trajectory)
    assert trajectory.last.any() and jnp.abs(start.memory[0]).sum() > 0
    again = jax.jit(lambda *args: algo.unfold(params, *args)[0])
    pi = again(sequences.obs, sequences.last, start.memory)
    acted = sequences.extras.log_prob(sequences.action)
    np.testing.assert_allclose(pi.log_prob(sequences.action), acted, rtol=1e-4, atol=1e-5)
    assert np.asarray(acted).std() > 0.1  # the log-probabilities differ from step to step


def test_one_sgd_step_follows_the_gradient_of_the_textbook_loss():
    """There is one epoch of one minibatch, so `learn` makes one SGD step."""
    with jax.enable_x64(True):
        algo = PPO(unroll=16, minibatch_size=64, epochs=1, learning_rate=0.1, network=SMALL, optimizer=optax.sgd)
        carry, trajectory = trajectory_of(algo, envs.make("jax:CartPole-v1", num_envs=4))
        train, _ = algo.learn(carry.train, trajectory, None, jax.random.key(2))
        old = carry.train.params.network
        advantage, old_value = gae_by_hand(carry, trajectory, algo.gamma, algo.gae_lambda)
        target = old_value + advantage
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

        def textbook(module):
            pi, value = jax.vmap(jax.vmap(module))(trajectory.obs)
            acted = trajectory.extras.log_prob(trajectory.action)
            ratio = jnp.exp(pi.log_prob(trajectory.action) - acted)
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
            probs = jax.nn.softmax(pi.logits)
            entropy = -jnp.sum(probs * jnp.log(probs), axis=-1)
            # `value_coef` is 0.5, and the loss of the critic is half the squared error. `entropy_coef` is 0.01.
            return jnp.mean(-gain + 0.5 * 0.5 * (value - target) ** 2 - 0.01 * entropy)

        expected = jax.tree.map(lambda p, g: p - 0.1 * g, old, jax.jit(jax.grad(textbook))(old))
        for new, want in zip(jax.tree.leaves(train.params.network), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(new, want, rtol=1e-9, atol=1e-12)


def test_the_learning_rate_falls_to_zero():
    _, metrics = learn(AIM, batch(Aim(), 16), ITERATIONS, 0)
    expected = 1e-2 * np.maximum(1 - np.arange(ITERATIONS) / 70, 0)
    np.testing.assert_allclose(metrics["learning_rate"], expected, rtol=1e-5, atol=1e-8)


def test_without_total_steps_the_learning_rate_is_constant():
    _, metrics = learn_task(LOW_GAMMA, "match", ITERATIONS)
    np.testing.assert_allclose(metrics["learning_rate"], 1e-2)


def test_the_moments_are_the_mean_and_variance_of_all_observations_so_far():
    algo = dataclasses.replace(TOY, normalise_obs=True)
    env = batch(Aim(), 16)
    carry = jax.jit(algo.init, static_argnums=0)(env, jax.random.key(0))
    assert algo.policy(carry.train).moments.num == 0

    @jax.jit
    def iterate(carry, key):
        key_rollout, _ = jax.random.split(key)
        _, trajectory, _ = rollout(env, algo.act, carry.train.params, carry.position, key_rollout, algo.unroll)
        return algo.iterate(env, carry, key)[0], trajectory.obs

    seen = []
    for i in range(3):
        carry, obs = iterate(carry, jax.random.key(i))
        seen.append(obs)
    moments, seen = algo.policy(carry.train).moments, np.concatenate(seen).reshape(-1, 1)
    np.testing.assert_allclose(moments.mean, seen.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moments.var, seen.var(0), rtol=1e-4)
    assert moments.num == len(seen) == 3 * 8 * 16


def test_greedy_takes_the_most_likely_action():
    carry, _ = learn_task(LOW_GAMMA, "match", ITERATIONS)
    params = LOW_GAMMA.policy(carry.train)
    for sign in range(3):
        action, _ = LOW_GAMMA.act(params, jax.nn.one_hot(sign, 3), jax.random.key(0), greedy=True)
        assert action == sign


def test_a_network_may_have_functions_among_its_leaves():
    class Plain(eqx.Module):
        """A network that has the activation function as a leaf, as `eqx.nn.MLP` does."""

        body: eqx.nn.MLP

        def __call__(self, obs):
            out = self.body(obs)
            return ops.Categorical(out[:-1]), out[-1]

    def plain(observation_space, action_space, key):
        num_out = int(action_space.n) + 1
        return Plain(eqx.nn.MLP(observation_space.shape[0], num_out, 16, 1, activation=jax.nn.gelu, key=key))

    check_algorithm(dataclasses.replace(TOY, network=plain), batch(Match(), 16))


def test_atari_cnn_has_the_shapes_of_the_paper():
    space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    build = functools.partial(networks.atari_cnn, space, gymnasium.spaces.Discrete(6), width=32)
    module = jax.eval_shape(build, jax.random.key(0))
    assert [x.weight.shape for x in module.convolutions] == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    assert module.torso.weight.shape == (32, 7 * 7 * 64)  # Mnih et al. 2015
    act = jax.jit(lambda key, obs: build(key)(obs))
    pi, value = act(jax.random.key(0), jnp.full((84, 84, 4), 255, jnp.uint8))
    assert pi.logits.shape == (6,) and value.shape == ()
    np.testing.assert_allclose(jax.nn.softmax(pi.logits), 1 / 6, rtol=0.1)  # nearly uniform at first


RECURRENT = PPO(unroll=128, network=networks.lstm)
REFUSED = [
    (PPO(minibatch_size=100), r"=100 does not divide the 1024 steps .* \(unroll=128 x 8", "one of 1024, 512, 256"),
    (dataclasses.replace(RECURRENT, minibatch_size=64), "unroll=128 must divide minibatch_size=64", "multiple of 128"),
    (
        dataclasses.replace(RECURRENT, minibatch_size=384),
        "minibatch_size=384 does not divide",
        "one of 1024, 512, 256, 128;",
    ),
    (PPO(network=networks.atari_cnn), "atari_cnn needs images", "networks.mlp"),
]


@pytest.mark.parametrize(("algo", "what", "fix"), REFUSED, ids=range(len(REFUSED)))
def test_sizes_and_networks_that_do_not_fit_are_refused_before_anything_runs(algo, what, fix):
    env = envs.make("jax:CartPole-v1", num_envs=8)
    with pytest.raises(AlgorithmError, match=what) as error:
        jax.eval_shape(functools.partial(algo.init, env), jax.random.key(0))
    assert fix in error.value.fix


def test_an_unroll_of_0_is_refused():
    with pytest.raises(AlgorithmError, match=r"PPO\(unroll=0\) must be at least 1"):
        PPO(unroll=0)


@pytest.mark.parametrize("network", NETWORKS)
def test_8_and_16_environments_give_the_same_primitives(network):
    """The compiler traces `iterate` for two numbers of environments and compares the traces, which must have the same equations.

    With `jax.random.permutation`, the equations would differ: it sorts once for the 1,024 steps of 8 environments, and twice for
    the 2,048 steps of 16 environments.
    """
    algo = PPO(unroll=128, minibatch_size=256, network=NETWORKS[network], normalise_obs=True, total_steps=10_000)
    assert _primitives(algo, num_envs=8) == _primitives(algo, num_envs=16)


def _primitives(algo, num_envs):
    env = envs.make("jax:Pendulum-v1", num_envs=num_envs)
    carry = jax.eval_shape(functools.partial(algo.init, env), jax.random.key(0))
    jaxpr = jax.make_jaxpr(functools.partial(algo.iterate, env))(carry, jax.random.key(0))
    return [eqn.primitive.name for eqn in _equations(jaxpr)]


def _equations(jaxpr):
    for eqn in jaxpr.jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _equations(inner)


def test_shards_stay_equal_and_average_their_gradients():
    algo = dataclasses.replace(TOY, unroll=4, minibatch_size=32, normalise_obs=True, epochs=2)
    train, metrics = iterate_on_two_shards(algo, batch(Aim(), 8))
    assert_shards_equal(train)
    assert metrics["value_loss"][0] != metrics["value_loss"][1]  # the shards had different data
    assert train.params.moments.num[0] == 2 * 4 * 8


def test_finds_the_best_return_with_a_flax_network():
    """The network is that of examples/flax_network.py. The task is smaller than in the example."""
    path = Path(__file__).parents[2] / "examples" / "flax_network.py"
    pytest.importorskip("flax", reason="the extra choreo[flax] is not installed")
    flax_network = runpy.run_path(str(path))["flax_network"]
    algo = dataclasses.replace(TOY, network=flax_network)
    _, metrics = learn(algo, batch(Match(), 16), 40, 0)
    assert metrics["episode_return"][-5:].mean() >= 0.99
