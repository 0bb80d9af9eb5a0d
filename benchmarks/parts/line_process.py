"""A process that is driven line by line: for each number on stdin, it runs that many iterations and prints measured seconds."""

import subprocess
from collections.abc import Sequence
from pathlib import Path


class LineProcess:
    """The process of a rival, which may have its own Python environment."""

    def __init__(self, python: Path, script: Path, *args: str):
        command = [python, "-W", "ignore", script, *args]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """Wait for the next line that the process prints, and return it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process ended; see its error above"
        return line

    def ask(self, iterations: int) -> Sequence[float]:
        """Let the process run `iterations` iterations; returns the seconds that it prints: wall time, or wall time and CPU time."""
        assert self.process.stdin is not None
        print(iterations, file=self.process.stdin, flush=True)
        return [float(word) for word in self.line().split()]

    def close(self) -> None:
        """Let the process end, and wait for it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
