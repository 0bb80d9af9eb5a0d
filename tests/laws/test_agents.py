"""Law levels 1 and 3 for layouts in which one group divides the agents (`per_agent`), and another group may divide environments.

In one process, the result equals the reference, `jax.jit(iterate)`, up to 1e-5. Worker processes give the same bits as one
process. Axes are told apart by their names: all of them may have the same length.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo import envs
from choreo.errors import LayoutError, PartitionError
from choreo.partition.lattice import WHOLE, Mixes, Size
from choreo.partition.on_host import OnHost
from choreo.partition.program import Segment
from choreo.plans.build import plan
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from laws.reference import assert_close, assert_same_bits, reference_run, run_of

KEY = jax.random.key(3)
AGENTS, NUM_ENVS, ACTIONS = 2, 6, 3


@dataclass(frozen=True)
class Meeting:
    """All agents see a number, and are rewarded if all choose the action with that number."""

    num_envs: int
    agents: int = AGENTS
    actions: int = ACTIONS
    name = "meeting"

    @property
    def observation_space(self):
        return gymnasium.spaces.Box(0, 1, (self.actions,), np.float32)

    @property
    def action_space(self):
        return gymnasium.spaces.Discrete(self.actions)

    def with_num_envs(self, num_envs):
        return replace(self, num_envs=num_envs)

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

    def _observe(self, key):
        number = jax.random.randint(key, (), 0, self.actions)
        return jnp.tile(jax.nn.one_hot(number, self.actions)[None], (self.agents, 1))  # [agent, action]


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
        table = jnp.zeros((env.actions, env.actions))
        return Carry(table if self.shared else jnp.stack([table] * env.agents), *env.reset(env.keys(key)))

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
            action = act(carry.train, obs, jax.random.split(key, env.agents))
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
    assert the_plan.sites.replicas == {"env": 1, "actor+buffer+learner": AGENTS}
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
        "The layout divides an axis 'member', but no fragment is called directly under a vmap of that axis_name.\n"
        'Call the fragments of one member under jax.vmap(..., axis_name="member"). If scan, jit, grad or checkpoint stands '
        "between the vmap and the fragment, make the function that you give to vmap a fragment."
    )


def test_vmaps_of_one_name_and_different_lengths_are_refused():
    class TwoLengths(Bandits):
        def iterate(self, env, carry, key):
            carry, metrics = super().iterate(env, carry, key)
            more = jax.vmap(self.act, (None, None, 0), axis_name="agent")(
                carry.train[0], carry.obs[:, 0], jax.random.split(key, 5)
            )
            return carry, metrics | {"more": jnp.mean(more)}

    with pytest.raises(LayoutError) as refusal:
        plan(TwoLengths(), Meeting(NUM_ENVS), choreo.per_agent())
    assert str(refusal.value) == (
        "Fragments are called under vmaps of the axis 'agent' with the lengths 2 and 5.\n"
        "Give axes of different lengths different names, or use a layout that does not divide this axis."
    )


BOTH = {
    "per_agent x2": choreo.per_agent(workers=2),
    "three groups": choreo.Layout(
        choreo.Group("env", replicas=2), choreo.Group("actor", axis="agent"), choreo.Group("learner")
    ),
    "acting with environments": choreo.Layout(
        choreo.Group("env", "actor", replicas=2), choreo.Group("learner", axis="agent")
    ),
    "more workers than agents": choreo.Layout(
        choreo.Group("env", replicas=4),
        choreo.Group("actor", axis="agent", replicas=2),
        choreo.Group("learner", axis="agent"),
    ),
}
"""Layouts that divide environments and agents together."""


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("layout", BOTH)
def test_environments_and_agents_divided_together_give_the_reference_result(layout, shared):
    """The environments are as many as the agents, as the numbers that an agent sees, and as the steps: nothing tells axes apart
    by their lengths."""
    algo, env = Bandits(shared=shared, unroll=4), Meeting(4, agents=4, actions=4)
    the_plan = plan(algo, env, BOTH[layout])
    run = run_of(InProcess(the_plan), KEY)
    assert_close(run, reference_run(algo, env, KEY), 1e-5)


def test_workers_that_divide_environments_and_agents_give_the_same_bits():
    the_plan = plan(Bandits(), Meeting(NUM_ENVS), choreo.per_agent(workers=2))
    assert the_plan.sites.replicas == {"env": 2, "actor+buffer+learner": AGENTS}
    assert_same_bits(run_of(Local(the_plan), KEY), run_of(InProcess(the_plan), KEY))


@pytest.mark.parametrize("workers", [1, 2])
def test_as_many_environments_as_agents_give_the_reference_result(workers):
    algo, env = Bandits(), Meeting(AGENTS)
    run = run_of(InProcess(plan(algo, env, choreo.per_agent(workers))), KEY)
    assert_close(run, reference_run(algo, env, KEY), 1e-5)


class MeetingInPython(gymnasium.Env):
    """`Meeting` for two agents, as a Gymnasium environment. An episode lasts three steps."""

    observation_space = gymnasium.spaces.Box(0, 1, (AGENTS, ACTIONS), np.float32)
    action_space = gymnasium.spaces.MultiDiscrete([ACTIONS] * AGENTS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        reward = float((np.asarray(action) == self.number).all())
        self.steps += 1
        return self._observe(), reward, False, self.steps == 3, {}

    def _observe(self):
        self.number = int(self.np_random.integers(ACTIONS))
        return np.tile(np.eye(ACTIONS, dtype=np.float32)[self.number], (AGENTS, 1))


@dataclass(frozen=True)
class BanditsInPython(Bandits):
    """As `Bandits`, for environments in Python, which have one reward for all agents."""

    def init(self, env, key):
        return Carry(jnp.zeros((AGENTS, ACTIONS, ACTIONS)), *env.reset(env.keys(key)))

    def iterate(self, env, carry, key):
        def step(state, key):
            env_state, obs = state
            act = jax.vmap(self.act, (0, 1, 0), 1, axis_name="agent")
            action = act(carry.train, obs, jax.random.split(key, AGENTS))
            env_state, timestep = env.step(env_state, action)
            return (env_state, timestep.obs), (obs, action, timestep.reward)

        state, (obs, action, reward) = jax.lax.scan(
            step, (carry.env_state, carry.obs), jax.random.split(key, self.unroll)
        )
        learn = jax.vmap(self.learn, (0, 2, 2, None), axis_name="agent")
        return Carry(learn(carry.train, obs, action, reward), *state), {"reward": jnp.mean(reward)}


@pytest.mark.parametrize("num_envs", [AGENTS, 4])
def test_python_environments_and_agents_divided_together_give_the_result_of_one_program(num_envs):
    """As many environments as agents, in all or at each worker."""
    algo, env = BanditsInPython(), envs.from_factory(MeetingInPython, num_envs)
    whole = run_of(InProcess(plan(algo, env, choreo.fused())), KEY)
    divided = run_of(InProcess(plan(algo, env, choreo.per_agent(workers=2))), KEY)
    assert_close(divided, whole, 1e-5)


def test_a_host_method_has_no_way_along_a_mapped_axis():
    """Even if there are as many environments as agents: axis 0 of a host method's arrays counts environments."""
    (step,) = jax.make_jaxpr(jnp.sin)(jnp.zeros(AGENTS)).eqns
    OnHost(step, [WHOLE], Size(AGENTS, 1))
    with pytest.raises(Mixes, match="`agent`"):
        OnHost(step, [WHOLE], Size(AGENTS, 1, "agent"))


