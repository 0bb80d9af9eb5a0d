"""From what a user names to what it is, and back.

    "ppo", "my_ppo.py:MyPPO", PPO, PPO(...)     -> an algorithm
    "CartPole-v1", "my_env.py:make_env", MyEnv  -> an environment
    "coarse", "my_layouts.py:pods", coarse(2)   -> a layout

`describe` goes the other way: a value as TOML data from which `rebuild` makes an equal one. Numbers, strings, lists,
frozen dataclasses, and functions that can be imported are described; a lambda is not, and `rebuild` says so.

What has a name in `choreo.public_names` is written by that name, and is data. Everything else is written as `module:Name`
or `/path/file.py:name`: the user's code, which `rebuild` runs only with `trust`.
"""

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np

from choreo import public_names
from choreo.errors import (
    AlgorithmError,
    EnvError,
    LayoutError,
    RunError,
    UnknownNameError,
    UntrustedError,
    unknown_name,
)

PARTS = {
    "unroll": "the number of steps per environment and iteration",
    "init": "`init(env, key) -> carry`",
    "iterate": "`iterate(env, carry, key) -> (carry, metrics)`",
    "policy": "`policy(train) -> params`",
    "act": "`act(params, obs, key, *, greedy=False) -> (action, extras)`",
}
"""What an algorithm must have."""

PREFIXES = ("jax", "gymnax", "gymnasium", "envpool")
"""What may stand before the colon in an environment's name without being a module."""


def algorithm(algo: Any) -> Any:
    """The algorithm itself, from its name, its class, or itself."""
    if isinstance(algo, str):
        algo = algorithm_class(algo)
    if isinstance(algo, type):
        algo = _with_defaults(algo)
    name = type(algo).__name__
    for part, form in PARTS.items():
        if not hasattr(algo, part):
            raise AlgorithmError(f"`{name}` lacks `{part}`.", fix=f"Add {form}; see docs/your-own-algorithm.md.")
    if not dataclasses.is_dataclass(algo):
        raise AlgorithmError(
            f"`{name}` is no dataclass.", fix="Put @dataclass(frozen=True, kw_only=True) above the class."
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
    """The class behind `ppo`, `my_ppo.py:MyPPO` or `package.module:MyPPO`."""
    if ":" in name:
        cls = load(name)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise AlgorithmError(
                f"`{name}` is no algorithm, but a {type(cls).__name__}.",
                fix="An algorithm is a class with @dataclass(frozen=True, kw_only=True).",
            )
        return cls
    from choreo import algos

    return algos.find(name)


def environment(env: Any, num_envs: int | None = None, **kwargs: Any) -> Any:
    """The environment itself, `num_envs` times; 8 times if nothing is said.

    `env` is a name, a function that makes one (`lambda: MyEnv()`, `my_env.py:make_env`, a class), or the environment;
    `kwargs` are its own arguments.
    """
    from choreo import envs

    count = num_envs if num_envs is not None else 8
    if isinstance(env, str):
        factory = _factory(env)
        return envs.make(env, count, **kwargs) if factory is None else envs.from_factory(factory, count, **kwargs)
    if envs.makes_environments(env):
        return envs.from_factory(env, count, **kwargs)
    if kwargs:
        raise EnvError(
            f"`{min(kwargs)}` belongs to an environment given by name.", fix="Put it into the environment itself."
        )
    return env if num_envs is None else env.with_num_envs(num_envs)


def _factory(name: str) -> Any:
    """What makes environments, if `name` is `my_env.py:make_env` or `package.module:make_env`; else None."""
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        return load(name)
    # `module:Id-v0` is Gymnasium's way to say that a module has to be imported first.
    if not where or where in PREFIXES or not all(part.isidentifier() for part in [*where.split("."), attribute]):
        return None
    module = _import(where, name)
    return getattr(module, attribute, None)


def layout(value: Any, **options: Any) -> Any:
    """The layout itself, from its name or the file it is in; `options` (`workers=2`) go to what makes it."""
    from choreo.layouts import ALIASES, PRESETS, Layout, find

    options = {name: option for name, option in options.items() if option is not None}
    if isinstance(value, str) and ":" in value:
        return _layout_in_file(value, options)
    if not isinstance(value, str):
        if options:
            raise LayoutError(
                f"`{min(options)}` belongs to a layout given by name.", fix="Put it into the layout itself."
            )
        return _checked_layout(value, f"{value!r}", Layout)
    make = find(value)
    if make is None:
        fix = "A layout of your own is `file.py:name`."
        raise unknown_name("layout", value, [*PRESETS, *ALIASES], fix=fix)
    for option in options:
        if not _takes(make, option):
            able = [name for name, preset in PRESETS.items() if _takes(preset, option)]
            raise LayoutError(f"Layout `{value}` takes no `{option}`.", fix=f"Layouts that do: {', '.join(able)}.")
    return make(**options)


def made_with(layout: Any) -> dict[str, Any] | None:
    """The arguments with which a preset makes this layout, shards among them; None if none does."""
    from choreo.layouts import PRESETS

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
    """What `my_layouts.py:pods` stands for: a layout, or a function that makes one from `options`."""
    from choreo.layouts import Layout

    name, found = target.rpartition(":")[2], load(target, lists=Layout)
    if isinstance(found, Layout) or not callable(found):
        if options:
            raise LayoutError(
                f"`{target}` is a value, and takes no `{min(options)}`.",
                fix=f"Make it a function: def {name}(*, {min(options)}): return choreo.Layout(...)",
            )
        made = _checked_layout(found, f"`{target}`", Layout)
    else:
        _check_arguments(found, target, options)
        made = _checked_layout(found(**options), f"What `{target}` returns", Layout)
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(Layout)}
    return _construct(Layout, fields | {"name": name}) if made.name == "custom" else made


