"""What all exceptions of Phalanx derive from."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["PhalanxError"]


class PhalanxError(RuntimeError):
    """Base of everything below. A ``RuntimeError``, because that is what torch raises and scripts catch.

    Attributes:
        is_consequence: errors of this class are always caused by another rank's end, so the launcher does not name the
            rank that raised one as the cause of the job's failure if another rank failed by itself.
    """

    is_consequence: ClassVar[bool] = False
