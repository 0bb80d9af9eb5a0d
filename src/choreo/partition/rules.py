"""How one primitive runs on a block of the environments: one rule per primitive. A primitive without a rule is refused.

Invariant. Replica r of N holds block r of a value: rows [r L/N, (r+1) L/N) of an axis of length L that stands for the E
environments. L is E; or B, after a reshape has divided the axis into B groups of E/B environments; or E x k, after a reshape
has merged the axis with the next axis, of length k. A rule is given one equation of the full program, and for each operand the
axis along which the operand is a block. It returns the axes along which the operands must be blocks, the axes
along which the results are blocks, and the equation's parameters for one block, such that

    block r of equation(full operands)  ==  equation at block size(block r of each divided operand, and all other operands).

A rule raises `Mixes` where data of different environments are mixed, and wherever this invariant is not proved. The user's code
is not traced again for a block. So a number that the user's code computed from the number of environments, such as 1 / E, is
the same in the block as in the full program.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax.extend.core as jec

from choreo import _compat
from choreo.partition.lattice import Mixes, Size
from choreo.partition.program import Axis


class Split(NamedTuple):
    """One equation at block size."""

    ins: tuple[Axis, ...]
    """The axis along which each operand must be a block; None: the operand must be whole."""
    outs: tuple[Axis, ...]
    """The axis along which each result is a block; None: the result is whole, the same at every replica."""
    params: dict[str, Any]
    """The equation's parameters at block size."""


Rule = Callable[[jec.JaxprEqn, Sequence[Axis], Size], Split]
"""(equation, for each operand the axis along which it is a block, size of the blocks) -> the equation at block size."""


def split(eqn: jec.JaxprEqn, axes: Sequence[Axis], size: Size) -> Split:
    """An equation at block size. `axes`: for each operand, the axis along which it is a block; not all are None."""
    rule = _RULES.get(eqn.primitive)
    if rule is None:
        raise Mixes(f"no rule tells how `{eqn.primitive.name}` treats environments")
    lengths = {_shape(var)[axis] for var, axis in zip(eqn.invars, axes, strict=True) if axis is not None}
    if any(length % size.blocks for length in lengths):
        raise Mixes(
            f"an axis of length {min(n for n in lengths if n % size.blocks)} cannot be divided into {size.blocks} blocks"
        )
    ins, outs, params = rule(eqn, axes, size)
    # Dimension numbers made by `vmap` are sometimes numpy integers.
    result = Split(_plain(ins), _plain(outs), params)
    if eqn.primitive.name != "reshape":
        divided = [*zip(eqn.invars, result.ins, strict=True), *zip(eqn.outvars, result.outs, strict=True)]
        if {_shape(var)[axis] for var, axis in divided if axis is not None} != lengths or len(lengths) != 1:
            raise Mixes("operands and results would be divided along axes of different lengths")
    return result


def _plain(axes: Sequence[Any]) -> tuple[Axis, ...]:
    return tuple(axis if axis is None else int(axis) for axis in axes)


def elementwise(eqn: jec.JaxprEqn, axes: Sequence[Axis], size: Size) -> Split:
    axis = _only(axes)
    # An operand has the shape of the result, or length 1 along some axes, or is a scalar. If an operand
    # does not have this axis, or has length 1 along it, every replica gets the whole operand.
    ins = tuple(axis if len(_shape(v)) > axis and _shape(v)[axis] != 1 else None for v in eqn.invars)
    return Split(ins, (axis,) * len(eqn.outvars), eqn.params)


def each_on_its_own(eqn: jec.JaxprEqn, axes: Sequence[Axis], size: Size) -> Split:
    return Split(tuple(axes), tuple(axes), eqn.params)


def device_put(eqn, axes, size):
    """Without a device, `device_put` does nothing. Solvers in jax.scipy contain such equations."""
    if any(device is not None for device in eqn.params["devices"]):
        raise Mixes("`device_put` moves environments to a device")
    return each_on_its_own(eqn, axes, size)


