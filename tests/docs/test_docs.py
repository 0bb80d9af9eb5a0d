"""Run the code blocks of docs/, README.md, CONTRIBUTING.md and CHANGELOG.md.

Each document is one test. Its blocks run from top to bottom in an empty folder and share their variables:

    ```python                      is executed
    ```python title="my_ppo.py"    is executed, and also written to the file my_ppo.py, which later commands can use
    ```console                     each command `$ choreo ...` is run. The lines below a command are its expected output, in
                                   which `...` matches any text
    ```text, ```sh                 is not run

Commands run in this process, which is fast because JAX is loaded already. Only `choreo evaluate` in README.md runs in a new
process, to show that the files of a run are enough to evaluate the run. We do not use the package sybil, because sybil
supports neither titles nor commands.
"""

import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from choreo.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENTS = [*(ROOT / page for page in PAGES), *sorted((ROOT / "docs").rglob("*.md"))]
TERMINAL = {"COLUMNS": "120", "NO_COLOR": "1"}
FENCE = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    text: str
    line: int
    """The line number, in the document, of the first line of `text`."""


def blocks_in(document: str) -> list[Block]:
    """The fenced code blocks of a document, in order."""
    if document.count("\n```") % 2:
        raise ValueError("a fence is not closed")
    return [
        Block(m["language"], m["title"], m["text"], document.count("\n", 0, m.start("text")) + 1)
        for m in FENCE.finditer(document)
    ]


def commands_in(block: Block) -> list[tuple[str, str]]:
    """The commands of a console block, each with its expected output. After a backslash, a command continues on the next line."""
    found: list[tuple[str, str]] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif line.strip():
            assert found, f"line {block.line}: a console block must begin with `$ `"
            found[-1] = (found[-1][0], found[-1][1] + line + "\n")
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_code_block_of_a_document_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in TERMINAL.items():
        monkeypatch.setenv(name, value)
    # Users have JAX's default promotion rules, while our other tests have strict rules.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run_blocks(path)


def run_blocks(path: Path) -> None:
    names: dict[str, object] = {"__name__": "__doc__"}
    for block in blocks_in(path.read_text()):
        if block.language == "python":
            if block.title:
                Path(block.title).write_text(block.text)
            # The empty lines in front make a traceback show line numbers of the document.
            exec(compile("\n" * (block.line - 1) + block.text, path, "exec"), names)
        elif block.language == "console":
            for command, expected in commands_in(block):
                new_process = path.parent == ROOT and command.startswith("choreo evaluate")
                run_command(command, expected, f"{path.name}:{block.line}", as_user if new_process else in_process)


def run_command(command: str, expected: str, place: str, run: Callable[[list[str]], tuple[int, str]]) -> None:
    """Run a command `choreo ...` and compare its output with `expected`. Other commands, such as make and pip, are not run."""
    program, *args = shlex.split(command, comments=True)
    if program != "choreo":
        return
    code, printed = run(args)
    # A document may show a command that fails, but only together with the error message.
    assert code == 0 or expected, f"{place}: `{command}` failed:\n{printed}"
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert not expected or doctest.OutputChecker().check_output(expected, printed, options), (
        f"{place}: `{command}` should print\n{expected}but prints\n{printed}"
    )


def as_user(args: list[str]) -> tuple[int, str]:
    """Run a command in a new process, as a user does; return its exit code and its output."""
    done = subprocess.run([sys.executable, "-m", "choreo", *args], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def in_process(args: list[str]) -> tuple[int, str]:
    """Run a command in this process, which is faster; return its exit code and its output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    return code, out.getvalue() + err.getvalue()


def test_the_documents_include_the_readme_and_the_main_pages():
    names = {p.name for p in DOCUMENTS}
    assert {"README.md", "index.md", "your-own-algorithm.md", "layouts.md", "law.md", "cli.md"} <= names


def test_links_lead_to_files_that_exist():
    lost = [
        f"{path.name}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert not lost


class TestCollector:
    """The functions above find every block and every command, and report each error."""

    def test_it_finds_titles_line_numbers_and_continued_commands(self):
        text = 'a\n```python title="x.py"\nassert 1\n```\n```console\n$ choreo list \\\n  algos\nppo\n```\n'
        code, console = blocks_in(text)
        assert (code.language, code.title, code.text, code.line) == ("python", "x.py", "assert 1\n", 3)
        assert commands_in(console) == [("choreo list    algos", "ppo\n")]

    def test_a_fence_that_is_not_closed_is_an_error(self):
        with pytest.raises(ValueError, match="not closed"):
            blocks_in("\n```python\nassert 1\n")

    @pytest.mark.parametrize("run", [as_user, in_process])
    def test_a_command_that_fails_without_expected_output_is_an_error(self, run):
        with pytest.raises(AssertionError, match="failed:\n.*There is no command"):
            run_command("choreo no-such-command", "", "here:1", run)

    @pytest.mark.parametrize("run", [as_user, in_process])
    def test_output_that_differs_from_the_document_is_an_error(self, run):
        with pytest.raises(AssertionError, match="should print"):
            run_command("choreo --help", "something else\n", "here:1", run)
