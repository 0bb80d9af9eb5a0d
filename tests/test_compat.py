"""Tests of the parts of JAX that Choreo uses although they are not documented.

If a new release of JAX breaks something, start here.
"""

import subprocess
import sys

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest

from choreo import _compat


def eqns_of(fn, *args):
    return jax.make_jaxpr(fn)(*args).jaxpr.eqns


def only(fn, *args) -> jec.JaxprEqn:
    (eqn,) = eqns_of(fn, *args)
    return eqn


class TestVmaps:
    """`enclosing_vmaps` finds the vmaps around a call. Choreo records these vmaps for each call of a fragment."""

    def seen(self, transform, *args):
        found = []

        def look(x, y):
            found.append((x.shape, _compat.enclosing_vmaps((x, y))))
            return x

        transform(look)(*args)
        return found[0]

    def test_without_a_vmap_none_is_found(self):
        assert self.seen(lambda f: f, jnp.ones(3), jnp.ones(3)) == ((3,), ())

    def test_a_vmap_is_found_with_its_size_and_axes(self):
        shape, vmaps = self.seen(lambda f: jax.vmap(f, (0, None)), jnp.ones((5, 3)), jnp.ones(2))
        assert shape == (3,)
        assert vmaps == (_compat.Vmap(None, 5, (0, None)),)

    def test_a_vmap_is_found_with_its_axis_name(self):
        _, vmaps = self.seen(lambda f: jax.vmap(f, (1, 0), axis_name="agent"), jnp.ones((3, 5)), jnp.ones((5, 2)))
        assert vmaps == (_compat.Vmap("agent", 5, (1, 0)),)

    def test_two_vmaps_are_listed_innermost_first(self):
        nested = lambda f: jax.vmap(jax.vmap(f, (0, None)), (0, 0), axis_name="outer")  # noqa: E731
        shape, vmaps = self.seen(nested, jnp.ones((2, 5, 3)), jnp.ones((2, 4)))
        assert shape == (3,)
        assert vmaps == (_compat.Vmap(None, 5, (0, None)), _compat.Vmap("outer", 2, (0, 0)))

    @pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
    def test_inside_a_jit_the_vmap_outside_is_not_seen(self, transform):
        """JAX traces the jitted function once, with the shapes inside the vmap. Then JAX applies the vmap to the traced program."""
        _, vmaps = self.seen(lambda f: transform(jax.jit(f)), jnp.ones((5, 3)), jnp.ones((5, 3)))
        assert vmaps == ()


def test_the_axis_name_of_a_vmap_is_bound_also_inside_a_jit():
    seen = []

    def look(x):
        seen.append(_compat.bound_axis_names())
        return x

    jax.jit(look)(1.0)
    jax.vmap(look, axis_name="shard")(jnp.ones(2))
    jax.vmap(jax.jit(lambda x: look(x)), axis_name="shard")(jnp.ones(2))
    assert seen == [(), ("shard",), ("shard",)]


def test_a_jit_keeps_its_name():
    def inner(x):
        return x + 1

    inner.__name__ = inner.__qualname__ = "choreo:actor:act:3"
    fn = jax.jit(inner)
    assert _compat.call_name(only(fn, 1.0)) == "choreo:actor:act:3"
    assert _compat.call_name(only(jax.vmap(fn), jnp.ones(2))) == "choreo:actor:act:3"
    assert _compat.call_name(only(jnp.sin, 1.0)) is None

    (scan,) = eqns_of(lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, length=3), 1.0)
    names = [_compat.call_name(e) for e in _compat.scan_params(scan).body.jaxpr.eqns]
    assert "choreo:actor:act:3" in names


def test_scan_params_reads_the_parameters_of_a_scan():
    def fn(a, xs):
        return jax.lax.scan(lambda c, x: (c + x * a, c), jnp.float32(0.0), xs, reverse=True)

    (scan,) = [e for e in eqns_of(fn, jnp.float32(2.0), jnp.ones(4)) if e.primitive.name == "scan"]
    p = _compat.scan_params(scan)
    assert (p.num_consts, p.num_carry, p.length, p.reverse) == (1, 1, 4, True)
    assert len(p.body.jaxpr.invars) == 3 and len(p.body.jaxpr.outvars) == 2


def test_while_params_reads_the_parameters_of_a_while_loop():
    def fn(n, a):
        return jax.lax.while_loop(lambda c: c < n, lambda c: c * a, jnp.float32(1.0))

    (loop,) = [e for e in eqns_of(fn, jnp.float32(9.0), jnp.float32(2.0)) if e.primitive.name == "while"]
    p = _compat.while_params(loop)
    assert (p.num_cond_consts, p.num_body_consts) == (1, 1)
    assert len(p.cond.jaxpr.outvars) == 1


@jax.custom_jvp
def custom_jvp(x):
    return jnp.sin(x)


custom_jvp.defjvp(lambda primals, tangents: (custom_jvp(*primals), tangents[0]))


