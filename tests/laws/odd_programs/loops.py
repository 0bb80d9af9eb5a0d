"""Programs with odd loops and branches: scans, while loops and conds, across sites and inside fragments.

"Each replica would ..." says what a naive compiler would do wrong: it runs the user's code on each block of environments.
"""

import jax
import jax.numpy as jnp
from jax import lax

import choreo
from laws.odd_programs.program import TABLE, E, act, act_random, acts, learn, program, unroll


@program()
def unroll_reversed(env, c, key):
    """A rollout whose scan runs in reverse: the first stored state is the last one computed. States that arrive step by
    step must not be stored in the order of arrival."""
    s, ss = unroll(env, c, length=3, reverse=True)
    return {"s": s, "w": learn(c["w"], ss * jnp.arange(1.0, 4.0)[:, None, None])}, {"m": ss}


@program()
def unroll_of_one(env, c, key):
    """A rollout of one step. Its results have a time axis of length 1, even where the loop is inlined."""
    s, ss = unroll(env, c, length=1)
    return {"s": s, "w": learn(c["w"], ss)}, {"m": ss}


@program()
def unroll_of_zero(env, c, key):
    """A rollout of no steps: the results have a time axis of length 0, and no site sends anything inside the loop."""
    s, ss = unroll(env, c, length=0)
    return {"s": env.step(s, acts(c["w"], s)), "w": learn(c["w"], s) + jnp.sum(ss)}, {"m": jnp.mean(s)}


@program()
def scan_inputs_with_an_env_axis(env, c, key):
    """Scan inputs [time, E, 3] from one key. The env axis is the first axis inside the loop, and the second axis outside."""
    xs = jax.random.normal(key, (4, E, 3))

    def step(s, x):
        s = env.step(s, acts(c["w"], s) + x)
        return s, (x, s, x[:, 0])

    s, (x, ss, x0) = lax.scan(step, c["s"], xs)
    return {"s": s, "w": learn(c["w"], ss, x)}, {"m": jnp.mean(x), "x0": x0}


@program()
def scan_inputs_made_from_environments(env, c, key):
    """The scan inputs are made from the states, [time, E, 3], and the scan runs in reverse. In each step, a replica needs one
    slice of its own block, counted from the end."""
    xs = jnp.stack([c["s"], jnp.sin(c["s"]), c["s"] ** 2])

    def step(s, x):
        s = env.step(s, acts(c["w"], s) + x)
        return s, (x, s)

    s, (x, ss) = lax.scan(step, c["s"], xs, reverse=True)
    return {"s": s, "w": learn(c["w"], ss, x)}, {"m": jnp.mean(x, axis=(0, 2))}


