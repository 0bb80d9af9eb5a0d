"""Which programs `trace` refuses, which env axes it proposes for the carry, and what it returns."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from choreo.errors import AlgorithmError, PartitionError
from choreo.partition.trace import trace
from partition.ponds import WALK, Functions, Pond, reset, walk


def refusal(go, start=reset) -> str:
    with pytest.raises(AlgorithmError) as error:
        trace(Functions(start, go), Pond())
    return str(error.value)


class TestRefused:
    def test_a_leaf_that_changes_its_shape_is_refused(self):
        text = refusal(lambda env, carry, key: (carry | {"w": jnp.ones(4)}, {}))
        assert text == (
            "`Functions.iterate` must return a carry of the same form: `carry['w']` goes in as float32[3] and comes back as "
            "float32[4].\nMake `init` and `iterate` agree on shape and dtype."
        )

    def test_a_leaf_that_changes_its_dtype_is_refused(self):
        text = refusal(lambda env, carry, key: (carry | {"slow": jnp.zeros(3, jnp.int32)}, {}))
        assert "`carry['slow']` goes in as float32[3] and comes back as int32[3]." in text

    def test_a_number_in_place_of_an_array_is_refused(self):
        text = refusal(lambda env, carry, key: (carry | {"slow": 0.0}, {}))
        assert "`carry['slow']` goes in as float32[3] and comes back as the float 0.0." in text

    def test_a_carry_with_a_missing_leaf_is_refused(self):
        text = refusal(lambda env, carry, key: ({"s": carry["s"], "slow": carry["slow"]}, {}))
        lines = text.splitlines()
        assert lines[0] == "`Functions.iterate` must return a carry of the same structure as `init` returns."
        assert lines[1].startswith("init: ") and "'w'" in lines[1]
        assert lines[2].startswith("iterate: ") and "'w'" not in lines[2]

    def test_a_carry_with_an_additional_leaf_is_refused(self):
        assert "must return a carry of the same structure" in refusal(
            lambda env, carry, key: (carry | {"z": jnp.ones(2)}, {})
        )

    @pytest.mark.parametrize(
        ("result", "name"),
        [
            (lambda c: c, "dict"),
            (lambda c: None, "NoneType"),
            (lambda c: (c, {}, 1), "tuple"),
            (lambda c: [c, {}], "list"),
        ],
    )
    def test_a_result_that_is_not_a_pair_is_refused(self, result, name):
        text = refusal(lambda env, carry, key: result(carry))
        assert (
            text == f"`Functions.iterate` returned {name}, not (carry, metrics).\nEnd it with `return carry, metrics`."
        )

    @pytest.mark.parametrize(
        "metrics", [jnp.ones(()), [jnp.ones(())], None, {3: jnp.ones(())}], ids=["array", "list", "None", "key"]
    )
    def test_metrics_that_are_not_a_dict_with_names_are_refused(self, metrics):
        text = refusal(lambda env, carry, key: (carry, metrics))
        assert text.startswith("`Functions.iterate` returns ") and text.endswith(
            '; it must return its metrics as a flat dict of arrays.\nFor example `return carry, {"loss": loss}`.'
        )

    def test_nested_metrics_are_refused(self):
        """Metrics must be flat, because a nested metric could get the same name as another metric."""
        nested = {"b": {"x": jnp.ones(()), "y": jnp.zeros(())}, "a": jnp.ones(())}
        assert "must return its metrics as a flat dict of arrays" in refusal(lambda env, carry, key: (carry, nested))

    def test_metrics_that_are_not_arrays_are_refused(self):
        for value in ("good", None):
            text = refusal(lambda env, carry, key, value=value: (carry, {"a": value, "loss": jnp.ones(())}))
            assert "must return its metrics as a flat dict of arrays" in text

    def test_an_array_as_the_result_is_refused(self):
        assert "not (carry, metrics)" in refusal(lambda env, carry, key: jnp.ones(3))

    def test_tracing_with_disable_jit_is_refused(self):
        with jax.disable_jit(), pytest.raises(PartitionError) as error:
            trace(WALK, Pond())
        assert str(error.value) == (
            "jax.disable_jit() is on, and hides fragments from the tracer.\n"
            "Do not use jax.disable_jit() while Choreo traces; to debug, use jax.debug.print or call algo.iterate yourself."
        )

    def test_an_init_whose_structure_depends_on_the_number_of_environments_is_refused(self):
        def start(env, key):
            return reset(env, key) | {f"extra{i}": jnp.ones(2) for i in range(env.num_envs)}

        with pytest.raises((AlgorithmError, PartitionError), match="number of environments"):
            trace(Functions(start, lambda env, carry, key: (carry, {})), Pond())


def axes(start, env) -> dict[str, int | None]:
    traced = trace(Functions(start, lambda env, carry, key: (carry, {})), env)
    names = traced.iterate.in_names[: len(traced.carry_axes)]
    return dict(zip(names, traced.carry_axes, strict=True))


class TestProposals:
    """The env axes that `trace` proposes for the leaves of the carry."""

    def test_a_hidden_size_that_happens_to_equal_num_envs_is_not_the_env_axis(self):
        def start(env, key):
            return {
                "w": jnp.ones((6, 6)),
                "s": jnp.ones((env.num_envs, 6)),
                "t": jnp.ones((6, env.num_envs)),
                "h": jnp.ones(6),
            }

        assert axes(start, Pond(num_envs=6)) == {"['h']": None, "['s']": 0, "['t']": 1, "['w']": None}

    def test_an_axis_whose_length_is_not_exactly_num_envs_is_not_the_env_axis(self):
        def start(env, key):
            n = env.num_envs
            return {
                "more": jnp.ones(n + 1),
                "pairs": jnp.ones((n, n)),
                "square": jnp.ones(n * n),
                "twice": jnp.ones(2 * n),
                "one": jnp.ones(n),
            }

        found = axes(start, Pond())
        assert found == {"['more']": None, "['one']": 0, "['pairs']": None, "['square']": None, "['twice']": None}

    def test_an_array_whose_rank_depends_on_num_envs_has_no_env_axis(self):
        def start(env, key):
            return {
                "x": jnp.ones((env.num_envs, 2) if env.num_envs > 6 else (env.num_envs,)),
                "n": jnp.int32(env.num_envs),
            }

        assert axes(start, Pond(num_envs=6)) == {"['n']": None, "['x']": None}

    def test_keys_have_an_env_axis(self):
        assert axes(lambda env, key: {"k": env.keys(key), "one": key}, Pond()) == {"['k']": 0, "['one']": None}

    def test_the_env_axis_of_a_single_environment_is_found(self):
        assert axes(reset, Pond(num_envs=1)) == {"['s']": 0, "['slow']": None, "['w']": None}


class TestTraced:
    def test_a_trace_has_the_names_of_leaves_and_metrics_and_the_roles(self):
        traced = trace(WALK, Pond())
        assert traced.iterate.in_names == ("['s']", "['slow']", "['w']", "key", "iteration")
        assert traced.iterate.out_names == ("['s']", "['slow']", "['w']", "loss")
        assert traced.init.in_names == ("key",) and traced.init.out_names == ("['s']", "['slow']", "['w']")
        assert traced.iterate.roles == ["actor", "env", "learner"] and traced.init.roles == ["env"]
        assert (traced.num_envs, traced.iterate.body.num_carry) == (6, 3)

    def test_static_leaves_of_the_carry_are_kept(self):
        def start(env, key):
            return reset(env, key) | {"net": eqx.nn.MLP(2, 2, 2, 1, activation=jax.nn.relu, key=key)}

        def go(env, carry, key):
            after, metrics = walk(env, {k: carry[k] for k in ("w", "slow", "s")}, key)
            return after | {"net": carry["net"]}, metrics | {"out": jnp.sum(carry["net"](jnp.ones(2)))}

        traced = trace(Functions(start, go), Pond())
        assert eqx.filter(traced.carry["net"], eqx.is_inexact_array, inverse=True).activation is not None
        assert traced.iterate.out_names[-2:] == ("loss", "out")

    def test_every_metric_keeps_its_name(self):
        def go(env, carry, key):
            return carry, {"b": jnp.ones(2), "a": jnp.ones(3), "c": jnp.ones(())}

        graph = trace(Functions(reset, go), Pond()).iterate
        shapes = [out.aval.shape for out in graph.body.outs[graph.body.num_carry :]]
        assert dict(zip(graph.out_names[graph.body.num_carry :], shapes, strict=True)) == {
            "a": (3,),
            "b": (2,),
            "c": (),
        }

    def test_tracing_computes_nothing(self):
        ran = []

        def go(env, carry, key):
            jax.debug.callback(lambda: ran.append("iterate"))
            return carry, {"m": jnp.ones(())}

        def start(env, key):
            jax.debug.callback(lambda: ran.append("init"))
            return reset(env, key)

        trace(Functions(start, go), Pond())
        jax.effects_barrier()
        assert ran == []