def broadcast_in_dim(eqn, axes, size):
    axis = eqn.params["broadcast_dimensions"][_only(axes)]
    return _one(axes, axis, eqn.params | {"shape": _resized(eqn.params["shape"], axis, size)})


def reshape(eqn, axes, size):
    axis = _only(axes)
    old, new = _shape(eqn.invars[0]), eqn.params["new_sizes"]
    if eqn.params.get("dimensions") is not None:
        raise Mixes("`reshape` permutes dimensions")
    # If the dimensions before the new axis have the same product as those before the old axis, block r along either axis has
    # the same elements.
    kept = [d for d in range(len(new)) if new[d] % size.blocks == 0 and math.prod(new[:d]) == math.prod(old[:axis])]
    if not kept or not new[kept[0]]:
        raise Mixes("`reshape` merges or divides the env axis")
    return _one(axes, kept[0], eqn.params | {"new_sizes": _resized(new, kept[0], size)})


def transpose(eqn, axes, size):
    return _one(axes, list(eqn.params["permutation"]).index(_only(axes)), eqn.params)


def squeeze(eqn, axes, size):
    rank = len(_shape(eqn.invars[0]))
    return _one(axes, _without(_only(axes), [d % rank for d in eqn.params["dimensions"]]), eqn.params)


def concatenate(eqn, axes, size):
    axis = _other_than(eqn.params["dimension"], axes, "`concatenate` joins along the env axis")
    return Split((axis,) * len(axes), (axis,), eqn.params)


def slice_(eqn, axes, size):
    axis, p = _only(axes), eqn.params
    stride = 1 if p["strides"] is None else p["strides"][axis]
    if (p["start_indices"][axis], p["limit_indices"][axis], stride) != (0, _shape(eqn.invars[0])[axis], 1):
        raise Mixes("`slice` takes some of the environments")
    return _one(axes, axis, p | {"limit_indices": _resized(p["limit_indices"], axis, size)})


def dynamic_slice(eqn, axes, size):
    axis, sizes = axes[0], eqn.params["slice_sizes"]
    if axis is None or sizes[axis] != _shape(eqn.invars[0])[axis]:
        raise Mixes("`dynamic_slice` takes some of the environments")
    return Split(
        (axis,) + (None,) * (len(axes) - 1), (axis,), eqn.params | {"slice_sizes": _resized(sizes, axis, size)}
    )


def dynamic_update_slice(eqn, axes, size):
    axis = _only(axes[:2])
    if _shape(eqn.invars[1])[axis] != _shape(eqn.invars[0])[axis]:
        raise Mixes("`dynamic_update_slice` writes to some of the environments")
    return Split((axis, axis) + (None,) * (len(axes) - 2), (axis,), eqn.params)


def pad(eqn, axes, size):
    axis = axes[0]
    if axis is None or eqn.params["padding_config"][axis] != (0, 0, 0):
        raise Mixes("`pad` adds environments")
    return Split((axis, None), (axis,), eqn.params)


def rev(eqn, axes, size):
    return _one(
        axes, _other_than(eqn.params["dimensions"], axes, "`rev` reverses the order of environments"), eqn.params
    )


def reduction(eqn, axes, size):
    axis = _other_than(eqn.params["axes"], axes, f"`{eqn.primitive.name}` reduces over environments")
    return _one(axes, _without(axis, eqn.params["axes"]), eqn.params)


def along_one_axis(param: str) -> Rule:
    """The rule of primitives that mix along one axis only, and keep every shape: cumulative sums, sorts."""

    def rule(eqn, axes, size):
        axis = _other_than(eqn.params[param], axes, f"`{eqn.primitive.name}` runs along the env axis")
        return Split((axis,) * len(axes), (axis,) * len(eqn.outvars), eqn.params)

    return rule


def stack(eqn, axes, size):
    axis, new = _only(axes), int(eqn.params["axis"])
    return Split((axis,) * len(axes), (axis + (new <= axis),), eqn.params)