def test_a_python_environment_cannot_be_divided_along_agents():
    layout = choreo.Layout(choreo.Group("env", "actor", axis="agent"), choreo.Group("learner"))
    with pytest.raises(PartitionError) as refusal:
        plan(BanditsInPython(), envs.from_factory(MeetingInPython, 4), layout)
    assert str(refusal.value).splitlines()[0] == (
        "The host fragment `step` cannot run on `env+actor`, which is divided along the axis 'agent'. Each object in Python "
        "holds whole environments, so this axis cannot be divided."
    )
    assert str(refusal.value).splitlines()[-1] == "Put the role `env` into a group without this axis."


def test_each_agent_gets_only_its_own_part_of_what_crosses():
    """Four environments at two workers and four agents: a message from a worker to an agent has two environments of one agent."""
    the_plan = plan(Bandits(), Meeting(4, agents=4), choreo.per_agent(workers=2))
    crossings = {crossing.moves[0].label: crossing for crossing in the_plan.costs().iterate.crossings}
    obs = crossings["obs"]
    assert (obs.num_messages, obs.nbytes) == (2 * 4, 4 * 4 * ACTIONS * 4)
    learner = next(step for step in the_plan.iterate.steps if isinstance(step, Segment) and "learner" in step.roles)
    table = next(given for given in learner.ins if given.label == "train")
    assert table.axis == 0, "an agent's site holds only the table of its agent"


