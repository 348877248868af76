"""Base of all exceptions of Phalanx, and the walk from an exception to those that it came of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

__all__ = ["PhalanxError", "chain"]

# Modules of which every error has a section (explain/errors.py).
_EXPLAINED = ("phalanx.errors", "phalanx.rpc.connections", "phalanx.rpc.autograd.passes")


class PhalanxError(RuntimeError):
    """Base of everything below. A ``RuntimeError``, because that is what torch raises and scripts catch.

    What to do:
        ``except phalanx.PhalanxError`` catches all that Phalanx finds wrong. Catch a class below it if your program can
        act on that one error.

    Attributes:
        is_consequence: errors of this class are always caused by another rank's end, so the launcher does not name the
            rank that raised one as the cause of the job's failure if another rank failed by itself.
    """

    is_consequence: ClassVar[bool] = False

    @property
    def __notes__(self) -> list[str]:
        """Name the command that explains the error; Python >= 3.11 prints it below the message in a traceback."""
        notes: list[str] = vars(self).setdefault("_notes", [_look_up(type(self))])
        return notes

    @__notes__.setter
    def __notes__(self, notes: list[str]) -> None:
        vars(self)["_notes"] = notes


def _look_up(kind: type) -> str:
    """Return the class in whose section an error is explained: one that users import."""
    for each in kind.__mro__:
        if each.__module__ in _EXPLAINED:
            return f"What this means and what to do: phalanx explain {each.__name__}"
    return f"What this means and what to do: phalanx explain {PhalanxError.__name__}"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, then the one that it was raised for, and so on; each once, though they may form a circle."""
    seen: list[BaseException] = []
    while error is not None and all(error is not other for other in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__
