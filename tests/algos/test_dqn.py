"""DQN and its variants on tasks whose values are known, its loss against numbers computed by hand, and what is refused."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import choreo
from algos.one_gradient import learn, learn_task
from algos.one_step import FORBIDDEN, OneStep
from algos.toys import Match, batch, one_hot
from choreo import envs
from choreo.algos.dqn import DQN, Params
from choreo.buffers import StoredStep
from choreo.errors import AlgorithmError, LayoutError
from choreo.layouts import apex
from choreo.networks import q_cnn, q_mlp
from choreo.plans.build import plan
from choreo.testing import check_algorithm

SMALL = functools.partial(q_mlp, hidden=(32,))
GAMMA = 0.8
TOY = DQN(
    learning_rate=3e-3, unroll=2, updates_per_step=1 / 4, batch_size=32, gamma=GAMMA, n_step=1, target_period=20, capacity=4_000,
    min_size=64, epsilon=(1.0, 0.5), epsilon_steps=2_000, network=SMALL,
)  # fmt: skip
ITERATIONS = 500
VARIANTS = {
    "plain": {"double": False, "dueling": False},
    "double, dueling": {},
    "3-step": {"n_step": 3},
    "prioritized": {"prioritized": True},
    "2 buffer shards": {"prioritized": True, "buffer_shards": 2},
    "c51": {"head": "c51", "value_range": (-1.0, 6.0), "atoms": 29},
    "qr": {"head": "qr", "atoms": 11, "double": False, "dueling": False},
}


def values(algo: DQN, train, obs) -> np.ndarray:
    return np.asarray(algo.values(train.params.network, jnp.asarray(obs)).q)


def variants(*in_ci: str, but: str | None = None):
    """Parametrize a test over all variants except `but`. CI runs the variants `in_ci` and the default, "double, dueling".

    In CI, every variant runs on at least one of the three tasks below, except "plain" and "prioritized": "qr" also has the
    options of "plain", and "2 buffer shards" also has the option of "prioritized".
    """
    marks = {name: () if name in (*in_ci, "double, dueling") else pytest.mark.long for name in VARIANTS if name != but}
    return pytest.mark.parametrize("variant", [pytest.param(name, marks=mark) for name, mark in marks.items()])


@variants("2 buffer shards")  # this variant also has the option of "prioritized"
def test_finds_the_values_of_a_task_of_one_step(variant):
    """The value is 1 for the action whose number is that of the observed sign, and 0 for the other actions."""
    algo = dataclasses.replace(TOY, **VARIANTS[variant])
    carry, _ = learn_task(algo, "match", ITERATIONS, 8)
    found = np.stack([values(algo, carry.train, one_hot(jnp.int32(sign), 3)) for sign in range(3)])
    np.testing.assert_allclose(found, np.eye(3), atol=0.1)


@variants("c51", "qr", but="3-step")  # with 3-step returns, the values differ: they include rewards of random actions
def test_values_of_the_first_step_include_the_reward_of_the_second(variant):
    """On the left, the second step pays 0.5. On the right, it pays 1 for action 0, else 0. Only action 1 leads to the right."""
    algo = dataclasses.replace(TOY, **VARIANTS[variant])
    carry, _ = learn_task(algo, "two_step", ITERATIONS, 8)
    found = np.stack([values(algo, carry.train, one_hot(jnp.int32(place), 3)) for place in range(3)])
    left, right = 0.5 * GAMMA, GAMMA
    np.testing.assert_allclose(found, [[left, right, left], [0.5] * 3, [1.0, 0.0, 0.0]], atol=0.1)


@variants("3-step")
def test_a_time_limit_is_bootstrapped(variant):
    """With a reward of 1 in every step, the value is 1 / (1 - gamma) = 5.

    Without bootstrapping at the time limit of 5 steps, the value would be at most 3.4.
    """
    algo = dataclasses.replace(TOY, **VARIANTS[variant])
    carry, _ = learn_task(algo, "income", ITERATIONS, 8)
    np.testing.assert_allclose(values(algo, carry.train, one_hot(jnp.int32(0), 3)), [5.0] * 3, atol=0.1)


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The best action has the same index in its space as the observed number. Neither space begins at 0.

    The best action is always allowed. Each other action is allowed at random.
    """

    observation_space = property(
        lambda self: spaces.Dict(action_mask=spaces.MultiBinary(3), number=spaces.Discrete(3, start=2))
    )
    action_space = property(lambda self: spaces.Discrete(3, start=-1))

    def see(self, key):
        key_mask, key_number = jax.random.split(key)
        number = jax.random.randint(key_number, (), 0, 3)
        mask = jax.random.bernoulli(key_mask, 0.5, (3,)).at[number].set(True)
        return {"action_mask": mask.astype(jnp.int8), "number": 2 + number}

    def pay(self, obs, action):
        allowed = obs["action_mask"][action + 1] > 0
        return jnp.where(allowed, (action + 1 == obs["number"] - 2).astype(jnp.float32), FORBIDDEN)