def unstack(eqn, axes, size):
    axis = _other_than(eqn.params["axis"], axes, "`unstack` takes environments apart")
    return Split((axis,), (_without(axis, [eqn.params["axis"]]),) * len(eqn.outvars), eqn.params)


def lax_split(eqn, axes, size):
    axis = _other_than(eqn.params["axis"], axes, "`split` divides the env axis")
    return Split((axis,), (axis,) * len(eqn.outvars), eqn.params)


def top_k(eqn, axes, size):
    rank = len(_shape(eqn.invars[0]))
    axis = _other_than(eqn.params.get("axis", rank - 1) % rank, axes, "`top_k` compares environments")
    return Split((axis,), (axis,) * len(eqn.outvars), eqn.params)


def dot_general(eqn, axes, size):
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    left, right = axes
    if left in lhs_contract or right in rhs_contract:
        raise Mixes("`dot_general` sums over environments")
    if left in lhs_batch or right in rhs_batch:
        batch = list(lhs_batch).index(left) if left in lhs_batch else list(rhs_batch).index(right)
        ins = (lhs_batch[batch], rhs_batch[batch])
        if left not in (None, ins[0]) or right not in (None, ins[1]):
            raise Mixes("`dot_general` pairs different environments")
        return Split(ins, (batch,), eqn.params)
    if left is not None and right is not None:
        raise Mixes("`dot_general` pairs every environment with every other")
    lhs_free = [d for d in range(len(_shape(eqn.invars[0]))) if d not in (*lhs_contract, *lhs_batch)]
    rhs_free = [d for d in range(len(_shape(eqn.invars[1]))) if d not in (*rhs_contract, *rhs_batch)]
    free = lhs_free.index(left) if left is not None else len(lhs_free) + rhs_free.index(_only([right]))
    return Split((left, right), (len(lhs_batch) + free,), eqn.params)


def conv_general_dilated(eqn, axes, size):
    numbers, (image, kernel) = eqn.params["dimension_numbers"], axes
    if kernel is not None or image != numbers.lhs_spec[0] or eqn.params["batch_group_count"] != 1:
        raise Mixes("`conv_general_dilated` uses the env axis as something other than its batch axis")
    return Split((image, None), (numbers.out_spec[0],), eqn.params)


def reduce_window(eqn, axes, size):
    axis, p = _only(axes), eqn.params
    trivial = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1}
    if any(_tuple_or_int(p[name][axis]) != value for name, value in trivial.items()):
        raise Mixes("a window spans environments")
    return _one(axes, axis, p)


