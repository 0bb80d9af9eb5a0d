"""Programs that make and use random keys in odd ways.

Random numbers must not depend on how environments are divided: key e of E keys belongs to environment e, at every site.
"""

import jax
import jax.numpy as jnp

from laws.odd_programs.program import E, act_random, acts, learn, program, state_and_weights


@program(
    lambda env, key: (
        state_and_weights(env, key) | {"key": env.keys(key), "one": key, "flag": jnp.zeros(E, bool), "i": jnp.arange(E)}
    )
)
def keys_flags_and_integers(env, c, key):
    """The carry has a key, a flag and an integer per environment, and one key for all. Each replica needs its own block of the
    keys per environment, and all replicas need the one key."""
    a = jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], c["key"])
    s = env.step(c["s"], jnp.where(jnp.tile(c["flag"][:, None], (1, 3)), a, -a))
    return {
        "s": s,
        "w": learn(c["w"], s),
        "key": jax.vmap(jax.random.fold_in)(c["key"], c["i"]),
        "one": jax.random.fold_in(c["one"], 3),
        "flag": s[:, 0] > 0,
        "i": c["i"] + jnp.where(c["flag"], 1, 2),
    }, {"m": jnp.sum(c["i"])}


@program()
def keys_by_split(env, c, key):
    """`split(key, E)` and a draw of shape [E, 3]. A replica that splits the key, or draws, for its own number of
    environments gets different numbers."""
    k1, k2 = jax.random.split(key)
    a = jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], env.keys(k1))
    s = env.step(c["s"], a + 0.1 * jax.random.normal(k2, (E, 3)))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def keys_by_fold_in(env, c, key):
    """Keys by `fold_in` of the index of the environment. If each replica counted its own environments from 0, all
    blocks would get the same keys."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(E))
    s = env.step(c["s"], jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], keys))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def keys_in_another_order(env, c, key):
    """The order of the keys is reversed, and a random permutation of 0 to E - 1 is added to the actions. A naive compiler would
    let each replica reverse, and permute, within its own block."""
    a = jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], env.keys(key)[::-1])
    s = env.step(c["s"], a + jax.random.permutation(key, E).astype(a.dtype)[:, None] * jnp.ones((1, 3)))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def keys_from_environments(env, c, key):
    """The key of each environment depends on its state. A replica has only the states of its own block, so it must make the
    keys of this block itself."""
    keys = jax.vmap(lambda row: jax.random.fold_in(key, (100 * row[0]).astype(jnp.int32)))(c["s"])
    s = env.step(c["s"], jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], keys))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def keys_of_the_rbg_generator(env, c, key):
    """A mapped fragment draws with keys of the generator `rbg`. Under `vmap`, such draws depend on the whole batch."""
    keys = jax.random.split(jax.random.key(jax.random.randint(key, (), 0, 99), impl="rbg"), E)
    s = env.step(c["s"], jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], keys))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def glue_draws_with_rbg_keys(env, c, key):
    """Glue draws under `vmap` with keys of the generator `rbg`: row e of the batch differs from a draw with key e alone."""
    keys = jax.random.split(jax.random.key(jax.random.randint(key, (), 0, 99), impl="rbg"), E)
    s = env.step(c["s"], acts(c["w"], c["s"] + jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


def raw_keys_and_state(env, key):
    """The usual carry, one key for all environments, and one key per environment. The keys are raw integers."""
    raw = jax.random.key_data(key)
    return state_and_weights(env, key) | {"each": jax.random.split(raw, env.num_envs), "one": raw}


@program(raw_keys_and_state)
def raw_keys_in_the_carry(env, c, key):
    """Raw keys are arrays of integers, [E, 2]: nothing in their type says that they are keys."""
    one, drawn = jax.random.split(c["one"])
    each = jax.vmap(jax.random.split)(c["each"])
    a = acts(c["w"], c["s"]) + jax.vmap(lambda k: jax.random.normal(k, (3,)))(each[:, 1])
    s = env.step(c["s"], a + jax.vmap(lambda k: jax.random.uniform(k, (3,)))(jax.random.split(drawn, E)))
    return {"s": s, "w": learn(c["w"], s), "each": each[:, 0], "one": one}, {"m": jnp.mean(s)}
