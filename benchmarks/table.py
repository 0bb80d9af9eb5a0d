"""Make the table in README.md from the results in `results/`: `python benchmarks/table.py`."""

import json
from pathlib import Path

RESULTS, README = Path(__file__).parent / "results", Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- measured: begin", "<!-- measured: end -->"


def table() -> str:
    """A table with one row for each file in `results/`, and a line about the machines on which they were measured."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    rows = ["| question | ratio (median) | spread |", "| --- | --- | --- |"]
    for result in results:
        spread = f"{min(result['ratios']):.2f} to {max(result['ratios']):.2f}"
        rows.append(f"| {result['question']} | {result['ratio']:.2f} | {spread} |")
    on = {
        f"{r['cores']} cores ({', '.join(r['devices'])}), no GPU, Python {r['python']}, JAX {r['jax']}" for r in results
    }
    return "\n".join(
        [
            *rows,
            "",
            f"Measured on {' and '.join(sorted(on))}. Each script ran once, with several repetitions; see `make bench`.",
        ]
    )


def updated(readme: str) -> str:
    """`readme` with the current table."""
    head, rest = readme.split(BEGIN, 1)
    marker, rest = rest.split("\n", 1)
    return f"{head}{BEGIN}{marker}\n{table()}\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
