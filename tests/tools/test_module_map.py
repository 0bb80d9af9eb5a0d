"""The module map of docs/architecture.md agrees with the imports."""

import importlib.util

import pytest

from code_names import ROOT

SPEC = importlib.util.spec_from_file_location("module_map", ROOT / "tools" / "module_map.py")
assert SPEC is not None and SPEC.loader is not None
module_map = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(module_map)


def test_the_map_in_the_docs_is_up_to_date(capsys):
    assert module_map.main(["--check"]) == 0, capsys.readouterr().out


def test_an_old_map_is_noticed_and_rewritten(tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs" / "architecture.md"
    page.parent.mkdir()
    page.write_text(f"before\n{module_map.BEGIN}\nold\n{module_map.END}\nafter\n")
    monkeypatch.setattr(module_map, "PAGE", page)
    monkeypatch.setattr(module_map, "module_map", lambda: "new")
    monkeypatch.setattr(module_map, "ROOT", tmp_path)
    assert module_map.main(["--check"]) == 1
    assert "docs/architecture.md is out of date. Run: python tools/module_map.py --write" in capsys.readouterr().out
    assert module_map.main(["--write"]) == 0 and module_map.main(["--check"]) == 0
    assert page.read_text() == f"before\n{module_map.BEGIN}\nnew\n{module_map.END}\nafter\n"


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="needs the lines"):
        module_map.with_map("a page", "a map")


def test_every_room_has_a_row_and_imports_only_rows_below():
    """A package in a package, such as `runtime/engine`, has a row too. Packages in the same outer package may import each other,
    whatever the order of their rows."""
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in module_map.module_map().splitlines()[2:]]
    rooms = [row[0].strip("`") for row in rows]
    folder = ROOT / "src" / "choreo"
    packages = {path.parent.name for path in folder.glob("*/__init__.py")} | {path.stem for path in folder.glob("*.py")}
    assert {room for room in rooms if "/" not in room} == packages - {"__init__"}
    outer = [room.split("/")[0] for room in rooms]
    for number, row in enumerate(rows):
        for imported in row[2].replace("`", "").split(", "):
            assert imported == "-" or rooms.index(imported) > number or imported.split("/")[0] == outer[number], row
