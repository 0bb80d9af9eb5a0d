"""docs/track-record.md and docs/security.md have tables with a column `test`. Every row of these tables names a test, and every
test that the two pages name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("track-record.md", "security.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_row_names_a_test_that_exists(page):
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)*)`", text)
    tables = re.findall(r"^\|[^\n]*\| test \|\n\|[- |]*\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 10 and all("`tests/" in row for row in rows)
    missing = []
    for file, parts in named:
        text = (ROOT / file).read_text()
        missing += [
            f"{file}::{part}" for part in parts.split("::")[1:] if not re.search(rf"(def|class) {part}\b", text)
        ]
    assert not missing
