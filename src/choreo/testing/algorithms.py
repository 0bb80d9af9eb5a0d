"""`check_algorithm`: find a part of an algorithm that is missing or wrong.

    from choreo.testing import check_algorithm
    check_algorithm(MyPPO())            # returns None, or raises an AlgorithmError that names the part

An algorithm is a frozen dataclass of hyper-parameters with these parts. It needs no base class.

    unroll                                        steps per environment and iteration; or, in place of this field, the method
    steps_per_iteration(env) -> int               environment steps of all environments in an iteration
    init(env, key) -> carry                       `carry.train` is the learned state
    iterate(env, carry, key) -> carry, metrics    one iteration, with functions marked by @choreo.fragment
    policy(train) -> params                       the parameters that acting needs
    act(params, obs, key, *, greedy) -> action, extras            for one environment
"""

import inspect
from typing import Any

import equinox as eqx
import jax
import numpy as np

from choreo import envs
from choreo.errors import AlgorithmError
from choreo.partition.carry import form_of, leaves_of, with_leaves
from choreo.partition.trace import Traced, trace
from choreo.runs import algorithm_checks
from choreo.runs.steps import env_steps_per_iteration, has_steps
from choreo.types import PyTree

PARTS = {
    "unroll": "a field: steps per environment and iteration (or a method steps_per_iteration(env) -> int)",
    "init": "init(env, key) -> carry, with `carry.train`",
    "iterate": "iterate(env, carry, key) -> (carry, metrics)",
    "policy": "policy(train) -> params",
    "act": "act(params, obs, key, *, greedy=False) -> (action, extras)",
}


def check_algorithm(algo: Any, env: envs.Env | None = None) -> None:
    """Run every part of `algo` on `env` (default: 8 CartPole environments); raise AlgorithmError if a part is wrong."""
    env = envs.make("jax:CartPole-v1", num_envs=8) if env is None else env
    require_parts(algo)
    env_steps_per_iteration(algo, env)
    key_init, key = jax.random.split(jax.random.key(0))
    form = form_of(lambda key: algo.init(env, key), key_init)
    algorithm_checks.check_carry(algo, form)
    if "greedy" in inspect.signature(algo.act).parameters:
        algorithm_checks.check_acts(algo, env, form.train)  # before the environment raises a less clear error
    traced = trace(algo, env)
    check_roles(algo, traced)
    algorithm_checks.check_metrics(algo, traced.metrics)
    carry = eqx.filter_jit(lambda key: algo.init(env, key))(key_init)
    carry = with_leaves(traced.carry, leaves_of(carry, traced.carry))
    check_iterate(algo, env, carry, key)
    check_act(algo, env, carry)


def require_parts(algo: Any) -> None:
    """Check that every part exists, that methods take the right number of arguments, and that `algo` is hashable. Calls no part."""
    name = type(algo).__name__
    missing = [f"`{part}`: {what}" for part, what in PARTS.items() if not _has(algo, part)]
    if missing:
        raise AlgorithmError(
            f"`{name}` lacks {len(missing)} of the parts of an algorithm.",
            fix="\n".join(["Add", *(f"  {line}" for line in missing)]),
        )
    for part, arguments in (("init", 2), ("iterate", 3), ("policy", 1), ("act", 3)):
        try:
            inspect.signature(getattr(algo, part)).bind(*range(arguments))
        except TypeError as error:
            raise AlgorithmError(
                f"`{name}.{part}` does not take {arguments} arguments: {error}.", fix=f"Write it as {PARTS[part]}."
            ) from error
    try:
        hash(algo)
    except TypeError as error:
        raise AlgorithmError(
            f"`{name}` cannot be hashed.", fix="Make it a @dataclass(frozen=True) of hashable fields."
        ) from error


def _has(algo: Any, part: str) -> bool:
    return has_steps(algo) if part == "unroll" else hasattr(algo, part)


def check_roles(algo: Any, traced: Traced) -> None:
    """Check that `iterate` calls a function with a role besides `env`; otherwise there would be nothing to distribute."""
    if not set(traced.iterate.roles) - {"env"}:
        raise AlgorithmError(
            f"No function called by `{type(algo).__name__}.iterate` carries a role.",
            fix='Mark them: @choreo.fragment("actor") on act, @choreo.fragment("learner") on learn.',
        )


def check_iterate(algo: Any, env: envs.Env, carry: PyTree, key: jax.Array) -> None:
    """Check that the learned state is finite after one iteration."""
    carry, _ = eqx.filter_jit(lambda carry, key: algo.iterate(env, carry, key))(carry, key)
    for path, leaf in jax.tree_util.tree_leaves_with_path(eqx.filter(carry.train, eqx.is_array)):
        numeric = not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if numeric and not np.isfinite(np.asarray(leaf, np.float64)).all():
            raise AlgorithmError(
                f"After one iteration `carry.train{jax.tree_util.keystr(path)}` is not finite.",
                fix="Lower the learning rate, or look for a division by zero in the loss.",
            )


def check_act(algo: Any, env: envs.Env, carry: PyTree) -> None:
    """Check the results of `act` for one environment: the action must be in the action space, and a memory must keep its form.

    With `greedy`, the action must be the same for every key.
    """
    name = type(algo).__name__
    params = algo.policy(carry.train)
    obs = jax.tree.map(lambda x: x[0], env.reset(env.keys(jax.random.key(1)))[1])
    memory = algo.initial_state(params) if hasattr(algo, "initial_state") else None
    args = (params, obs, jax.random.key(2), *(() if memory is None else (memory,)))
    takes, returned = ("", "(action, extras)") if memory is None else (", memory=None", "(action, extras, memory)")
    fix = f"Write it as act(params, obs, key{takes}, *, greedy=False) -> {returned}."
    for greedy in (False, True):
        try:
            out = algo.act(*args, greedy=greedy)
        except TypeError as error:
            raise AlgorithmError(f"`{name}.act` cannot be called: {error}.", fix=fix) from error
        expected = 2 if memory is None else 3
        if not isinstance(out, tuple) or len(out) != expected:
            raise AlgorithmError(f"`{name}.act` does not return {returned}.", fix=fix)
        algorithm_checks.check_action(name, out[0], env.action_space)
        if memory is not None:
            _same_form(name, memory, out[2], what="the memory that `act` returns")
    again = algo.act(*args[:2], jax.random.key(3), *args[3:], greedy=True)[0]
    if not np.array_equal(again, out[0]):
        raise AlgorithmError(f"`{name}.act(greedy=True)` depends on the key.", fix="Return the likeliest action.")


def _same_form(name: str, before: PyTree, after: PyTree, *, what: str) -> None:
    one, other = (jax.tree_util.tree_leaves_with_path(tree) for tree in (before, after))
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise AlgorithmError(
            f"`{name}`: {what} has a different structure than the memory it was given.",
            fix=f"Given {jax.tree.structure(before)}, returned {jax.tree.structure(after)}.",
        )
    for (path, x), (_, y) in zip(one, other, strict=True):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise AlgorithmError(
                f"`{name}`: {what} differs from the memory it was given at `{jax.tree_util.keystr(path)}`: "
                f"{x.dtype}{list(x.shape)} became {y.dtype}{list(y.shape)}.",
                fix="Keep shapes and types; write jnp.zeros((), jnp.int32) rather than 0.",
            )
