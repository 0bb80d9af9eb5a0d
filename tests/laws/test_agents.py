"""Law levels 1 and 3 for layouts that divide the agents instead of the environments (`per_agent`).

In one process, the result equals the reference, `jax.jit(iterate)`, up to 1e-5. Worker processes give the same bits as one
process. If another axis could be mistaken for the agent axis, the plan is refused, or gives the reference result.
"""

from dataclasses import dataclass
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo.errors import LayoutError, PartitionError
from choreo.plans.build import plan
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from laws.reference import assert_close, assert_same_bits, reference_run, run_of

KEY = jax.random.key(3)
AGENTS, NUM_ENVS, ACTIONS = 2, 6, 3


@dataclass(frozen=True)
class Meeting:
    """Both agents see a number, and are rewarded if both choose the action with that number."""

    num_envs: int
    name = "meeting"
    observation_space = gymnasium.spaces.Box(0, 1, (ACTIONS,), np.float32)
    action_space = gymnasium.spaces.Discrete(ACTIONS)

    def with_num_envs(self, num_envs):
        return Meeting(num_envs)

    def keys(self, key):
        return jax.random.split(key, self.num_envs)

    @choreo.fragment("env")
    def reset(self, keys):
        return keys, jax.vmap(self._observe)(keys)

    @choreo.fragment("env")
    def step(self, keys, action):
        shown = jax.vmap(self._observe)(keys)
        right = jnp.argmax(shown, -1) == action
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
        return (
            keys,
            jax.vmap(self._observe)(keys),
            jnp.broadcast_to(jnp.all(right, -1, keepdims=True), right.shape).astype(jnp.float32),
        )

    @staticmethod
    def _observe(key):
        number = jax.random.randint(key, (), 0, ACTIONS)
        return jnp.tile(jax.nn.one_hot(number, ACTIONS)[None], (AGENTS, 1))  # [agent, action]


class Carry(NamedTuple):
    train: jax.Array
    env_state: jax.Array
    obs: jax.Array


@dataclass(frozen=True)
class Bandits:
    """Policy gradient on tables of action preferences."""

    shared: bool = False
    """Whether all agents share one table. If not, each agent has its own table."""
    unroll: int = 4
    """Steps per environment and iteration."""

    def init(self, env, key):
        table = jnp.zeros((ACTIONS, ACTIONS))
        return Carry(table if self.shared else jnp.stack([table] * AGENTS), *env.reset(env.keys(key)))

    @choreo.fragment("actor")
    def act(self, table, obs, key):
        """Act for one agent in all environments."""
        return jax.vmap(lambda obs, key: jax.random.categorical(key, obs @ table))(obs, jax.random.split(key, len(obs)))

    @choreo.fragment("learner")
    def learn(self, table, obs, action, reward):
        """Learn for one agent from all environments. The first two axes of `obs`, `action` and `reward` are [time, env]."""

        def loss(table):
            log_prob = jax.nn.log_softmax(jnp.einsum("tea,ab->teb", obs, table))
            return -jnp.mean(jnp.take_along_axis(log_prob, action[..., None], -1)[..., 0] * (reward - 0.1))

        return table - jax.grad(loss)(table)

    def iterate(self, env, carry, key):
        table_axis = None if self.shared else 0

        def step(state, key):
            env_state, obs = state
            act = jax.vmap(self.act, (table_axis, 1, 0), 1, axis_name="agent")
            action = act(carry.train, obs, jax.random.split(key, AGENTS))
            env_state, obs, reward = env.step(env_state, action)
            return (env_state, obs), (state[1], action, reward)

        state, data = jax.lax.scan(step, (carry.env_state, carry.obs), jax.random.split(key, self.unroll))
        learned = jax.vmap(self.learn, (table_axis, 2, 2, 2), axis_name="agent")(carry.train, *data)
        train = jnp.mean(learned, 0) if self.shared else learned
        reward = jnp.mean(data[2])
        return Carry(train, *state), {"reward": reward, "episode_return": reward, "episodes": jnp.ones(())}


def test_agents_with_separate_parameters_give_the_reference_result():
    algo, env = Bandits(), Meeting(NUM_ENVS)
    the_plan = plan(algo, env, choreo.per_agent())
    assert the_plan.sites.replicas == {"env": None, "actor+buffer+learner": AGENTS}
    run = run_of(InProcess(the_plan), KEY)
    assert_close(run, reference_run(algo, env, KEY), 1e-5)
    assert_same_bits(run_of(Local(the_plan), KEY), run)


