"""Texts that are kept in `tests/golden/` and compared whole, so that every change shows in a diff.

After a change that was meant: `CHOREO_WRITE_GOLDEN=1 pytest tests/graph tests/plans`, and read the diff.
"""

import os
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    # Where a fragment is called moves with every edit of the file; which file and function must stay.
    text = re.sub(r"(\w+\.py):\d+", r"\1:LINE", text) + "\n"
    # How JAX spells the glue changes from release to release.
    text = re.sub(r"\d+ equations of glue", "SOME equations of glue", text)
    text = re.sub(r"(glue +)\d+ equations?: .*", r"\1SOME equations", text)
    path = FOLDER / f"{name}.txt"
    if os.environ.get("CHOREO_WRITE_GOLDEN"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"tests/golden/{name}.txt differs; if this was meant, set CHOREO_WRITE_GOLDEN=1"