def _check_arguments(make: Any, target: str, options: dict[str, Any]) -> None:
    parameters = inspect.signature(make).parameters
    for option in options:
        if not _takes(make, option):
            takes = ", ".join(f"`{name}`" for name in parameters) or "nothing"
            raise LayoutError(f"`{target}` takes no `{option}`.", fix=f"It takes {takes}.")
    for name, parameter in parameters.items():
        is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_one and parameter.default is parameter.empty and name not in options:
            raise LayoutError(
                f"`{target}` needs `{name}`.",
                fix="Give it a default; --workers, --learners, --buffers, --devices, --shards, --max-lag, --merge and --exact "
                "are passed on.",
            )


def _takes(make: Any, option: str) -> bool:
    parameters = inspect.signature(make).parameters
    return option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _checked_layout(value: Any, what: str, kind: type) -> Any:
    if not isinstance(value, kind):
        raise LayoutError(
            f"{what} is no layout, but {_a(type(value).__name__)}.",
            fix='A layout is choreo.Layout(choreo.Group("env", "actor"), choreo.Group("learner")), or a preset.',
        )
    return value


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def load(target: str, *, lists: type | tuple[type, ...] = ()) -> Any:
    """What `file.py:name` or `package.module:name` stands for; values of type `lists` are also named if it is missing."""
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
                else UnknownNameError(f"There is no name in {where} `{name}`.")
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
        raise UnknownNameError(f"There is no file `{path}` for `{target}`.", fix="Give a path from this folder.")
    path = path.resolve()
    # A file that is loaded already is not run again: not the user's script from within itself, and the class a run was
    # trained with and the class it is loaded with are one.
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    name = f"choreo_user_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is being executed
    sys.path.insert(0, str(path.parent))  # as `python my_ppo.py` would
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    # No other process can import it by that name: what it defines goes there by value.
    cloudpickle.register_pickle_by_value(module)
    return module


