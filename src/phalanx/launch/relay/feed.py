"""The writing end of a rank's standard input, which must not block the process that hands the input on."""

from __future__ import annotations

import os

__all__ = ["Feed"]


class Feed:
    """What is written to one rank's standard input.

    Args:
        descriptor: the writing end of the pipe; -1 for a rank that gets no input.

    Attributes:
        descriptor: the same; -1 when the input has ended, or nobody reads it any more.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor
        self._waiting = b""

    @property
    def hungry(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._waiting)

    def feed(self, data: bytes = b"") -> bool:
        """Write as much as is taken; return whether all has been taken, so that more is welcome."""
        if self.descriptor < 0:
            return False
        self._waiting += data
        try:
            written = os.write(self.descriptor, self._waiting) if self._waiting else 0
        except BlockingIOError:
            return False
        except OSError:
            written = 0
        if not written:
            # Nobody reads any more.
            self.close()
            return False
        self._waiting = self._waiting[written:]
        return not self._waiting

    def close(self) -> None:
        """The input has ended."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
        self._waiting = b""
