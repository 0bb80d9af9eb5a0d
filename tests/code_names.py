"""The names that the source code defines, for tests that check names in documents and in the code itself."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "choreo"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), path)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def short(path: Path) -> str:
    """The path of a file of the package as documents write it, for example `partition/cut.py`."""
    return path.relative_to(PACKAGE).as_posix()


def classes_in(path: Path) -> Iterator[str]:
    """The classes of a file, and the names that it gives to types at its top level, for example `Step = Segment | Transfer`."""
    tree = parsed(path)
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (name for name in names if name[:1].isupper() and not name.isupper())


@functools.cache
def defined_in(path: Path) -> frozenset[str]:
    """Every name that a file defines: classes, functions, variables, fields, parameters, and strings that are one word."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Constant(value=str(text)) if text.isidentifier():  # a role, a carrier or the name of a runtime
                found.add(text)
    return frozenset(found)


def where_defined(name: str) -> list[str]:
    """The files of the package that define a name."""
    return [short(path) for path in sources() if name in defined_in(path)]
