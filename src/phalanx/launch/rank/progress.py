"""Whether ranks go on: a look at their recorders that takes microseconds, and how long they have stood still."""

from __future__ import annotations

import time
from collections.abc import Iterable

from phalanx.launch.rank.trace import Trace
from phalanx.watch.glance import Glance, glance

__all__ = ["Progress"]


class Progress:
    """The ranks of one trace, as they were at the last look.

    Args:
        trace: where they have their recorders.

    Attributes:
        waited_s: how long the one that has been in its operation for longest has been there; 0 if none is in one.
        moved_at: when one of them was last seen to have begun or ended an operation, on the monotonic clock.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._glances: dict[int, Glance] = {}
        self.waited_s = 0.0
        self.moved_at = time.monotonic()

    def look(self, parts: Iterable[int]) -> None:
        """Look at the ranks with these parts of the trace, which are those that run."""
        now = time.monotonic()
        self.waited_s = 0.0
        for part in parts:
            found = glance(self._trace.descriptor, self._trace.place_of_recorder(part))
            if found is None:
                self._glances.pop(part, None)
                continue
            if self._glances.get(part) != found:
                self._glances[part] = found
                self.moved_at = now
            if found.under_way_since_ns:
                self.waited_s = max(self.waited_s, now - found.under_way_since_ns / 1e9)
