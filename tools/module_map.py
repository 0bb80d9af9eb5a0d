"""Draw the module map of docs/architecture.md from the imports of the package.

python tools/module_map.py            prints the map
python tools/module_map.py --write    writes the map between the two markers of docs/architecture.md
python tools/module_map.py --check    fails if the map in docs/architecture.md is out of date

Each row shows a room: a package, or a module at the top level. The rooms at the top level are in the order of the layers in
pyproject.toml. Each of them imports only rooms of its own layer and of lower layers. The packages within a room follow the room in
alphabetical order; a separate contract in pyproject.toml orders their imports. The description of a room is the first sentence of
its docstring.
"""

import argparse
import ast
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- module map: begin. Written by tools/module_map.py --write; do not edit by hand. -->"
END = "<!-- module map: end -->"
EVERYWHERE = ("types", "errors")
"""Rooms that every other room may import; the map does not list them as imports."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help=f"rewrite the map in {PAGE.relative_to(ROOT)}")
    choice.add_argument("--check", action="store_true", help="exit with 1 if the map in that file is out of date")
    options = parser.parse_args(argv)
    drawn = module_map()
    if not (options.write or options.check):
        print(drawn)
        return 0
    old = PAGE.read_text()
    new = with_map(old, drawn)
    if options.write:
        PAGE.write_text(new)
    elif new != old:
        print(f"The module map in {PAGE.relative_to(ROOT)} is out of date. Run: python tools/module_map.py --write")
        return 1
    return 0


def with_map(page: str, drawn: str) -> str:
    """The page with this map between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} needs the lines\n{BEGIN}\n{END}")
    return f"{before}{BEGIN}\n{drawn}\n{END}{after}"


def module_map() -> str:
    """The map as a Markdown table."""
    sys.path.insert(0, str(ROOT / "src"))
    try:
        graph = grimp.build_graph("choreo", exclude_type_checking_imports=True, cache_dir=None)
    finally:
        sys.path.pop(0)
    rooms = rooms_in_order()
    rows = ["| room | what is in it | imports |", "| --- | --- | --- |"]
    for room in rooms:
        imported = ", ".join(f"`{other}`" for other in imports_of(graph, room, rooms) if other not in EVERYWHERE)
        rows.append(f"| `{room}` | {description(room)} | {imported or '-'} |")
    return "\n".join(rows)


def rooms_in_order() -> list[str]:
    """The rooms by layer, highest layer first. Each room is followed by the packages within it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    rooms = [room.strip() for layer in layers for room in layer.replace("|", ":").split(":")]
    return [each for room in rooms for each in (room, *packages_in(room))]


def packages_in(room: str) -> list[str]:
    folder = ROOT / "src" / "choreo" / room
    return sorted(f"{room}/{inner.parent.name}" for inner in folder.glob("*/__init__.py"))


def imports_of(graph: grimp.ImportGraph, room: str, rooms: list[str]) -> list[str]:
    """The rooms that the modules of this room import, in the order of the map.

    A package within this room is a separate room, so the imports of its modules are not included.
    """
    inside = {module for module in graph.modules if room_of(module, rooms) == room}
    found = {room_of(name, rooms) for module in inside for name in graph.find_modules_directly_imported_by(module)}
    return [other for other in rooms if other in found and other != room]


def room_of(module: str, rooms: list[str]) -> str:
    """The innermost room of a module; empty for the package itself."""
    path = module.removeprefix("choreo").removeprefix(".").replace(".", "/")
    return max((room for room in rooms if f"{path}/".startswith(f"{room}/")), key=len, default="")


def description(room: str) -> str:
    """The first sentence of the room's docstring."""
    package = ROOT / "src" / "choreo" / room
    file = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text()))
    if not text:
        raise ValueError(
            f"{file.relative_to(ROOT)} needs a docstring: its first sentence is the room's line in the map"
        )
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].removesuffix(".").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
