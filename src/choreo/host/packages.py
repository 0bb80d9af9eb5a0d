"""The installed packages that an environment uses. With other versions of these packages, the environment may behave differently.

    TimeLimit<Ant-v5>  ->  ("gymnasium", "mujoco", "numpy")

The search covers the environment and everything it wraps: their classes, the globals that their methods use, and their
attributes. It does not find a package that is imported within a function.
"""

import functools
import importlib.metadata
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any


def packages_of(env: Any) -> tuple[str, ...]:
    """The names of the packages that an environment (or a host function) uses, in alphabetical order.

    A user's own modules that are not installed are left out, because they have no version.
    """
    modules = {module for layer in _layers(env) for module in _modules_of(layer)}
    tops = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"choreo", "__main__"}
    return tuple(sorted({package for top in tops for package in _providers(top)}))


def _layers(env: Any) -> Iterator[Any]:
    """The environment, and all environments inside its wrappers."""
    seen = set()
    while env is not None and id(env) not in seen:
        seen.add(id(env))
        yield env
        env = getattr(env, "env", None) or next(iter(getattr(env, "envs", ())), None)


def _modules_of(layer: Any) -> Iterator[str]:
    attributes = list(getattr(layer, "__dict__", {}).values())
    yield from (type(each).__module__ for each in attributes)
    for function in (layer, *attributes):
        if isinstance(function, FunctionType):
            yield function.__module__
            yield from _used_by(function)
    for cls in inspect.getmro(layer if isinstance(layer, type) else type(layer)):
        yield cls.__module__
        for method in vars(cls).values():
            if isinstance(method, FunctionType):
                yield from _used_by(method)


def _used_by(function: FunctionType) -> Iterator[str]:
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        module = used.__name__ if isinstance(used, ModuleType) else getattr(used, "__module__", None)
        if isinstance(module, str):
            yield module


@functools.cache
def _providers(top: str) -> tuple[str, ...]:
    """The packages that contain a top-level module; empty if the module does not belong to an installed package."""
    try:
        return (importlib.metadata.distribution(top).name.lower().replace("_", "-"),)
    except importlib.metadata.PackageNotFoundError:
        pass
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    if "site-packages" not in file and "dist-packages" not in file:
        return ()  # not installed: skip the search of all packages, which takes a third of a second
    return tuple(importlib.metadata.packages_distributions().get(top, ()))
