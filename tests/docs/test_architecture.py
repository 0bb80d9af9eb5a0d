"""Every file and every name in backticks in docs/architecture.md exists.

If names in brackets follow a file, the file defines these names.
"""

import ast
import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from code_names import PACKAGE, ROOT, defined_in, parsed, short, sources, where_defined

PAGE = ROOT / "docs" / "architecture.md"
MAP = re.compile(r"<!-- module map: begin.*?<!-- module map: end -->", re.DOTALL)
FILE = r"[\w./-]+\.(?:py|md|toml)"
PLACEHOLDER = "NAME"
"""The page writes this word for a name that the reader chooses, as in `algos/NAME.py`."""
NOT_OURS = ("jax.", "subprocess.", "vmap")
"""A name that begins with one of these texts is not a name of Choreo."""


def page() -> str:
    """The text of the page without the module map. The map needs no check here, because a tool writes it from docstrings."""
    return MAP.sub("", PAGE.read_text())


def test_every_file_in_backticks_exists():
    files = [file for file in re.findall(rf"`({FILE})`", page()) if PLACEHOLDER not in file]
    lost = [suggest(file, map(short, sources())) for file in files if find(file) is None]
    assert len(files) > 50 and not lost, f"docs/architecture.md names files that do not exist: {'; '.join(lost)}"


def test_names_in_brackets_are_defined_in_the_file_before_the_brackets():
    wrong = []
    for file, names in re.findall(rf"`({FILE})` \((`[^)]*`)\)", page()):
        path = find(file)
        for name in re.findall(r"`(\w+)`", names):
            if path is None or name not in defined_in(path):
                wrong.append(
                    f"`{name}` is not in {file}. Files that define it: {', '.join(where_defined(name)) or 'none'}"
                )
    assert not wrong, "docs/architecture.md:\n" + "\n".join(wrong)


def test_every_name_in_backticks_exists():
    spans = sorted(set(re.findall(r"`([^`\n]+)`", page())))
    known = {name for path in sources() for name in defined_in(path)}
    lost = [suggest(span, known) for span in spans if is_name(span) and not exists(span)]
    assert not lost, f"docs/architecture.md has names that the source does not define: {'; '.join(lost)}"


def test_the_checks_find_files_and_names_that_do_not_exist():
    assert find("partition/cut.py") and not find("partition/no_such.py")
    assert exists("choreo.testing.check_env") and exists("choreo.runtime.worker") and exists("Layout") and exists("ops")
    assert not exists("choreo.testing.no_such") and not exists("choreo.no_such.worker") and not exists("no_such_name")
    assert not is_name("choreo list layouts") and not is_name("--layout") and not is_name("jax.jit(iterate)")
    assert suggest("partition/cutt.py", ["partition/cut.py"]) == "`partition/cutt.py` (perhaps partition/cut.py)"


def find(file: str) -> Path | None:
    """The path of a file of the package or of the repository, or None if there is no such file."""
    return next((path for path in (PACKAGE / file, ROOT / file) if path.exists()), None)


def is_name(span: str) -> bool:
    """Whether a text in backticks is a name of Choreo, and not a file, a command, an option, or a name of a library."""
    return bool(re.fullmatch(r"\w+(\.\w+)*", span)) and not re.fullmatch(FILE, span) and not span.startswith(NOT_OURS)


def exists(name: str) -> bool:
    """Whether a module, a package or a definition has this name."""
    if not name.startswith("choreo."):
        return bool(where_defined(name)) or (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
    return bool(module_files(name)) or any(
        last in defined_in(file) or last in imported_by(file)
        for module, _, last in [name.rpartition(".")]
        for file in module_files(module)
    )


def module_files(name: str) -> list[Path]:
    path = ROOT / "src" / name.replace(".", "/")
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]


def imported_by(file: Path) -> set[str]:
    """The names that a file imports. An `__init__.py` re-exports names of its modules in this way."""
    imports = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def suggest(wrong: str, known: Iterable[str]) -> str:
    return f"`{wrong}` (perhaps {', '.join(difflib.get_close_matches(wrong, list(known))) or 'removed'})"
