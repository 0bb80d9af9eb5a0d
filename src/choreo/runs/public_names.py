"""Public names: the closed table of the classes, functions and environments that a run.toml may name safely.

    "ppo"  "Layout"  "mlp"  "optax.adam"  "CartPole"             a class or a function; the name has no ":"
    "jax:CartPole-v1"  "gymnax:Catch-bsuite"  "CartPole-v1"      an environment

A run folder may come from a stranger, and opening it must not run code that the stranger chose. Names in the table are safe:
called with numbers and texts of any value, these classes and functions only compute. They do not import, open or start anything.
Any other name is code (`module:Name`, `file.py:name`), which `choreo.runs.toml_values` runs only if it is trusted.
A public name stays the same if the class or function moves to a different module.
"""

import functools
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import jax
import optax

from choreo import algos, buffers, envs, layouts, networks

OPTIMISERS = (
    "adabelief", "adagrad", "adam", "adamax", "adamaxw", "adamw", "lamb", "lion", "nadam", "nadamw", "novograd", "radam",
    "rmsprop", "sgd", "yogi",
)  # fmt: skip
"""Optimisers of optax that have a public name."""
FUNCTIONS = (
    "celu",
    "elu",
    "gelu",
    "leaky_relu",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "tanh",
)
"""Functions of jax.nn that have a public name."""


@functools.cache
def kinds() -> Mapping[str, Mapping[str, Any]]:
    """The table, grouped by kind. A run.toml may set a hyper-parameter only to a value of the same kind as the default."""
    return {
        "algorithm": algos.ALGOS,
        "layout": {"Layout": layouts.Layout},
        "group": {"Group": layouts.Group},
        "batch of environments": {"VmapEnv": envs.VmapEnv},
        "environment": {cls.__name__: cls for cls in envs.BUILT_IN.values()},
        "replay": {"Replay": buffers.Replay, "Table": buffers.Table},
        "actor-critic network": {name: getattr(networks, name) for name in ("mlp", "atari_cnn", "lstm")},
        "network of action values": {name: getattr(networks, name) for name in ("q_mlp", "q_cnn")},
        "deterministic policy network": {"deterministic": networks.deterministic},
        "stochastic policy network": {"squashed": networks.squashed},
        "optimiser": {f"optax.{name}": getattr(optax, name) for name in OPTIMISERS},
        "function of an array": {f"jax.nn.{name}": getattr(jax.nn, name) for name in FUNCTIONS},
    }


@functools.cache
def table() -> Mapping[str, Any]:
    """Every public name, and the class or function that it names."""
    return {name: value for named in kinds().values() for name, value in named.items()}


def name_of(value: Any) -> str | None:
    """The public name of a class or function; None if it has none."""
    return next((name for name, known in table().items() if known is value), None)


def kind_of(value: Any) -> str | None:
    """The kind of a class or function, or of a `functools.partial` of a function; None if it has no public name."""
    value = value.func if isinstance(value, functools.partial) else value
    return next((kind for kind, named in kinds().items() if any(known is value for known in named.values())), None)


def is_environment(name: str) -> bool:
    """Whether making the environment of this name runs only code of Choreo, gymnax, EnvPool or Gymnasium.

    gymnax and EnvPool look up names in closed lists. An id of Gymnasium is safe only if its entry point is in Gymnasium: other
    packages can register ids too, and some ids import a module that an argument names (`GymV26Environment-v0`).
    """
    if name in envs.BUILT_IN or re.fullmatch(r"(gymnax|envpool):[A-Za-z0-9_.-]+", name):
        return True
    specs = _specs(name)
    points = [point for spec in specs for point in (spec.entry_point, spec.vector_entry_point) if point is not None]
    own = all(isinstance(point, str) and point.startswith("gymnasium.envs.") for point in points)
    return bool(points) and own and not any(spec.additional_wrappers for spec in specs)


def is_no_environment(name: str) -> bool:
    """Whether this name is certainly wrong: Gymnasium has no such id, and the name cannot refer to code."""
    return ":" not in name.removeprefix("gymnasium:") and not _specs(name)


def _specs(name: str) -> list[Any]:
    """The specifications that Gymnasium has registered under an id; all versions for an id without a version."""
    env_id = name.removeprefix("gymnasium:")
    return [spec for spec in gymnasium.registry.values() if env_id in (spec.id, re.sub(r"-v\d+$", "", spec.id))]


NAMES_A_FILE = re.compile("file|path|folder|dir|url|module|entry_point|env_id")
"""Matches names of arguments whose value an environment opens or imports: MuJoCo's `xml_file`, EnvPool's `base_path`."""
PLAIN_TEXT = re.compile(r"[A-Za-z0-9_,+ -]*")
"""Matches text without `/`, `\\`, `.`, `~` and `:`. Such a text cannot be a path outside of a package's own data."""


def is_plain(described: Any, name: str) -> bool:
    """Whether the argument `name` of an environment is plain data: numbers, words, and lists or tables of these."""
    match described:
        case bool() | int() | float() | {"none": True}:
            return True
        case str(text):
            return PLAIN_TEXT.fullmatch(text) is not None and not NAMES_A_FILE.search(name)
        case list(items) | {"tuple": list(items)}:
            return all(is_plain(item, name) for item in items)
        case {"dict": dict(items)}:
            return all(is_plain(item, key) for key, item in items.items())
    return False


NOT_OPTIONS = re.compile("learning_rate|dtype")
"""Matches names of optimisers' arguments that a run.toml cannot give: the algorithm passes them, or they are not numbers."""


def misfit(make: Any, arguments: Mapping[str, Any]) -> str | None:
    """Why `make`, a class or function in the table, cannot take these keyword arguments; None if it can.

    For a class, `arguments` are all arguments of its constructor; for a function, some of its options.
    """
    known = inspect.signature(make).parameters
    hints = _hints(make)
    for name, value in arguments.items():
        if name not in known:
            return f"there is no `{name}`"
        default = getattr(make, name, None) if isinstance(make, type) else None
        if kind_of(make) == "optimiser":
            fitting = isinstance(value, bool | int | float | None) and not NOT_OPTIONS.search(name)
        elif (kind := kind_of(value)) is not None:
            fitting = kind == (kind_of(default) or ("optimiser" if name == "optimizer" else None))
        else:
            fitting = _fits(value, hints.get(name, Any))
        if not fitting:
            return f"`{name}` cannot be {value!r}"
    return None


def _hints(make: Any) -> dict[str, Any]:
    return {} if kind_of(make) in ("optimiser", "function of an array") else typing.get_type_hints(make)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the declared type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, each) for each in inner)
    if origin is typing.Literal:
        return value in inner
    if origin in (tuple, Sequence):
        if not isinstance(value, list | tuple):
            return False
        if origin is tuple and inner[-1] is not ...:
            return len(value) == len(inner) and all(_fits(v, each) for v, each in zip(value, inner, strict=True))
        return all(_fits(item, inner[0]) for item in value)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    if isinstance(value, int) and abs(value) >= 2**63:
        return False
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint) if isinstance(hint, type) else callable(value)
