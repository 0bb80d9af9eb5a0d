"""If `act` or `learn` has no `@fragment`, a plan with several groups has a warning.

The warning names the group that runs the unmarked functions.
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import choreo
from choreo.algos.a2c import A2C
from choreo.errors import ChoreoWarning
from choreo.layouts import Group, Layout, coarse, fine, fused
from choreo.plans.build import plan
from offline import Imitation
from partition.ponds import Functions, Pond, learn, push, still


def pushes_unmarked(w, s):
    return w * jnp.tanh(s)


def learns_unmarked(w, path):
    slow = jnp.mean(path, (0, 1))
    return w - 0.05 * slow, slow, jnp.sum(slow)


def algorithm(act, learn):
    def go(env, carry, key):
        s = env.step(carry["s"], jax.vmap(act, (None, 0))(carry["w"], carry["s"]))
        w, slow, loss = learn(carry["w"], s[None])
        return {"w": w, "slow": slow, "s": s}, {"loss": loss}

    return Functions(still, go)


def learns(w, path):
    return learn(w, w, path)


def test_no_warning_if_actor_and_learner_are_marked():
    assert plan(algorithm(push, learns), Pond(), coarse(2)).warnings == ()


def test_no_warning_in_a_layout_of_one_group():
    assert plan(algorithm(pushes_unmarked, learns_unmarked), Pond(), fused()).warnings == ()


def test_gradient_and_update_count_as_learner():
    env = choreo.envs.make("jax:CartPole-v1", 4)
    assert plan(A2C(unroll=2), env, coarse(2)).warnings == ()


def test_the_warning_names_an_unmarked_learner_and_its_line():
    (warning,) = plan(algorithm(push, learns_unmarked), Pond(), coarse(2)).warnings
    assert re.sub(r"[^( ]*test_forgotten_marks.py:\d+", "FILE:LINE", warning) == (
        "No fragment has the role `learner`, for which coarse has the group `buffer+learner`. Unmarked code runs where "
        "the fewest bytes cross between sites: learns_unmarked (FILE:LINE), algorithm.<locals>.go (FILE:LINE) at `buffer+learner`. "
        'Mark the function that should run at `buffer+learner`: @choreo.fragment("learner").'
    )


def test_the_warning_names_an_unmarked_actor_and_its_line():
    """In the layout `fine`, workers should run only environments. Here they also run the unmarked actor."""
    (warning,) = plan(algorithm(pushes_unmarked, learns), Pond(), fine(2)).warnings
    assert "No fragment has the role `actor`, for which fine has the group `actor+buffer+learner`." in warning
    assert re.search(r"pushes_unmarked \(\S*test_forgotten_marks.py:\d+\)", warning)
    assert warning.endswith('@choreo.fragment("actor").')


def test_warnings_are_printed_and_plans_that_differ_only_in_warnings_are_equal():
    layout = Layout(Group("env"), Group("actor"), Group("learner"))
    planned = plan(algorithm(pushes_unmarked, learns_unmarked), Pond(), layout)
    assert len(planned.warnings) == 2
    text = " ".join(str(planned).split())
    assert "Warning: No fragment has the role `actor`" in text and "Warning: No fragment has the role `learner`" in text
    assert max(map(len, str(planned).splitlines())) <= 100
    assert replace(planned, warnings=()) == planned


class Unmarked(A2C):
    def act(self, params, obs, key, *, greedy=False):  # pyright: ignore[reportIncompatibleVariableOverride]
        with choreo.testing.unmarked():
            return super().act(params, obs, key, greedy=greedy)


def test_a_run_warns_about_an_unmarked_actor():
    with pytest.warns(ChoreoWarning, match="No fragment has the role `actor`, for which coarse has the group `env"):
        choreo.train(
            Unmarked(unroll=2),
            "jax:CartPole-v1",
            steps=4,
            num_envs=2,
            layout=coarse(1),
            runtime="inprocess",
        )


def test_an_algorithm_that_steps_no_environment_has_no_forgotten_actor():
    shown = plan(Imitation(), choreo.envs.make("jax:CartPole-v1", 4), coarse(2))
    assert not shown.warnings