@jax.custom_vjp
def custom_vjp(x):
    return jnp.sin(x)


custom_vjp.defvjp(lambda x: (custom_vjp(x), None), lambda _, g: (g,))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: custom_jvp, lambda f: custom_vjp])
def test_the_program_inside_a_wrapper_can_be_evaluated(wrap):
    eqn = only(wrap(lambda x: jnp.sin(x)), jnp.float32(0.5))
    inner = _compat.inner_jaxpr(eqn)
    assert inner is not None, (
        f"_compat.INLINED has no entry for {eqn.primitive.name}, or the entry names a wrong parameter"
    )
    assert _compat.eval_jaxpr(inner, [jnp.float32(0.5)]) == [jnp.sin(jnp.float32(0.5))]


def test_every_equation_can_be_bound_again():
    """Choreo uses `bind` to emit the equations of a program at the block size of a replica."""

    def fn(x):
        y = jax.lax.scan(lambda c, v: (c + v, c * v), jnp.float32(0.0), x)[1]
        y = jax.lax.cond(y.sum() > 0, jnp.sin, jnp.cos, custom_jvp(y))
        y = jax.lax.while_loop(lambda v: v.max() < 3, lambda v: v + 1, custom_vjp(y))
        return jax.checkpoint(jnp.tanh)(jax.jit(jnp.sort)(y))

    x = jnp.arange(4, dtype=jnp.float32)
    closed = jax.make_jaxpr(fn)(x)
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)) | {closed.jaxpr.invars[0]: x}
    for eqn in closed.jaxpr.eqns:
        values = [v.val if isinstance(v, jec.Literal) else env[v] for v in eqn.invars]
        env.update(zip(eqn.outvars, _compat.bind(eqn, eqn.params, values), strict=True))
    assert (env[closed.jaxpr.outvars[0]] == fn(x)).all()


def test_inner_jaxprs_finds_the_branches():
    (cond,) = [
        e for e in eqns_of(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), 1.0) if e.primitive.name == "cond"
    ]
    assert len(list(_compat.inner_jaxprs(cond))) == 2


def test_where_names_the_users_line():
    def mine(x):
        return jnp.sin(x)

    place = _compat.where(only(mine, 1.0))
    assert "test_compat.py:" in place and place.endswith("mine)"), place


def test_is_key_is_true_only_for_types_of_random_keys():
    assert _compat.is_key(jax.random.key(0).dtype)
    assert not _compat.is_key(jnp.uint32)


def test_clients_exist_once_jax_has_listed_its_devices():
    jax.devices()
    assert _compat.clients_exist()


def test_gloo_listens_at_the_address_it_is_given():
    """No host name resolves to 127.0.0.2, so Gloo listens at this address only because of `use_gloo_at`.

    The test needs a new process, because JAX makes its devices only once.
    """
    script = (
        "import socket, jax, psutil\n"
        "from choreo._compat import use_gloo_at\n"
        "with socket.create_server(('127.0.0.3', 0)) as free:\n"
        "    coordinator = '127.0.0.3:%d' % free.getsockname()[1]\n"
        "jax.distributed.initialize(coordinator, num_processes=1, process_id=0, coordinator_bind_address=coordinator)\n"
        "use_gloo_at('127.0.0.2')\n"
        "assert jax.numpy.ones(2).sum() == 2\n"
        "print(*sorted(s.laddr.ip for s in psutil.Process().net_connections('inet') if s.status == 'LISTEN'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "127.0.0.2 ::ffff:127.0.0.3\n", done.stderr


def test_innermost_skips_the_python_checks_of_a_compiled_function():
    compiled = jax.jit(lambda x, y: (x + y, x)).lower(jnp.ones(3), np.ones(3, np.float32)).compile()
    compiled(jnp.ones(3), np.ones(3, np.float32))
    call = _compat.innermost(compiled)
    assert type(call).__module__ != "jax._src.stages"
    np.testing.assert_array_equal(call(jnp.full(3, 2.0), np.ones(3, np.float32))[0], [3, 3, 3])
    with pytest.raises(TypeError, match="compiled"):  # `call` accepts only the types for which it was compiled
        call(jnp.ones(4), np.ones(4, np.float32))


def test_the_two_programs_of_split_known_compute_the_same_as_the_whole():
    """`split_known` returns two programs, `first` and `rest`. `rest(*first(*known), *others)` equals `whole(*known, *others)`."""
    whole = jax.make_jaxpr(jax.jit(lambda a, b, c: (jnp.sin(a) * b, jnp.cos(a), b + c)))(1.0, 2.0, 3.0)
    first, rest, types = _compat.split_known(whole, [True, False, False])
    between = _compat.eval_jaxpr(first, [1.0])
    assert [x.shape for x in types] == [x.shape for x in between]
    assert _compat.eval_jaxpr(rest, [*between, 2.0, 3.0]) == _compat.eval_jaxpr(whole, [1.0, 2.0, 3.0])
