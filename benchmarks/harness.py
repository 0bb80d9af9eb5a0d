"""Write the result of a benchmark: one JSON line with its numbers and with the machine on which they were measured."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, *, quick: bool, **numbers: Any) -> None:
    """Print the result. Also write it to `results/<name>.json`, unless this is a quick run."""
    result = {"benchmark": name, **_rounded(numbers), "quick": quick, **machine()}
    print(json.dumps(result))
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(result) + "\n")


def machine() -> dict[str, Any]:
    """The commit, the versions, the hardware and its load."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": [device.device_kind for device in jax.devices()],
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def _rounded(numbers: dict[str, Any]) -> dict[str, Any]:
    def short(x):
        return float(f"{x:.4g}") if isinstance(x, float) else [short(y) for y in x] if isinstance(x, list) else x

    return {name: short(value) for name, value in numbers.items()}