@dataclass(frozen=True)
class ActsForOneEnvironment(Bandits):
    """As `Bandits`, but `act` is for one agent in one environment, so that two vmaps are around it."""

    environments_inside: bool = True
    """Whether the vmap over environments is inside of the vmap over agents."""

    @choreo.fragment("actor")
    def act_once(self, table, obs, key):
        return jax.random.categorical(key, obs @ table)

    def iterate(self, env, carry, key):
        keys = jax.random.split(key, (env.agents, env.num_envs))
        if self.environments_inside:
            act = jax.vmap(jax.vmap(self.act_once, (None, 0, 0)), (0, 1, 0), 1, axis_name="agent")
        else:
            act = jax.vmap(jax.vmap(self.act_once, axis_name="agent"), (None, 0, 1))
        action = act(carry.train, carry.obs, keys)
        env_state, obs, reward = env.step(carry.env_state, action)
        data = carry.obs[None], action[None], reward[None]
        train = jax.vmap(self.learn, (0, 2, 2, 2), axis_name="agent")(carry.train, *data)
        return Carry(train, env_state, obs), {"reward": jnp.mean(reward)}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("layout", ["per_agent x2", "three groups"])
def test_a_fragment_under_two_vmaps_is_refused_or_gives_the_reference_result(layout, inside):
    algo, env = ActsForOneEnvironment(environments_inside=inside), Meeting(4, agents=4, actions=4)
    try:
        run = run_of(InProcess(plan(algo, env, BOTH[layout])), KEY)
    except PartitionError as refusal:
        assert "test_agents.py" in str(refusal)
    else:
        assert_close(run, reference_run(algo, env, KEY), 1e-5)


class MeanOverBoth(Bandits):
    """The metric is one mean over environments and agents."""

    def iterate(self, env, carry, key):
        carry, metrics = super().iterate(env, carry, key)
        return carry, metrics | {"mean": jnp.mean(carry.obs)}


class MeanInTwoSteps(Bandits):
    """The same mean, over environments first."""

    def iterate(self, env, carry, key):
        carry, metrics = super().iterate(env, carry, key)
        return carry, metrics | {"mean": jnp.mean(jnp.mean(carry.obs, axis=0))}


def test_a_mean_over_both_axes_at_once_is_refused_with_a_remedy_that_works():
    layout = choreo.Layout(choreo.Group("env", "actor", replicas=2), choreo.Group("learner", axis="agent"))
    env = Meeting(4, agents=4)
    run = run_of(InProcess(plan(MeanInTwoSteps(), env, layout)), KEY)
    assert_close(run, reference_run(MeanInTwoSteps(), env, KEY), 1e-5)
    try:
        run = run_of(InProcess(plan(MeanOverBoth(), env, layout)), KEY)
    except PartitionError as refusal:
        assert "needs all environments and the whole axis 'agent' together" in str(refusal)
        assert "jnp.mean(jnp.mean(x, axis=0))" in str(refusal)
    else:
        assert_close(run, reference_run(MeanOverBoth(), env, KEY), 1e-5)


@dataclass(frozen=True)
class TransposedFragment(Bandits):
    """The gradient of a fragment under the vmap of the agents: the transposed program has the fragment's name, but other operands."""

    @choreo.fragment("learner")
    def loss(self, obs, table):
        return jnp.sum(jnp.sin(obs)) * jnp.sum(table)

    def iterate(self, env, carry, key):
        carry, metrics = super().iterate(env, carry, key)
        total = lambda table: jnp.sum(jax.vmap(self.loss, (1, 0), axis_name="agent")(carry.obs, table))  # noqa: E731
        return carry._replace(train=carry.train - 0.01 * jax.grad(total)(carry.train)), metrics


@pytest.mark.parametrize("layout", BOTH)
def test_a_transposed_fragment_is_refused_or_gives_the_reference_result(layout):
    algo, env = TransposedFragment(), Meeting(4, agents=4, actions=4)
    try:
        run = run_of(InProcess(plan(algo, env, BOTH[layout])), KEY)
    except PartitionError as refusal:
        assert "test_agents.py" in str(refusal)
    else:
        assert_close(run, reference_run(algo, env, KEY), 1e-5)


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


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mixes", [False, True])
def test_another_axis_as_long_as_the_agent_axis_is_refused_or_harmless(mixes, workers):
    algo, env = TwoAxesOfEqualLength(mixes), Meeting(NUM_ENVS)
    try:
        run = run_of(InProcess(plan(algo, env, choreo.per_agent(workers))), KEY)
    except PartitionError as refusal:
        assert "test_agents.py" in str(refusal)
    else:
        assert_close(run, reference_run(algo, env, KEY), 1e-5)