def gather(eqn, axes, size):
    p, (operand_axis, indices_axis) = eqn.params, axes
    numbers, sizes = p["dimension_numbers"], p["slice_sizes"]
    operand_rank = len(_shape(eqn.invars[0]))
    out_rank = len(_shape(eqn.outvars[0]))
    batch_out = [
        d for d in range(out_rank) if d not in numbers.offset_dims
    ]  # one per dimension of the indices except the last
    pairs = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if operand_axis in pairs or indices_axis in pairs.values():
        if operand_axis is None:
            operand_axis = next(k for k, v in pairs.items() if v == indices_axis)
        if indices_axis not in (None, pairs.get(operand_axis)):
            raise Mixes("`gather` pairs different environments")
        indices_axis = pairs[operand_axis]
        return Split((operand_axis, indices_axis), (batch_out[indices_axis],), p)
    if operand_axis is None:
        if indices_axis == len(_shape(eqn.invars[1])) - 1:
            raise Mixes("`gather` computes one index from several environments")
        return Split((None, indices_axis), (batch_out[indices_axis],), p)
    windows = [
        d for d in range(operand_rank) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    if indices_axis is not None or operand_axis not in windows or operand_axis in numbers.start_index_map \
            or sizes[operand_axis] != _shape(eqn.invars[0])[operand_axis]:  # fmt: skip
        raise Mixes("`gather` reads another environment's data")
    out = numbers.offset_dims[windows.index(operand_axis)]
    return Split((operand_axis, None), (out,), p | {"slice_sizes": _resized(sizes, operand_axis, size)})


def scatter(eqn, axes, size):
    numbers = eqn.params["dimension_numbers"]
    operand_axis, indices_axis, updates_axis = axes
    operand_rank, updates_rank = len(_shape(eqn.invars[0])), len(_shape(eqn.invars[2]))
    batch_updates = [d for d in range(updates_rank) if d not in numbers.update_window_dims]
    pairs = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    windows = [
        d for d in range(operand_rank) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]
    options = [Split((k, v, batch_updates[v]), (k,), eqn.params) for k, v in pairs.items()]
    operand, updates = _shape(eqn.invars[0]), _shape(eqn.invars[2])
    options += [Split((d, None, u), (d,), eqn.params) for d, u in zip(windows, numbers.update_window_dims, strict=True)
                if d not in numbers.scatter_dims_to_operand_dims and updates[u] == operand[d]]  # fmt: skip
    for option in options:
        if all(have in (None, want) for have, want in zip(axes, option.ins, strict=True)):
            return option
    raise Mixes("`scatter` writes another environment's data")


def leading(*trailing: int) -> Rule:
    """The rule of primitives that work on the last dimensions of each operand, for every index of the leading ones.

    `trailing`: for each operand, how many last dimensions the primitive works on. The leading dimensions are the same in all
    operands and results, and `vmap` of these primitives only adds a leading dimension. So a block of the results along a
    leading dimension needs only the same block of the operands.
    """

    def rule(eqn, axes, size):
        axis = _only(axes)
        if any(axis >= len(_shape(v)) - count for v, count in zip(eqn.invars, trailing, strict=True)):
            raise Mixes(f"`{eqn.primitive.name}` uses the env axis as a matrix dimension")
        return Split((axis,) * len(axes), (axis,) * len(eqn.outvars), eqn.params)

    return rule


def fft(eqn, axes, size):
    """A transform of the last n dimensions, where n is the number of `fft_lengths`. The leading dimensions are a batch."""
    return leading(len(eqn.params["fft_lengths"]))(eqn, axes, size)


def tile(eqn, axes, size):
    axis = _only(axes)
    if eqn.params["reps"][axis] != 1:  # the result has rows 0..E-1, 0..E-1: its block r would hold rows of other blocks
        raise Mixes("`tile` repeats environments")
    return _one(axes, axis, eqn.params)


def bitcast_convert_type(eqn, axes, size):
    if len(_shape(eqn.invars[0])) != len(_shape(eqn.outvars[0])) and _only(axes) >= len(_shape(eqn.outvars[0])):
        raise Mixes("`bitcast_convert_type` joins environments")
    return _one(axes, _only(axes), eqn.params)


def drawn(eqn, axes, size):
    """The rule of `random_bits` and `random_split`, which make an array from each key."""
    if not draws_per_key(eqn):
        raise Mixes(_uses_first_key(eqn))
    return _one(axes, _only(axes), eqn.params)


def random_fold_in(eqn, axes, size):
    if not draws_per_key(eqn):
        raise Mixes(f"`random_fold_in` mixes a batch of {_dtype(eqn.invars[0]).name} keys")
    return elementwise(eqn, axes, size)


def draws_per_key(eqn: jec.JaxprEqn) -> bool:
    """Do the numbers that are drawn from a key depend on this key only? Not for rbg: under `vmap`, it uses the first key for
    all rows."""
    return _compat.is_threefry(_dtype(eqn.invars[0]))


def _uses_first_key(eqn: jec.JaxprEqn) -> str:
    keys = f"{_dtype(eqn.invars[0]).name} keys"
    return f"`{eqn.primitive.name}` of a batch of {keys} draws the numbers of all rows from the first key"


def random_gamma(eqn, axes, size):
    """The shape of the keys is a prefix of the shape of the second operand (the parameter `a` of the distribution). Each key is
    split into one key for each remaining index of `a`."""
    axis = _only(axes)
    if not draws_per_key(eqn):
        raise Mixes(_uses_first_key(eqn))
    if axis >= len(_shape(eqn.invars[0])):
        raise Mixes("`random_gamma` draws for several environments from one key")
    return Split((axis, axis), (axis,), eqn.params)


def random_unwrap(eqn, axes, size):
    return _one(axes, _only(axes), eqn.params)


def random_wrap(eqn, axes, size):
    if _only(axes) >= len(_shape(eqn.outvars[0])):
        raise Mixes("`random_wrap` makes one key from several environments")
    return _one(axes, _only(axes), eqn.params)


ELEMENTWISE = """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi name ne neg
nextafter not one_minus_square or polygamma population_count pow random_seed real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
square stop_gradient sub tan tanh threefry2x32 xor zeta""".split()

REDUCTIONS = "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split()

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), along_one_axis("axis")),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), reduce_window),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-sub", "scatter_sub",
                     "scatter-min", "scatter_min", "scatter-max", "scatter_max"), scatter),
    **dict.fromkeys(("random_bits", "random_split"), drawn),
    "bitcast_convert_type": bitcast_convert_type,
    "broadcast_in_dim": broadcast_in_dim,
    "cholesky": leading(2),
    "concatenate": concatenate,
    "conv_general_dilated": conv_general_dilated,
    "device_put": device_put,
    "dot_general": dot_general,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "eigh": leading(2),
    "fft": fft,
    "gather": gather,
    "householder_product": leading(2, 1),
    "lu": leading(2),
    "lu_pivots_to_permutation": leading(1),
    "optimization_barrier": each_on_its_own,
    "pad": pad,
    "qr": leading(2),
    "random_fold_in": random_fold_in,
    "random_gamma": random_gamma,
    "random_unwrap": random_unwrap,
    "random_wrap": random_wrap,
    "reshape": reshape,
    "rev": rev,
    "slice": slice_,
    "sort": along_one_axis("dimension"),
    "split": lax_split,
    "stack": stack,
    "unstack": unstack,
    "squeeze": squeeze,
    "svd": leading(2),
    "tile": tile,
    "top_k": top_k,
    "transpose": transpose,
    "triangular_solve": leading(2, 2),
    "tridiagonal_solve": leading(1, 1, 1, 2),
}  # fmt: skip


