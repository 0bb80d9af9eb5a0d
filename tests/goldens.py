"""Golden texts: printed graphs and plans in `tests/golden/`, compared as a whole, so that every change shows in a diff.

To change golden texts on purpose, run `CHOREO_WRITE_GOLDEN=1 pytest tests/graph tests/plans`, and read the diff.
"""

import os
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare a text with `tests/golden/<name>.txt`, or write it there if CHOREO_WRITE_GOLDEN is set."""
    # Line numbers change with every edit of a file, so only the names of files and functions are compared.
    text = re.sub(r"(\w+\.py):\d+", r"\1:LINE", text) + "\n"
    # The equations of glue differ from one release of JAX to the next, so they are not compared.
    text = re.sub(r"\d+ equations of glue", "SOME equations of glue", text)
    text = re.sub(r"(glue +)\d+ equations?: .*", r"\1SOME equations", text)
    path = FOLDER / f"{name}.txt"
    if os.environ.get("CHOREO_WRITE_GOLDEN"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), (
        f"The text differs from tests/golden/{name}.txt. If you intended this change, run pytest with CHOREO_WRITE_GOLDEN=1."
    )
