"""The errors that users see, and how they are printed. Some modules define more errors, which derive from `ChoreoError`.

    what happened
      produced at  my_ppo.py:88:13 (act)
    what to do next

The code that raises an error writes the whole message: one sentence on what happened, the user's lines or option that
caused the error, and what to do next.
"""

import difflib
from collections.abc import Iterable


class ChoreoError(Exception):
    """Base of all our errors: what happened, where in the user's file, what to do next."""

    def __init__(self, what: str, *, at: str | None = None, fix: str | None = None, **places: str):
        self.what, self.fix = what, fix
        self.places = ({"at": at} if at else {}) | places
        super().__init__(what)

    def __str__(self) -> str:
        width = max((len(label) for label in self.places), default=0)
        lines = [f"  {label.replace('_', ' '):<{width}}  {place}" for label, place in self.places.items()]
        # Names of files and arrays in a message may come from an untrusted folder and contain terminal control sequences.
        return printable("\n".join([self.what, *lines, *([self.fix] if self.fix else [])]))

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.fix, self.places)


def _rebuild(cls: type[ChoreoError], what: str, fix: str | None, places: dict[str, str]) -> ChoreoError:
    return cls(what, fix=fix, **places)


class PartitionError(ChoreoError):
    """The algorithm cannot be divided among sites, or replicated, as the layout asks."""


class LayoutError(ChoreoError):
    """A layout contradicts itself or does not fit, for example if the environments cannot be divided evenly among replicas."""


class AlgorithmError(ChoreoError):
    """An algorithm lacks a part, or a part has the wrong form."""


class EnvError(ChoreoError):
    """An environment breaks its contract."""


class UnknownNameError(ChoreoError):
    """There is no algorithm, environment, layout or other thing of this name."""


class RunError(ChoreoError):
    """A run cannot start, go on, or be read back."""


class UntrustedError(RunError):
    """A run folder names code that the user has not allowed to run."""


class DivergedError(RunError):
    """A metric is no longer a finite number."""


class ChoreoWarning(UserWarning):
    """A run is correct, but probably not what the user intended."""


def printable(text: str) -> str:
    r"""`text` with all unprintable characters escaped, except line breaks and tabs.

    The escaped characters include terminal control sequences, and marks that reverse the direction of text.

    >>> print(printable("runs/\x1b[2Jx"))
    runs/\x1b[2Jx
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def unknown_name(kind: str, name: str, known: Iterable[str], *, fix: str | None = None) -> UnknownNameError:
    """The error for a name that is not among `known`; suggests similar names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(f'`{c}`' for c in close)}?" if close else f"Known: {', '.join(known)}."
    return UnknownNameError(f"There is no {kind} `{name}`.", fix=" ".join([hint, *([fix] if fix else [])]))