def describe(value: Any) -> Any:
    """`value` as TOML data; what cannot be described becomes a note that `rebuild` refuses."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return {"tuple": [describe(v) for v in value]} if isinstance(value, tuple) else [describe(v) for v in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: describe(v) for key, v in value.items()}}
    if value is None:
        return {"none": True}
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and (name := _written_name(type(value))):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"class": name, **({"fields": fields} if fields else {})}
    if isinstance(value, functools.partial):
        args, kwargs = [describe(v) for v in value.args], {k: describe(v) for k, v in value.keywords.items()}
        return {"partial": describe(value.func), "args": args, "kwargs": kwargs}
    if name := _written_name(value):
        return {"name": name}
    return {"unknown": repr(value)}


Make = Callable[[], Any]
"""Makes a value that was described."""


def rebuild(data: Any, *, at: str, trust: bool = False) -> Any:
    """The value `describe` described; `at` names it in errors. Without `trust`, code is refused."""
    return maker(data, at=at, trust=trust)()


def maker(data: Any, *, at: str, trust: bool = False) -> Make:
    """What makes the value `describe` described.

    Without `trust`, code is refused here (UntrustedError), before anything is imported or made. All else that is wrong is
    refused by what is returned.
    """
    match data:
        case bool() | int() | float() | str():
            return lambda: data
        case list(items):
            return _each(items, at, trust, list)
        case {"none": True}:
            return lambda: None
        case {"tuple": list(items)}:
            return _each(items, at, trust, tuple)
        case {"dict": dict(items)}:
            return _mapping(items, at, trust)
        case {"name": str(target)}:
            return finder(target, f"{at}.name", trust)
        case {"class": str(target)}:
            if not isinstance(data.get("fields", {}), dict):
                return _refuser(f"`{at}.fields` is no table.")
            make, fields = finder(target, f"{at}.class", trust), _mapping(data.get("fields", {}), at, trust)
            return lambda: _made(make(), fields(), at)
        case {"partial": func, "args": list(args), "kwargs": dict(kwargs)}:
            if not trust and (args or not _is_public_function(func)):
                raise untrusted(f"{at}.partial", func)
            make, positional = maker(func, at=f"{at}.partial", trust=trust), _each(args, at, trust, list)
            named = _mapping(kwargs, at, trust)
            return lambda: _partial(make(), positional(), named(), at)
    return _refuser(
        f"`{at}` of this run cannot be made again from its run.toml: it was "
        f"{data['unknown'] if isinstance(data, dict) and 'unknown' in data else data}.",
        fix="Pass it yourself, as in choreo.load(path, algo=...) or choreo.load(path, env=...); or give the run a function "
        "that can be imported instead of a lambda.",
    )


def _each(items: list[Any], at: str, trust: bool, kind: type) -> Make:
    makers = [maker(item, at=f"{at}[{i}]", trust=trust) for i, item in enumerate(items)]
    return lambda: kind(make() for make in makers)


def _mapping(items: dict[str, Any], at: str, trust: bool) -> Make:
    makers = {name: maker(item, at=f"{at}.{name}", trust=trust) for name, item in items.items()}
    return lambda: {name: make() for name, make in makers.items()}


def finder(target: str, at: str, trust: bool) -> Make:
    """What finds a class or function by its public name or, with `trust`, by where it is."""
    if target in public_names.table():
        return lambda: public_names.table()[target]
    if ":" not in target:
        known = unknown_name("public name", target, public_names.table())
        return _refuser(f"`{at}` of this run is `{target}`. {known.what}", fix=f"{known.fix} Or undo the last edit.")
    if not trust:
        raise untrusted(at, target)
    return lambda: _reload(target, at.rpartition(".")[0])


def _is_public_function(func: Any) -> bool:
    name = func.get("name") if isinstance(func, dict) and len(func) == 1 else None
    known = public_names.table().get(name) if isinstance(name, str) else None
    return known is not None and not isinstance(known, type)


def untrusted(entry: str, value: Any) -> UntrustedError:
    """The refusal to run what an entry of run.toml names."""
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return UntrustedError(
        f"The run names code of its author's, which was not run: `{entry} = {shown[:100]}`.",
        fix="If you trust whoever wrote the file, add --trust (trust=True); or pass the value yourself: "
        "choreo.load(path, algo=..., env=...).",
    )


def _refuser(what: str, *, fix: str = "Undo the last edit.") -> Make:
    def refuse() -> Any:
        raise RunError(what, fix=fix)

    return refuse


def names_code(data: Mapping[str, Any]) -> bool:
    """Whether a run.toml needs trust: whether it names anything that is not in the table."""
    try:
        for table in ("algorithm", "layout"):
            maker(data[table], at=table)
        environment_maker(data["environment"])
    except UntrustedError:
        return True
    return False


def _made(cls: Any, fields: dict[str, Any], at: str) -> Any:
    if not isinstance(cls, type):
        raise RunError(f"`{at}.class` of this run is no class, but {cls!r}.", fix="Undo the last edit.")
    _check_arguments_of(cls, fields, at)
    return _construct(cls, fields)


def _partial(func: Any, args: list[Any], kwargs: dict[str, Any], at: str) -> Any:
    _check_arguments_of(func, kwargs, at)
    return functools.partial(func, *args, **kwargs)


def _check_arguments_of(make: Any, arguments: dict[str, Any], at: str) -> None:
    """Of what has a public name, every argument has a known type: a wrong one is an error of the file, said here."""
    name = public_names.name_of(make)
    wrong = public_names.misfit(make, arguments) if name is not None else None
    if wrong is not None:
        raise RunError(f"`{at}` of this run cannot be made again: {wrong} in `{name}`.", fix="Undo the last edit.")


def describe_environment(env: Any) -> dict[str, Any]:
    """An environment as TOML data: its name, its count and its arguments, if these are all there is to it."""
    from choreo import envs

    if isinstance(env, envs.HostEnv):
        target, kwargs = env.name if env.is_envpool else env.source.recipe.target, env.arguments
    else:
        target, kwargs = env.name, envs.settings_of(env)
        if kwargs is None:
            return describe(env)
    name = target if isinstance(target, str) else _written_name(target)
    if name is None:
        return {"unknown": repr(target)}
    described = {"name": name, "num_envs": env.num_envs}
    return described | ({"kwargs": {k: describe(v) for k, v in kwargs.items()}} if kwargs else {})


NOT_ARGUMENTS = ("name", "id", "env", "env_id", "num_envs")
"""What no environment is given by its `kwargs`: it has a place of its own, or would stand for another environment."""


def rebuild_environment(data: Any, *, trust: bool = False) -> Any:
    """The environment `describe_environment` described. Without `trust`, code is refused."""
    return environment_maker(data, trust=trust)()


def environment_maker(data: Any, *, trust: bool = False) -> Make:
    """What makes the environment `describe_environment` described; code is refused here, as by `maker`."""
    if not isinstance(data, dict) or "num_envs" not in data:
        return maker(data, at="environment", trust=trust)
    name, count, kwargs = data.get("name"), data["num_envs"], data.get("kwargs", {})
    if not isinstance(name, str) or not isinstance(kwargs, dict):
        return _refuser(
            "`environment` of this run needs a text `name`, and `kwargs` that are a table, if there are any."
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        return _refuser(f"`environment.num_envs = {count!r}` of this run is no number of environments.")
    if not trust and not public_names.is_environment(name) and not public_names.is_no_environment(name):
        raise untrusted("environment.name", name)
    for argument, value in kwargs.items():
        if argument in NOT_ARGUMENTS:
            return _refuser(f"`environment.kwargs.{argument}` of this run is no argument of an environment.")
        if not trust and not public_names.is_plain(value, argument):
            raise untrusted(f"environment.kwargs.{argument}", value)
    arguments = _mapping(kwargs, "environment.kwargs", trust)
    return lambda: _named_environment(name, count, arguments(), trust)


def _named_environment(name: str, count: int, kwargs: dict[str, Any], trust: bool) -> Any:
    from choreo import envs

    try:
        return environment(name, count, **kwargs) if trust else envs.make(name, count, **kwargs)
    except UnknownNameError as error:
        raise RunError(
            f"`environment` of this run is `{name}`, which is gone. {error.what}",
            fix="Put the file back or install the package, or pass the environment yourself: choreo.load(path, env=...).",
        ) from error


def _construct(cls: type, fields: dict[str, Any]) -> Any:
    parameters = inspect.signature(cls).parameters.values()
    star = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    return cls(*fields.pop(star, ()), **fields) if star else cls(**fields)


def _reload(target: str, at: str) -> Any:
    try:
        return load(target)
    except UnknownNameError as error:
        raise RunError(
            f"`{at}` of this run is `{target}`, which is gone. {error.what}",
            fix="Put the file back, or pass the value yourself: choreo.load(path, algo=...).",
        ) from error


def _written_name(value: Any) -> str | None:
    """How run.toml names a class or function: its public name, or where it is; None if it cannot be found again."""
    return public_names.name_of(value) or (_target(value) if _is_importable(value) else None)


def _target(value: Any) -> str:
    """`package.module:Name`, or `/path/file.py:Name` for a file that belongs to no package."""
    module = sys.modules[value.__module__]
    if module.__package__ or value.__module__ in sys.stdlib_module_names:
        return f"{value.__module__}:{value.__qualname__}"
    return f"{Path(module.__file__ or '').resolve()}:{value.__qualname__}"


def _is_importable(value: Any) -> bool:
    """Whether the module a function or class says it is from holds it under its name, and can be loaded again."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    qualname = getattr(value, "__qualname__", None)
    if module is None or qualname is None or not getattr(module, "__file__", None):
        return False
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found is value


def summary_line(value: Any) -> str:
    """The first line of a docstring, for lists."""
    return (inspect.getdoc(value) or "").split("\n", 1)[0]