@program()
def scan_over_environments(env, c, key):
    """A scan along the env axis: the action of environment e depends on the sum over all environments before e. Each replica would
    begin its sum at its own first row."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    total, partial = lax.scan(lambda t, row: (t + row, act(t, row)), c["w"], s)
    return {"s": s, "w": learn(total, s)}, {"m": partial}


@program()
def scan_over_environments_with_every_role(env, c, key):
    """A scan along the env axis that acts and learns once per environment, so the weights pass from one environment to
    the next. Each replica would begin with the old weights."""
    s = env.step(c["s"], acts(c["w"], c["s"]))

    def step(w, row):
        w = learn(w, act(w, row))
        return w, w

    w, ws = lax.scan(step, c["w"], s)
    return {"s": s, "w": w}, {"m": ws}


@program()
def a_remat_scan_with_a_gradient(env, c, key):
    """Gradients through a scan whose body is recomputed (`jax.checkpoint`), for the weights and for the states. The
    recomputation must divide the body in the same way as the first computation."""

    def loss(w, s):
        body = jax.checkpoint(lambda s, _: (0.5 * jnp.tanh(acts(w, s)) + 0.5 * s, jnp.mean(s)))
        s, means = lax.scan(body, s, None, 3)
        return jnp.mean(s**2) + jnp.sum(means)

    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s, "w": c["w"] - 0.1 * jax.grad(loss)(c["w"], s)}, {"m": jax.grad(loss, 1)(c["w"], s)}


@program()
def control_flow_nested_three_deep(env, c, key):
    """A scan in a cond in a while loop. Environments do not mix, so replicas are allowed to run the loop on their blocks."""

    def deep(s):
        def body(i, s):
            return lax.cond(
                i > 0, lambda s: lax.scan(lambda s, t: (jnp.sin(s) + t * s, s), s, jnp.arange(2.0))[0], jnp.cos, s
            )

        return lax.while_loop(lambda x: x[0] < 3, lambda x: (x[0] + 1, body(*x)), (0, s))[1]

    s = env.step(c["s"], choreo.fragment("actor")(deep)(c["s"]) + jax.vmap(choreo.fragment("actor")(deep))(c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def control_flow_that_mixes_three_deep(env, c, key):
    """A scan in a cond in a while loop, with a roll over environments in the innermost body: replicas must not run the loop
    on their blocks."""

    def deep(s):
        def body(i, s):
            return lax.cond(
                i > 0,
                lambda s: lax.scan(lambda s, t: (jnp.sin(s) + t * jnp.roll(s, 1, 0), s), s, jnp.arange(2.0))[0],
                jnp.cos,
                s,
            )

        return lax.while_loop(lambda x: x[0] < 3, lambda x: (x[0] + 1, body(*x)), (0, s))[1]

    s = env.step(c["s"], choreo.fragment("actor")(deep)(c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def a_loop_that_mixes_only_later(env, c, key):
    """The loop carries three arrays, which are zero at first. The first round stores the states in the third array. The
    second round moves them to the second array, and the third round to the first array. Only the fourth round sums them over
    environments. An analysis that looks at the body only once does not find this sum."""

    def body(carry, t):
        a, b, d = carry
        return (b, d, jnp.cumsum(a, axis=0) + c["s"]), jnp.mean(a)

    zero = jnp.zeros((E, 3))
    (a, b, d), means = choreo.fragment("actor")(lambda s: lax.scan(body, (zero, zero, zero), jnp.arange(4)))(c["s"])
    s = env.step(c["s"], a + b + d)
    return {"s": s, "w": learn(c["w"], s)}, {"m": means}


@program()
def a_loop_whose_carry_becomes_a_block_later(env, c, key):
    """The loop carries three arrays, which are zero at first, and so equal on all replicas. The third array differs between
    environments after the first round, the second array after the second round, and the first array after the third round.
    The analysis must iterate until it reaches a fixed point."""
    zero = jnp.zeros((E, 3))

    @choreo.fragment("actor")
    def f(s):
        return lax.scan(
            lambda carry, t: ((carry[1], carry[2], jnp.sin(carry[0]) + s), carry[0]), (zero, zero, zero), jnp.arange(4)
        )

    (a, b, d), history = f(c["s"])
    s = env.step(c["s"], a + b + d + history[3])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(history, axis=(0, 2))}


@program()
def a_loop_that_moves_the_axis(env, c, key):
    """The carry [E, E] is transposed in each round: the env axis is the first one in one round and the second one in
    the next."""
    f = choreo.fragment("actor")(lambda s: lax.scan(lambda x, t: (x.T + t, ()), s @ TABLE.T, jnp.arange(2.0))[0])
    s = env.step(c["s"], f(c["s"]) @ TABLE)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def a_branch_chosen_by_the_mean_over_environments(env, c, key):
    """A cond on the mean over all environments. Each replica would choose its own branch."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    s2 = lax.cond(jnp.mean(s) > 0, lambda s: s, lambda s: -s, s)
    return {"s": s2, "w": learn(c["w"], s2)}, {"m": jnp.mean(s)}


@program()
def a_branch_with_fragments_of_two_roles(env, c, key):
    """A branch of a cond calls fragments of two roles, so values would have to cross sites inside this branch."""
    s = lax.cond(c["w"][0] > 0, lambda s: env.step(s, acts(c["w"], s)), lambda s: env.step(s, s), c["s"])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def a_fori_loop_with_fragments_of_two_roles(env, c, key):
    """A `fori_loop`, which JAX traces as a scan, calls fragments of two roles, so that values cross sites in each round."""
    s = lax.fori_loop(0, 2, lambda i, s: env.step(s, acts(c["w"], s)), c["s"])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def a_while_with_fragments_of_two_roles(env, c, key):
    """A while loop calls fragments of two roles. Only scans can be divided, so layouts that separate these roles are refused."""
    s = lax.while_loop(lambda x: x[0] < 2, lambda x: (x[0] + 1, env.step(x[1], acts(c["w"], x[1]))), (0, c["s"]))[1]
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def while_per_environment(env, c, key):
    """A while loop per environment, in glue and in a mapped fragment. Under `vmap` the loop runs until all environments
    are done, and a finished environment must not change any more."""

    def halve(x):
        return lax.while_loop(lambda c: jnp.abs(c[0][0]) > 0.05, lambda c: (0.6 * c[0], c[1] + 1), (x, 0))

    a, n = jax.vmap(halve)(c["s"])
    b, m = jax.vmap(choreo.fragment("actor")(halve))(c["s"])
    s = env.step(c["s"], a + b)
    return {"s": s, "w": learn(c["w"], s)}, {"n": n, "m": jnp.sum(m)}


@program()
def a_batched_fragment_with_a_while_per_environment(env, c, key):
    """A while loop per environment inside a fragment of the whole batch, with keys in the carry of the loop. Under
    `vmap`, the condition of the loop becomes "any environment is not done". This condition reads all environments, but the
    results of each environment still depend on that environment alone."""

    def halve(x, k):
        def body(c):
            return 0.6 * c[0], c[1] + 1, jax.random.fold_in(c[2], c[1])

        x, n, k = lax.while_loop(lambda c: jnp.abs(c[0][0]) > 0.05, body, (x, 0, k))
        return x, n + jax.random.randint(k, (), 0, 9)

    a, n = choreo.fragment("actor")(jax.vmap(halve))(c["s"], env.keys(key))
    s = env.step(c["s"], a)
    return {"s": s, "w": learn(c["w"], s)}, {"n": n}