_RULES = {primitive: rule for name, rule in RULES.items() for primitive in _compat.primitives([name])}
"""The rule of each of JAX's own primitives. A user's primitive that is also named `add` has no rule."""


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _dtype(var: Any) -> Any:
    return var.aval.dtype


def _only(axes: Sequence[Axis]) -> int:
    """The one axis along which operands are blocks."""
    found = {axis for axis in axes if axis is not None}
    if len(found) != 1:
        raise Mixes("operands are divided along different axes")
    return found.pop()


def _other_than(taken: SupportsIndex | Sequence[SupportsIndex], axes: Sequence[Axis], why: str) -> int:
    axis = _only(axes)
    if axis in (taken if isinstance(taken, (tuple, list)) else (taken,)):
        raise Mixes(why)
    return axis


def _one(axes: Sequence[Axis], out: SupportsIndex | None, params: dict[str, Any]) -> Split:
    """An equation with one result, in which the first operand is a block and all others are whole."""
    return Split((_only(axes),) + (None,) * (len(axes) - 1), (out if out is None else int(out),), params)


def _without(axis: int, removed: Sequence[SupportsIndex]) -> int:
    return axis - sum(int(d) < axis for d in removed)


def _resized(shape: Sequence[int], axis: SupportsIndex, size: Size) -> tuple[int, ...]:
    return tuple(size.of(n) if d == axis else n for d, n in enumerate(shape))


def _tuple_or_int(x: Any) -> Any:
    return tuple(x) if isinstance(x, (tuple, list)) else int(x)
