"""Every test that the track record names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "track-record.md"


def test_every_defect_is_held_down_by_a_test_that_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)*)`", PAGE.read_text())
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and "---" not in line]
    assert all("`tests/" in row for row in rows if not row.endswith("| test |"))
    missing = []
    for file, parts in named:
        text = (ROOT / file).read_text()
        missing += [
            f"{file}::{part}" for part in parts.split("::")[1:] if not re.search(rf"(def|class) {part}\b", text)
        ]
    assert not missing