def test_masked_actions_are_never_taken_and_spaces_need_not_begin_at_0():
    _, metrics = learn(dataclasses.replace(TOY, epsilon=(1.0, 0.0)), OneStep(Allowed(), 8), 300, 0)
    assert metrics["episode_return"].min() >= 0  # one masked action would make a mean negative
    assert metrics["episode_return"][-20:].mean() >= 0.95


def window(last=(False, False, False, False), discount=(1.0, 1.0, 1.0, 1.0)) -> StoredStep:
    """An item of four steps with observations 0, 1, 2, 3 and rewards 1, 10, 100, 1000."""
    obs = jnp.arange(4.0)[:, None]
    reward = jnp.array([1.0, 10.0, 100.0, 1000.0])
    return StoredStep(obs, jnp.array([1, 0, 0, 0]), reward, jnp.array(discount), jnp.array(last))


class Linear(eqx.Module):
    """The value of action i is weights[i] * obs + 0.5."""

    weights: jax.Array

    def __call__(self, obs):
        x = obs["x"] if isinstance(obs, dict) else obs
        return self.weights[:, None] * x[None, :] + 0.5


@pytest.mark.parametrize("double", [False, True])
def test_the_target_equals_a_number_computed_by_hand(double):
    algo = DQN(gamma=0.5, n_step=3, double=double)
    network, target = Linear(jnp.array([-1.0, 1.0])), Linear(jnp.array([3.0, 2.0]))
    best = 2.0 if double else 3.0  # the network prefers action 1, and the target network prefers action 0

    def item_loss(steps: StoredStep):
        item = algo.item(steps)
        return algo.item_loss(network, item, algo.values(target, item.next_obs))

    _, error, q = item_loss(window())
    assert q == 0.5
    np.testing.assert_allclose(error, 1 + 0.5 * 10 + 0.25 * 100 + 0.125 * (best * 3 + 0.5) - 0.5, rtol=1e-6)
    _, error, _ = item_loss(window((False, True, False, False), (1.0, 0.0, 1.0, 1.0)))
    np.testing.assert_allclose(error, 1 + 0.5 * 10 - 0.5, rtol=1e-6)
    _, error, _ = item_loss(window((False, True, False, False)))  # a time limit
    np.testing.assert_allclose(error, 1 + 0.5 * (best * 1 + 0.5) - 0.5, rtol=1e-6)
    loss, error, _ = item_loss(window((True, False, False, False)))
    assert loss == 0 and error == 0  # a time limit ended the episode, and its last observation is not in the item


def test_the_target_network_is_copied_at_the_end_of_the_iteration_in_which_its_period_ends():
    algo = dataclasses.replace(TOY, target_period=6, min_size=32)
    env = batch(Match(), 8)
    iterate, carry = jax.jit(functools.partial(algo.iterate, env)), algo.init(env, jax.random.key(0))
    copies = {}
    for i in range(8):
        carry, _ = iterate(carry, jax.random.key(i))
        target, network = (jax.tree.leaves(x) for x in (carry.train.target, carry.train.params.network))
        copies[int(carry.train.updates)] = all(map(np.array_equal, target, network))
    # The two networks are equal at first. Periods end at updates 6, 12, 18 and 24, and an iteration has 4 updates.
    assert copies == {0: True, 4: False, 8: True, 12: True, 16: False, 20: True, 24: True}