@program()
def a_number_of_rounds_per_environment_from_arange(env, c, key):
    """The number of rounds of an environment depends on its index. A replica that counts its own environments from 0 runs a
    wrong number of rounds."""

    def rounds(n, x):
        return lax.fori_loop(0, n, lambda t, x: 0.7 * x + 0.1 * t, x)

    def at_most(n, x):
        return lax.while_loop(
            lambda c: (c[0] < n) & (jnp.abs(c[1][0]) > 0.01), lambda c: (c[0] + 1, 0.6 * c[1]), (0, x)
        )

    a = choreo.fragment("actor")(lambda s: jax.vmap(rounds)(jnp.arange(E), s))(c["s"])
    n, b = choreo.fragment("env")(lambda s: jax.vmap(at_most)(E - jnp.arange(E), s))(c["s"])
    s = env.step(c["s"], a + b + jax.vmap(rounds)(jnp.arange(E) // 2, c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"n": n}


@program()
def nested_scans_over_roles(env, c, key):
    """A scan of rollouts, each followed by an update: values cross sites in both loops. The second rollout must use the
    weights of the first update."""

    def outer(carry, k):
        s, w = carry

        def inner(s, k):
            s = env.step(s, jax.vmap(act_random, (None, 0, 0))(w, s, env.keys(k)))
            return s, s

        s, ss = lax.scan(inner, s, jax.random.split(k, 2))
        return (s, learn(w, ss)), jnp.mean(ss)

    (s, w), means = lax.scan(outer, (c["s"], c["w"]), jax.random.split(key, 2))
    return {"s": s, "w": w}, {"m": means}


@program()
def a_scan_that_returns_its_carry_twice(env, c, key):
    """The scan returns the same value twice, its old carry, a counter, a literal and a constant. Each is stacked over the
    steps."""

    def step(carry, t):
        s, old, n = carry
        new = env.step(s, acts(c["w"], old))
        return (new, s, n + 1), (new, new, s, n, jnp.float32(2.0), c["w"])

    (s, old, n), (a, b, d, ns, two, ws) = lax.scan(step, (c["s"], c["s"], jnp.int32(0)), jnp.arange(3))
    return {"s": s, "w": learn(c["w"], a + b, d, old)}, {"n": ns, "two": two, "ws": ws, "d": d, "last": n}


@program()
def a_scan_with_an_accumulator_over_environments(env, c, key):
    """The carry of the scan has a sum of means over environments, which the next step reads. Each replica would add the
    means of its own block."""

    def step(carry, t):
        s, total = carry
        s = env.step(s, acts(c["w"], s) + total)
        return (s, total + jnp.mean(s)), total

    (s, total), totals = lax.scan(step, (c["s"], jnp.float32(0.0)), None, 3)
    return {"s": s, "w": learn(c["w"], s) + total}, {"t": totals}


@program()
def a_scan_with_a_constant_from_the_environments(env, c, key):
    """The body of the scan reads an array that is computed before the loop, with a row per environment. The array is a
    constant of the loop, and is divided into blocks."""
    base = jnp.sin(c["s"])

    def step(s, t):
        s = env.step(s, acts(c["w"], s) + base * t)
        return s, base[:, 0] + s[:, 0]

    s, out = lax.scan(step, c["s"], jnp.arange(3.0))
    return {"s": s, "w": learn(c["w"], out)}, {"out": out}


@program()
def a_scan_whose_results_are_not_used(env, c, key):
    """The scan returns a sort over environments and a sum, and neither is used. A compiler is allowed to drop these two,
    but nothing else."""

    def step(carry, t):
        s, junk = carry
        s = env.step(s, acts(c["w"], s))
        return (s, junk + jnp.sum(s)), jnp.sort(s, axis=0)

    (s, _), _ = lax.scan(step, (c["s"], jnp.float32(0.0)), None, 2)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def a_scan_with_constant_arrays(env, c, key):
    """Constant arrays of E rows are initial carry, new carry, inputs and results of a scan. To add them to
    states, each replica needs only its own block; the results need all rows."""

    def step(carry, x):
        s, base = carry
        return (env.step(s, acts(c["w"], s) + base + x), TABLE), (TABLE, x, base)

    (s, base), (a, b, d) = lax.scan(step, (c["s"], TABLE[::-1]), jnp.stack([TABLE, -TABLE, TABLE]))
    return {"s": s + base, "w": learn(c["w"], a, b, d)}, {"a": a, "d": d}


@program()
def counters_in_a_split_loop(env, c, key):
    """A counter and the weights are carried through a loop that is divided between sites. Every site must read the same
    count in the same step."""

    def step(state, _):
        s, n, w = state
        s = env.step(s, acts(w, s) * n)
        return (s, n + 1.0, w), (2.0 * n, s, w)

    (s, n, w), (ns, ss, ws) = lax.scan(step, (c["s"], jnp.float32(0), c["w"]), None, length=3)
    return {"s": s, "w": learn(w, ss)}, {"n": n, "ns": ns, "ws": ws, "ss": ss}
