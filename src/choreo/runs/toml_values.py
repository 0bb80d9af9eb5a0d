"""Turn values into TOML data for run.toml, and back.

    PPO(network=lstm)   describe ->   {"class": "ppo", "fields": {"network": {"name": "lstm"}, ...}}   rebuild ->   an equal value

Numbers, texts, lists, frozen dataclasses and importable functions can be described. A lambda cannot; `rebuild` then raises an
error. A class or function with a name in `choreo.runs.public_names` is written by that name, and counts as data. Any other
class or function is written as `module:Name` or `/path/file.py:name`. It is the user's code, and `rebuild` imports it only
with `trust`.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from choreo import envs
from choreo.errors import RunError, UnknownNameError, UntrustedError, unknown_name
from choreo.runs import public_names, resolve


def describe(value: Any) -> Any:
    """`value` as TOML data; a value that cannot be described becomes {"unknown": ...}, which `rebuild` refuses."""
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
"""Makes a value from its description; imports code and raises errors only when it is called."""


class Code:
    """The entries of a run.toml that name code, and whether this code may be run."""

    def __init__(self, *, trusted: bool):
        self.trusted = trusted
        self.entries: list[str] = []

    def may_run(self, entry: str, value: Any) -> bool:
        """Record that an entry names code, and return whether the code may be run."""
        shown = f'"{value}"' if isinstance(value, str) else str(value)
        self.entries.append(f"`{entry} = {shown[:100]}`")
        return self.trusted

    def check(self, file: str | Path = "run.toml") -> None:
        """Raise UntrustedError if code was recorded that may not be run; the error lists every entry."""
        if self.entries and not self.trusted:
            raise UntrustedError(
                f"The run names code, which was not run: {', '.join(self.entries)}.",
                at=str(file),
                fix="This account did not write the file, or the file was changed or moved since. If you trust its author, add "
                "--trust (trust=True), which runs all of this code.",
            )


def rebuild(data: Any, *, at: str, trust: bool = False) -> Any:
    """The value that `describe` described. `at` is its name in errors. Without `trust`, code is refused."""
    code = Code(trusted=trust)
    make = maker(data, at=at, code=code)
    code.check()
    return make()


def maker(data: Any, *, at: str, code: Code) -> Make:
    """Return a function that makes the value again from `data`, which is a result of `describe`.

    Entries that name code are recorded in `code`. Call `code.check` before you call the returned function, because the returned
    function imports the code. If the description has a mistake, the returned function raises RunError.
    """
    match data:
        case bool() | int() | float() | str():
            return lambda: data
        case list(items):
            return _each(items, at, code, list)
        case {"none": True}:
            return lambda: None
        case {"tuple": list(items)}:
            return _each(items, at, code, tuple)
        case {"dict": dict(items)}:
            return _mapping(items, at, code)
        case {"name": str(target)}:
            return finder(target, f"{at}.name", code)
        case {"class": str(target)}:
            if not isinstance(data.get("fields", {}), dict):
                return _refuser(f"`{at}.fields` is not a table.")
            make, fields = finder(target, f"{at}.class", code), _mapping(data.get("fields", {}), at, code)
            return lambda: _made(make(), fields(), at)
        case {"partial": func, "args": list(args), "kwargs": dict(kwargs)}:
            if (args or not _is_public_function(func)) and not code.may_run(f"{at}.partial", func):
                return _refuser(f"`{at}.partial` of this run is code.")
            make, positional = maker(func, at=f"{at}.partial", code=code), _each(args, at, code, list)
            named = _mapping(kwargs, at, code)
            return lambda: _partial(make(), positional(), named(), at)
    return _refuser(
        f"`{at}` of this run cannot be made again from its run.toml: it was "
        f"{data['unknown'] if isinstance(data, dict) and 'unknown' in data else data}.",
        fix="Pass it yourself, as in choreo.load(path, algo=...) or choreo.load(path, env=...); or give the run a function "
        "that can be imported instead of a lambda.",
    )


def _each(items: list[Any], at: str, code: Code, kind: type) -> Make:
    makers = [maker(item, at=f"{at}[{i}]", code=code) for i, item in enumerate(items)]
    return lambda: kind(make() for make in makers)


def _mapping(items: dict[str, Any], at: str, code: Code) -> Make:
    makers = {name: maker(item, at=f"{at}.{name}", code=code) for name, item in items.items()}
    return lambda: {name: make() for name, make in makers.items()}


def finder(target: str, at: str, code: Code) -> Make:
    """Return a function that finds `target`: the function looks up a public name, or imports code."""
    if target in public_names.table():
        return lambda: public_names.table()[target]
    if ":" not in target:
        known = unknown_name("public name", target, public_names.table())
        return _refuser(
            f"`{at}` of this run is `{target}`. {known.what}", fix=f"{known.fix} Or undo the last edit of run.toml."
        )
    if not code.may_run(at, target):
        return _refuser(f"`{at}` of this run is code.")
    return lambda: _reload(target, at.rpartition(".")[0])


def _is_public_function(func: Any) -> bool:
    name = func.get("name") if isinstance(func, dict) and len(func) == 1 else None
    known = public_names.table().get(name) if isinstance(name, str) else None
    return known is not None and not isinstance(known, type)


def _refuser(what: str, *, fix: str = "Undo the last edit of run.toml.") -> Make:
    def refuse() -> Any:
        raise RunError(what, fix=fix)

    return refuse


def names_code(data: Mapping[str, Any]) -> bool:
    """Whether a run.toml names code, so that opening it needs trust."""
    code = Code(trusted=False)
    for table in ("algorithm", "layout"):
        maker(data[table], at=table, code=code)
    environment_maker(data["environment"], code=code)
    return bool(code.entries)


def _made(cls: Any, fields: dict[str, Any], at: str) -> Any:
    if not isinstance(cls, type):
        raise RunError(f"`{at}.class` of this run is not a class, but {cls!r}.", fix="Undo the last edit of run.toml.")
    _check_arguments_of(cls, fields, at)
    return resolve.construct(cls, fields)


def _partial(func: Any, args: list[Any], kwargs: dict[str, Any], at: str) -> Any:
    _check_arguments_of(func, kwargs, at)
    return functools.partial(func, *args, **kwargs)


def _check_arguments_of(make: Any, arguments: dict[str, Any], at: str) -> None:
    """Refuse arguments of the wrong type for a class or function with a public name."""
    name = public_names.name_of(make)
    wrong = public_names.misfit(make, arguments) if name is not None else None
    if wrong is not None:
        raise RunError(
            f"`{at}` of this run cannot be made again: {wrong} in `{name}`.", fix="Undo the last edit of run.toml."
        )


def describe_environment(env: Any) -> dict[str, Any]:
    """An environment as TOML data: its name, `num_envs` and arguments, if these determine it; else the result of `describe`."""
    if isinstance(env, envs.HostEnv):
        target, kwargs = env.name if env.is_envpool else env.source.factory_call.target, env.arguments
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
"""These are refused in the `kwargs` of an environment: they have separate entries, or would select a different environment."""


def rebuild_environment(data: Any, *, trust: bool = False) -> Any:
    """The environment that `describe_environment` described. Without `trust`, code is refused."""
    code = Code(trusted=trust)
    make = environment_maker(data, code=code)
    code.check()
    return make()


def environment_maker(data: Any, *, code: Code) -> Make:
    """The same as `maker`, for an environment: `data` is a result of `describe_environment`."""
    if not isinstance(data, dict) or "num_envs" not in data:
        return maker(data, at="environment", code=code)
    name, count, kwargs = data.get("name"), data["num_envs"], data.get("kwargs", {})
    if not isinstance(name, str) or not isinstance(kwargs, dict):
        return _refuser(
            "`environment` of this run needs a `name`, which is a text, and `kwargs`, if given, must be a table."
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        return _refuser(f"`environment.num_envs = {count!r}` of this run is not a number of environments.")
    if not public_names.is_environment(name) and not public_names.is_no_environment(name):
        code.may_run("environment.name", name)
    for argument, value in kwargs.items():
        if argument in NOT_ARGUMENTS:
            return _refuser(f"`environment.kwargs.{argument}` of this run is not an argument of an environment.")
        if not public_names.is_plain(value, argument):
            code.may_run(f"environment.kwargs.{argument}", value)
    arguments = _mapping(kwargs, "environment.kwargs", code)
    return lambda: _named_environment(name, count, arguments(), trust=code.trusted)


def _named_environment(name: str, count: int, kwargs: dict[str, Any], *, trust: bool) -> Any:
    built_in = envs.BUILT_IN.get(name)
    if built_in is not None and (wrong := public_names.misfit(built_in, kwargs)) is not None:
        raise RunError(
            f"`environment.kwargs` of this run do not fit: {wrong} in `{name}`.", fix="Undo the last edit of run.toml."
        )
    try:
        return resolve.environment(name, count, **kwargs) if trust else envs.make(name, count, **kwargs)
    except UnknownNameError as error:
        raise RunError(
            f"`environment` of this run is `{name}`, which no longer exists. {error.what}",
            fix="Put the file back or install the package, or pass the environment yourself: choreo.load(path, env=...).",
        ) from error


def _reload(target: str, at: str) -> Any:
    try:
        return resolve.load(target)
    except UnknownNameError as error:
        raise RunError(
            f"`{at}` of this run is `{target}`, which no longer exists. {error.what}",
            fix="Put the file back, or pass the value yourself: choreo.load(path, algo=...).",
        ) from error


def _written_name(value: Any) -> str | None:
    """The name of a class or function in run.toml: its public name, or its module and name; None if it is not importable."""
    return public_names.name_of(value) or (_target(value) if _is_importable(value) else None)


def _target(value: Any) -> str:
    """`package.module:Name`, or `/path/file.py:Name` for a file outside of any package."""
    module = sys.modules[value.__module__]
    if module.__package__ or value.__module__ in sys.stdlib_module_names:
        return f"{value.__module__}:{value.__qualname__}"
    return f"{Path(module.__file__ or '').resolve()}:{value.__qualname__}"


def _is_importable(value: Any) -> bool:
    """Whether importing the module of a function or class, and looking up its name there, gives the same object."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    qualname = getattr(value, "__qualname__", None)
    if module is None or qualname is None or not getattr(module, "__file__", None):
        return False
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found is value