def test_agents_that_share_parameters_combine_them_at_one_site():
    """Each agent acts at its own site. The mean over agents is computed at a single site, which has the results of all agents."""
    algo, env = Bandits(shared=True), Meeting(NUM_ENVS)
    layout = choreo.Layout(choreo.Group("env"), choreo.Group("actor", axis="agent"), choreo.Group("learner"))
    run = run_of(InProcess(plan(algo, env, layout)), KEY)
    assert_close(run, reference_run(algo, env, KEY), 1e-5)
    # With `per_agent`, the site of the environments computes the mean.
    run = run_of(InProcess(plan(algo, env, choreo.per_agent())), KEY)
    assert_close(run, reference_run(algo, env, KEY), 1e-5)


@pytest.mark.long
def test_the_agents_learn_to_choose_the_same_action():
    runtime = InProcess(plan(Bandits(unroll=8), Meeting(64), choreo.per_agent()))
    runtime.start(KEY)
    assert runtime.run(0, 100)["reward"][-20:].mean() > 0.9
    runtime.close()


def test_an_axis_that_no_vmap_names_is_refused():
    layout = choreo.Layout(choreo.Group("env"), choreo.Group("actor", "learner", axis="member"))
    with pytest.raises(LayoutError) as refusal:
        plan(Bandits(), Meeting(NUM_ENVS), layout)
    assert str(refusal.value) == (
        "The layout divides an axis 'member', but no fragment is called under a vmap of that axis_name.\n"
        'Call the fragments of one member under jax.vmap(..., axis_name="member").'
    )


def test_a_layout_that_divides_environments_and_agents_is_refused():
    layout = choreo.Layout(choreo.Group("env", replicas=2), choreo.Group("actor", "learner", axis="agent"))
    with pytest.raises(LayoutError, match="divides the axis 'agent' and also environments or shards"):
        plan(Bandits(), Meeting(NUM_ENVS), layout)


def test_as_many_environments_as_agents_are_refused():
    with pytest.raises(LayoutError) as refusal:
        plan(Bandits(), Meeting(AGENTS), choreo.per_agent())
    assert str(refusal.value) == (
        "The axis 'agent' has size 2, and there are 2 environments. This layout recognises the axis 'agent' by its size, "
        "so it cannot tell the two axes apart.\n"
        "Use a different number of environments (--num-envs 4), or a layout that does not divide 'agent'."
    )


@dataclass(frozen=True)
class TwoAxesOfEqualLength:
    """Three agents with three weights each, in one leaf [weight, agent].

    The second axis is the agent axis, and the first axis has the same length.
    """

    mixes: bool
    """Whether the fragments sum over the axis of the weights."""

    def init(self, env, key):
        return {"w": jnp.linspace(0.0, 1.0, 9).reshape(3, 3), "s": jnp.linspace(-1.0, 1.0, 18).reshape(6, 3)}

    @choreo.fragment("actor")
    def act(self, w, s):
        return jnp.tanh(s @ w if self.mixes else s * w[None])

    @choreo.fragment("learner")
    def learn(self, w, s):
        return w - 0.1 * jnp.mean(s, 0) * (jnp.sum(w) if self.mixes else 1.0)

    def iterate(self, env, carry, key):
        a = jax.vmap(self.act, (1, None), 1, axis_name="agent")(carry["w"], carry["s"])
        s = carry["s"] + 0.1 * (a if self.mixes else a.sum(1))
        return {"w": jax.vmap(self.learn, (1, None), 1, axis_name="agent")(carry["w"], s), "s": s}, {"m": jnp.sum(s)}


@pytest.mark.parametrize("mixes", [False, True])
def test_another_axis_as_long_as_the_agent_axis_is_refused_or_harmless(mixes):
    algo, env = TwoAxesOfEqualLength(mixes), Meeting(NUM_ENVS)
    try:
        run = run_of(InProcess(plan(algo, env, choreo.per_agent())), KEY)
    except PartitionError as refusal:
        assert "test_agents.py" in str(refusal)
    else:
        assert_close(run, reference_run(algo, env, KEY), 1e-5)
