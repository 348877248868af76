"""Frames that were sent, and that the other side has not said to have received: what a new connection begins with.

Each numbered frame of a link is kept here before it is written for the first time. The other side says now and then
how many it has received (an ACK frame), and those are forgotten. When the connection breaks and another one takes its
place, both sides say how many they have received, and each sends those behind that number again. So every frame arrives
once, and in order, whatever was lost with the connection.

Frames are added by the thread that writes, and forgotten by the one that reads, or that mends the link; each of the two
counters of bytes has one of them as its only writer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from phalanx.wire.framing import Malformed

__all__ = ["Unacknowledged"]

Parts = Sequence[bytes | memoryview]


class Unacknowledged:
    """The frames of one direction.

    Attributes:
        forgotten: how many frames the other side has received, as far as is known.
        changed: is notified when frames have been forgotten.
    """

    def __init__(self) -> None:
        self.forgotten = 0
        self.changed = threading.Condition()
        self._frames: deque[tuple[int, Parts]] = deque()
        self._added_bytes = self._forgotten_bytes = 0

    @property
    def nbytes(self) -> int:
        """How many bytes are kept."""
        return self._added_bytes - self._forgotten_bytes

    def add(self, parts: Parts, nbytes: int) -> None:
        """Keep a frame. Memory that is not its own may change only after :meth:`own`."""
        self._added_bytes += nbytes
        self._frames.append((nbytes, parts))

    def forget(self, received: int) -> None:
        """Forget the first ``received`` frames of the link.

        Raises:
            Malformed: so many have not been sent.
        """
        with self.changed:
            if not 0 <= received <= self.forgotten + len(self._frames):
                raise Malformed(f"{received} frames are said to have come, which were not sent")
            while self.forgotten < received:
                self._forgotten_bytes += self._frames.popleft()[0]
                self.forgotten += 1
            self.changed.notify_all()

    def own(self) -> None:
        """Copy what lies in memory of somebody else, which may change it from now on."""
        with self.changed:
            for at in range(len(self._frames)):
                nbytes, parts = self._frames[at]
                if any(isinstance(part, memoryview) for part in parts):
                    self._frames[at] = nbytes, (b"".join(parts),)

    def all(self) -> list[Parts]:
        """The frames, oldest first."""
        with self.changed:
            return [parts for _, parts in list(self._frames)]
