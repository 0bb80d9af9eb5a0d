"""Find the algorithm, environment or layout that a user names.

    "ppo", "my_ppo.py:MyPPO", PPO, PPO(...)     -> an algorithm
    "CartPole-v1", "my_env.py:make_env", MyEnv  -> an environment
    "coarse", "my_layouts.py:pods", coarse(2)   -> a layout

The user's files are imported and run. Names that come from a run.toml must pass `choreo.runs.toml_values` first.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from choreo import algos, envs
from choreo.errors import AlgorithmError, EnvError, LayoutError, UnknownNameError, unknown_name
from choreo.layouts import ALIASES, PRESETS, Layout, find
from choreo.runs.steps import FORM, has_steps

PARTS = {
    "unroll": f"the number of steps per environment and iteration, or {FORM}",
    "init": "`init(env, key) -> carry`",
    "iterate": "`iterate(env, carry, key) -> (carry, metrics)`",
    "policy": "`policy(train) -> params`",
    "act": "`act(params, obs, key, *, greedy=False) -> (action, extras)`",
}
"""The attributes that an algorithm must have. The method `steps_per_iteration` can take the place of `unroll`."""

PREFIXES = ("jax", "gymnax", "gymnasium", "envpool")
"""Prefixes in the name of an environment. Any other word before the colon is a module."""


def algorithm(algo: Any) -> Any:
    """The algorithm, from its name, from its class (with default hyper-parameters) or from a value.

    Raises AlgorithmError if the algorithm lacks a part.
    """
    if isinstance(algo, str):
        algo = algorithm_class(algo)
    if isinstance(algo, type):
        algo = _with_defaults(algo)
    name = type(algo).__name__
    for part, form in PARTS.items():
        if not (has_steps(algo) if part == "unroll" else hasattr(algo, part)):
            raise AlgorithmError(f"`{name}` lacks `{part}`.", fix=f"Add {form}; see docs/your-own-algorithm.md.")
    if not dataclasses.is_dataclass(algo):
        raise AlgorithmError(
            f"`{name}` is not a dataclass.", fix="Put @dataclass(frozen=True, kw_only=True) above the class."
        )
    return algo


def _with_defaults(cls: type) -> Any:
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise AlgorithmError(
                f"`{cls.__name__}.{field.name}` has no default.", fix=f"Pass {cls.__name__}({field.name}=...)."
            )
    return cls()


def algorithm_class(name: str) -> type:
    """The class that `ppo`, `my_ppo.py:MyPPO` or `package.module:MyPPO` names."""
    if ":" in name:
        cls = load(name)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise AlgorithmError(
                f"`{name}` is not an algorithm, but a {type(cls).__name__}.",
                fix="An algorithm is a class with @dataclass(frozen=True, kw_only=True).",
            )
        return cls
    return algos.find(name)


def environment(env: Any, num_envs: int | None = None, **kwargs: Any) -> Any:
    """A batch of `num_envs` environments. The default is 8, but an environment that is given as a value keeps its own number.

    `env` is a name, a function that makes one environment (`lambda: MyEnv()`, `my_env.py:make_env`, a class), or a value.
    `kwargs` are arguments of the environment.
    """
    count = num_envs if num_envs is not None else 8
    if isinstance(env, str):
        factory = _factory(env)
        return envs.make(env, count, **kwargs) if factory is None else envs.from_factory(factory, count, **kwargs)
    if envs.makes_environments(env):
        return envs.from_factory(env, count, **kwargs)
    if kwargs:
        raise EnvError(
            f"`{min(kwargs)}` can be given only with a name, function or class that makes environments.",
            fix="This environment is made already: pass the argument when you make it.",
        )
    return env if num_envs is None else env.with_num_envs(num_envs)


def _factory(name: str) -> Any:
    """The function that `my_env.py:make_env` or `package.module:make_env` names; None for other names."""
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        return load(name)
    # A name such as `module:Id-v0` is for Gymnasium, which imports the module; the module registers the id.
    if not where or where in PREFIXES or not all(part.isidentifier() for part in [*where.split("."), attribute]):
        return None
    module = _import(where, name)
    return getattr(module, attribute, None)


def layout(value: Any, **options: Any) -> Any:
    """The layout, from its name, from `file.py:name` or from a value.

    `options` (`workers=2`) are passed to the function that makes the layout.
    """
    options = {name: option for name, option in options.items() if option is not None}
    if isinstance(value, str) and ":" in value:
        return _layout_in_file(value, options)
    if not isinstance(value, str):
        if options:
            raise LayoutError(
                f"`{min(options)}` can be given only with the name of a layout.",
                fix="Pass this option when you make the layout.",
            )
        return _checked_layout(value, f"{value!r}")
    make = find(value)
    if make is None:
        fix = "A layout of your own is `file.py:name`."
        raise unknown_name("layout", value, [*PRESETS, *ALIASES], fix=fix)
    for option in options:
        if not _takes(make, option):
            able = [name for name, preset in PRESETS.items() if _takes(preset, option)]
            raise LayoutError(f"Layout `{value}` takes no `{option}`.", fix=f"Layouts that take it: {', '.join(able)}.")
    return make(**options)


def made_with(layout: Any) -> dict[str, Any] | None:
    """The arguments with which a preset makes this layout, `shards` included; None if no preset makes it."""
    make = PRESETS.get(layout.name)
    if make is None:
        return None
    replicas = [group.replicas for group in layout.groups if group.replicas is not None]
    names = "workers", "learners" if _takes(make, "learners") else "buffers"
    shown = dict(zip(names, replicas, strict=False)) | {"devices": layout.groups[0].devices}
    shown |= {name: getattr(layout, name) for name in ("shards", "max_lag", "merge", "exact")}
    options = {name: value for name, value in shown.items() if _takes(make, name)}
    return options if make(**options) == layout else None


def _layout_in_file(target: str, options: dict[str, Any]) -> Any:
    """The layout that `my_layouts.py:pods` names: a value, or a function that makes a layout from `options`."""
    name, found = target.rpartition(":")[2], load(target, lists=Layout)
    if isinstance(found, Layout) or not callable(found):
        if options:
            raise LayoutError(
                f"`{target}` is a value, not a function, and takes no `{min(options)}`.",
                fix=f"Make it a function: def {name}(*, {min(options)}): return choreo.Layout(...)",
            )
        made = _checked_layout(found, f"`{target}`")
    else:
        _check_arguments(found, target, options)
        made = _checked_layout(found(**options), f"The result of `{target}`")
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(Layout)}
    return construct(Layout, fields | {"name": name}) if made.name == "custom" else made


def _check_arguments(make: Any, target: str, options: dict[str, Any]) -> None:
    parameters = inspect.signature(make).parameters
    for option in options:
        if not _takes(make, option):
            takes = ", ".join(f"`{name}`" for name in parameters) or "nothing"
            raise LayoutError(f"`{target}` takes no `{option}`.", fix=f"It takes {takes}.")
    for name, parameter in parameters.items():
        is_single = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_single and parameter.default is parameter.empty and name not in options:
            raise LayoutError(
                f"`{target}` needs `{name}`.",
                fix=f"Give `{name}` a default. Only --workers, --learners, --buffers, --devices, --shards, --max-lag, --merge and "
                "--exact are passed to the function.",
            )


def _takes(make: Any, option: str) -> bool:
    parameters = inspect.signature(make).parameters
    return option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _checked_layout(value: Any, what: str) -> Any:
    if not isinstance(value, Layout):
        raise LayoutError(
            f"{what} is not a layout, but {_a(type(value).__name__)}.",
            fix='A layout is choreo.Layout(choreo.Group("env", "actor"), choreo.Group("learner")), or a preset.',
        )
    return value


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def load(target: str, *, lists: type | tuple[type, ...] = ()) -> Any:
    """The value that `file.py:name` or `package.module:name` names.

    If there is no such name, the error suggests names of the same file: its functions, its classes, and its values whose type is in
    `lists`.
    """
    where, _, name = target.rpartition(":")
    module = _load_file(Path(where), target) if where.endswith(".py") else _import(where, target)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            defined = [
                n
                for n, v in vars(module).items()
                if isinstance(v, lists) or getattr(v, "__module__", None) == module.__name__
            ]
            raise (
                unknown_name(f"name in {where}", name, defined)
                if defined
                else UnknownNameError(f"{where} defines no `{name}`, and nothing else either.")
            )
        value = getattr(value, part)
    return value


def _import(module: str, target: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UnknownNameError(f"There is no module `{module}` for `{target}`.",
                               fix="Write `path/to/file.py:Name` for a file.")  # fmt: skip
    return importlib.import_module(module)


def _load_file(path: Path, target: str) -> ModuleType:
    if not path.is_file():
        near = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        if near:
            raise unknown_name("file", str(path), near)
        raise UnknownNameError(f"There is no file `{path}` for `{target}`.", fix="Give a path relative to this folder.")
    path = path.resolve()
    # A file that is loaded already is not run again: the user's script may call `train` with the script's own path, and a
    # run must be loaded with the same class as it was trained with.
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    name = f"choreo_user_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before the module is executed, because dataclasses look up their module
    sys.path.insert(0, str(path.parent))  # as `python my_ppo.py` does
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    # Other processes cannot import a module of this name, so its functions and classes are pickled by value.
    cloudpickle.register_pickle_by_value(module)
    return module


def construct(cls: type, fields: dict[str, Any]) -> Any:
    """Make a value of a dataclass from its fields. The items of a field like `*groups` are passed as separate arguments."""
    parameters = inspect.signature(cls).parameters.values()
    star = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    return cls(*fields.pop(star, ()), **fields) if star else cls(**fields)


def summary_line(value: Any) -> str:
    """The first line of the docstring of a class or function."""
    return (inspect.getdoc(value) or "").split("\n", 1)[0]