def test_actions_are_random_with_probability_epsilon_and_never_masked():
    algo = dataclasses.replace(TOY, epsilon=(0.6, 0.6))
    params = Params(Linear(jnp.array([0.0, 2.0, 3.0, 1.0])), jnp.int32(5), jnp.float32(0))
    obs = {"action_mask": jnp.array([1, 1, 0, 1], jnp.int8), "x": jnp.ones(1)}
    act = jax.jit(jax.vmap(lambda key, power: algo.act(params, obs, key, power)[0], (0, None)))
    keys = jax.random.split(jax.random.key(0), 20_000)
    for power, epsilon in ((1.0, 0.6), (2.0, 0.36)):
        share = np.bincount(act(keys, jnp.float32(power)), minlength=9)[5:] / len(keys)
        np.testing.assert_allclose(share, [epsilon / 3, 1 - epsilon * 2 / 3, 0, epsilon / 3], atol=0.015)
    assert share[2] == 0


def test_every_environment_has_its_own_epsilon():
    algo = DQN(epsilon=(0.4, 0.4), epsilon_spread=7.0)
    found = algo.epsilon_at(jnp.float32(0)) ** algo.powers(8)
    np.testing.assert_allclose(found, [0.4 ** (1 + 7 * i / 7) for i in range(8)], rtol=1e-5)


def test_epsilon_falls_with_environment_steps():
    algo = DQN(epsilon=(1.0, 0.2), epsilon_steps=1000)
    np.testing.assert_allclose(
        [algo.epsilon_at(jnp.float32(s)) for s in (0, 500, 1000, 9000)], [1.0, 0.6, 0.2, 0.2], rtol=1e-6
    )


def test_nothing_is_learned_until_min_size_steps_are_stored():
    # Each iteration draws items before it stores 2 x 8 steps, so the fifth iteration is the first that learns.
    assert TOY.min_size == 64
    _, metrics = learn_task(TOY, "match", ITERATIONS, 8)
    np.testing.assert_array_equal(metrics["learned"], [0] * 4 + [1] * (ITERATIONS - 4))


def test_importance_weights_are_in_inverse_proportion_to_probabilities():
    algo = dataclasses.replace(TOY, prioritized=True, importance_exponent=1.0)
    np.testing.assert_allclose(algo.importance(jnp.array([[0.1, 0.2, 0.4]])), [[1.0, 0.5, 0.25]], rtol=1e-6)


@pytest.mark.parametrize("variant", [pytest.param("3-step", marks=pytest.mark.long), "2 buffer shards"])
def test_dqn_passes_check_algorithm(variant):
    algo = dataclasses.replace(TOY, total_steps=10_000, **VARIANTS[variant])
    check_algorithm(algo, envs.make("jax:CartPole-v1", num_envs=4))


def test_q_cnn_returns_the_atoms_of_each_action():
    space = spaces.Box(0, 255, (36, 36, 4), np.uint8)
    build = functools.partial(q_cnn, space, spaces.Discrete(3), atoms=2, dueling=True, width=16)
    values = jax.jit(lambda key, frames: build(key)(frames))
    assert values(jax.random.key(0), jnp.zeros((36, 36, 4), jnp.uint8)).shape == (3, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_step": 0}, "DQN: unroll, n_step and target_period must be at least 1."),
        ({"updates_per_step": 0}, "DQN(updates_per_step=0) must be above 0, and finite."),
        ({"head": "c52"}, "DQN(head='c52') is not known."),
        ({"head": "c51", "value_range": (1.0, 1.0)}, "DQN(value_range=(1.0, 1.0)) is empty."),
        ({"batch_size": 10, "buffer_shards": 4}, "A batch of 10 cannot be drawn evenly from 4 buffer shards."),
        ({"batch_size": 64, "min_size": 32}, "min_size=32 is less than batch_size=64"),
        ({"capacity": 500, "min_size": 1000}, "The table `items` waits until 1,000 steps are stored"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(AlgorithmError) as error:
        DQN(**options)
    assert str(error.value).startswith(message)


def test_actions_in_a_box_are_refused():
    with pytest.raises(AlgorithmError, match="Action values need a Discrete action space, not Box"):
        jax.eval_shape(lambda: TOY.init(envs.make("jax:Pendulum-v1", num_envs=2), jax.random.key(0)))


@pytest.mark.parametrize("plan_or_train", [plan, functools.partial(choreo.train, steps=64)], ids=["plan", "train"])
def test_refuses_more_sites_than_buffer_shards(plan_or_train):
    env = envs.make("jax:CartPole-v1", num_envs=4)
    with pytest.raises(LayoutError) as error:
        plan_or_train(TOY, env, layout=apex(workers=2, buffers=2))
    assert str(error.value).startswith("1 buffer shard cannot be divided equally among 2 replicas of `buffer`.")
    assert "--buffer-shards 2" in str(error.value)
