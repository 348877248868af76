"""What all exceptions of Phalanx derive from, and the walk from an exception to those that it came of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

__all__ = ["PhalanxError", "chain"]


class PhalanxError(RuntimeError):
    """Base of everything below. A ``RuntimeError``, because that is what torch raises and scripts catch.

    Attributes:
        is_consequence: errors of this class are always caused by another rank's end, so the launcher does not name the
            rank that raised one as the cause of the job's failure if another rank failed by itself.
    """

    is_consequence: ClassVar[bool] = False


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, then the one that it was raised for, and so on; each once, though they may form a circle."""
    seen: list[BaseException] = []
    while error is not None and all(error is not other for other in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__
