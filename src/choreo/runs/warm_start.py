"""Begin a run with the weights of another run: `train(..., init_from="runs/x")`.

    Train(params, optimizer, iterations)     `policy(train)` returns `params`
          └── read from the checkpoint of runs/x, leaf by leaf, by name; all other leaves are as `init` made them

The weights are the leaves of `train` that `policy` reads. An algorithm that keeps its weights twice (a target network),
or whose policy computes the parameters, needs a method `with_policy(train, params) -> train`. This method puts the parameters
into `train`. The algorithm of the other run is not made again, so its code and its environment are not needed. Weights
that do not fit are refused when they are read, before anything is written.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import safetensors

from choreo.errors import AlgorithmError, RunError
from choreo.runs import checkpoint
from choreo.runs.config import InitFrom, RunConfig
from choreo.runs.folder import RunFolder
from choreo.types import PyTree


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Weights that replace the weights from `init`."""

    algo: Any
    """The algorithm of the new run."""
    leaves: dict[str, jax.Array]
    """The weights, by their names in a checkpoint."""
    origin: InitFrom
    """The run that the weights are from."""

    @classmethod
    def read(cls, config: RunConfig, source: str | Path | InitFrom) -> "Weights":
        """The weights in the run folder `source`; raises RunError if they do not fit the algorithm of `config`."""
        folder = RunFolder(source.path if isinstance(source, InitFrom) else source)
        folder.check_run()
        algo, train = config.algo_with_horizon, config.carry_structure().train
        leaves = _from_checkpoint(folder, _named(train), _read_by_policy(algo, train))
        params_hash = checkpoint.sha256(list(leaves.values()))
        if isinstance(source, InitFrom) and params_hash != source.params_hash:
            raise RunError(
                f"The weights in {folder.path} are not those that the run began with: the run there was trained further since.",
                fix=f"Give --init-from {folder.path} to begin with its present weights.",
            )
        origin = InitFrom(path=str(folder.path.resolve()), params_hash=params_hash)
        weights = cls(algo=algo, leaves=leaves, origin=origin)
        weights._check(train)
        return weights

    def put_into(self, carry: PyTree) -> PyTree:
        """The carry that `init` made, with these weights in place of the weights from `init`."""
        return eqx.tree_at(lambda c: c.train, carry, self._put(carry.train))

    def _put(self, train: PyTree) -> PyTree:
        leaves = [self.leaves.get(name, leaf) for name, leaf in _named(train).items()]
        loaded = jax.tree.unflatten(jax.tree.structure(train), leaves)
        with_policy = _with_policy(self.algo)
        return loaded if with_policy is None else with_policy(train, self.algo.policy(loaded))

    def _check(self, train: PyTree) -> None:
        put = _named(eqx.filter_eval_shape(self._put, train))
        for name, leaf in _named(train).items():
            if _type_of(put.get(name)) != _type_of(leaf):
                raise AlgorithmError(
                    f"`{type(self.algo).__name__}.with_policy` does not return a train state like the one it is given: "
                    f"`{name}` was {_type_of(leaf)} and becomes {_type_of(put.get(name))}.",
                    fix="Return `train` with some leaves replaced, as in `train._replace(params=params)`.",
                )


def _with_policy(algo: Any) -> Callable[[PyTree, PyTree], PyTree] | None:
    return getattr(algo, "with_policy", None)  # optional


def _read_by_policy(algo: Any, train: PyTree) -> set[str]:
    """The names of the leaves of `train` that the policy depends on, from a liveness analysis of the policy's jaxpr."""
    arrays, static = eqx.partition(train, _is_shaped)
    leaves, tree = jax.tree.flatten(arrays)

    def policy(*leaves: Any) -> list[Any]:
        params = algo.policy(eqx.combine(jax.tree.unflatten(tree, leaves), static))
        return jax.tree.leaves(eqx.filter(params, eqx.is_array))

    jaxpr = jax.make_jaxpr(policy)(*leaves).jaxpr
    needed = {id(var) for var in jaxpr.outvars}
    if _with_policy(algo) is None and needed & {id(var) for eqn in jaxpr.eqns for var in eqn.outvars}:
        name = type(algo).__name__
        raise AlgorithmError(
            f"`{name}.policy` computes the parameters, so Choreo cannot tell which part of `train` holds them.",
            fix=f"Add `with_policy(train, params) -> train` to `{name}`, or let `policy` return a field of `train`.",
        )
    for eqn in reversed(jaxpr.eqns):
        if needed & {id(var) for var in eqn.outvars}:
            needed |= {id(var) for var in eqn.invars}
    return {name for name, var in zip(_named(arrays), jaxpr.invars, strict=True) if id(var) in needed}


def _from_checkpoint(folder: RunFolder, train: Mapping[str, Any], wanted: set[str]) -> dict[str, jax.Array]:
    """The leaves of `train` whose names are in `wanted`, from the checkpoint of a run."""
    header = checkpoint.read_header(folder.checkpoint)
    with (
        checkpoint.damage_reported(folder.checkpoint),
        safetensors.safe_open(folder.checkpoint, framework="numpy") as file,
    ):
        _check_names(folder, train, wanted, set(file.keys()))
        arrays = {name: file.get_tensor(name) for name in train if name in wanted}
    leaves = {}
    for name, array in arrays.items():
        value = checkpoint.decode(folder.checkpoint, header, name, array)
        if _type_of(value) != _type_of(train[name]):
            raise _does_not_fit(
                folder, f"`{name}` is {_type_of(value)} in the folder and {_type_of(train[name])} in this run"
            )
        leaves[name] = value
    return leaves


def _check_names(folder: RunFolder, train: Mapping[str, Any], wanted: set[str], stored: set[str]) -> None:
    """Refuse a checkpoint that lacks a wanted leaf.

    In the checkpoint, a field whose leaves are all wanted must have no other leaves. `stored`: the names in the
    checkpoint. `_field` gives the field of a leaf.
    """
    for name in sorted(wanted - stored):
        raise _does_not_fit(folder, f"`{name}` ({_type_of(train[name])}) of this run is not in the folder")
    whole = {_field(name) for name in wanted} - {_field(name) for name in set(train) - wanted}
    for name in sorted(stored - wanted):
        if _field(name) in whole:
            raise _does_not_fit(folder, f"`{name}` of the folder is not in this run")


def _does_not_fit(folder: RunFolder, why: str) -> RunError:
    return RunError(
        f"The weights in {folder.path} do not fit: {why}.",
        fix=f"Begin with a run that has the same network and spaces; see {folder.config_file}.",
    )


def _named(train: PyTree) -> dict[str, Any]:
    """The leaves of a train state by their names in a checkpoint."""
    paths, _ = jax.tree_util.tree_flatten_with_path(train)
    return {f".train{jax.tree_util.keystr(path)}": leaf for path, leaf in paths}


def _field(name: str) -> str | None:
    """The field that a leaf is in: `.train.params` for `.train.params.network.weight`; None outside of `train`."""
    found = re.match(r"\.train(?![^.\[])(\.\w+|\[[^\]]*\])?", name)
    return found and found[0]


def _is_shaped(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array(leaf)


def _type_of(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else repr(leaf)
