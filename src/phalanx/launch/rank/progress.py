"""Whether ranks go on: a look at their recorders that takes microseconds, and how long they have stood still."""

from __future__ import annotations

import time
from collections.abc import Mapping

from phalanx.diagnosis.reading import Position, read_position
from phalanx.launch.rank.trace import Trace
from phalanx.system import processes

__all__ = ["Progress"]


class Progress:
    """The ranks of one trace, as they were at the last look.

    Args:
        trace: where they have their recorders.

    Attributes:
        waited_s: how long the one that has been in its operation for longest has been there; 0 if none is in one.
        moved_at: when one of them was last seen to have begun or ended an operation, on the monotonic clock.
        stopped: the parts of those that a signal has stopped, and that have not moved since the look before.
        others_waited_s: as ``waited_s``, of those that are not stopped.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._glances: dict[int, Position] = {}
        self.waited_s = self.others_waited_s = 0.0
        self.moved_at = time.monotonic()
        self.stopped: tuple[int, ...] = ()

    def look(self, pids: Mapping[int, int]) -> None:
        """Look at the ranks that run; ``pids`` has their process ids, by their parts of the trace."""
        now = time.monotonic()
        self.waited_s = self.others_waited_s = 0.0
        stopped = []
        for part, pid in pids.items():
            found = read_position(self._trace.descriptor, self._trace.place_of_recorder(part))
            moves = self._glances.get(part) != found
            if not moves and processes.state_of(pid) == "T":
                stopped.append(part)
            if found is None:
                self._glances.pop(part, None)
                continue
            if moves:
                self._glances[part] = found
                self.moved_at = now
            if found.under_way_since_ns:
                waited_s = now - found.under_way_since_ns / 1e9
                self.waited_s = max(self.waited_s, waited_s)
                if part not in stopped:
                    self.others_waited_s = max(self.others_waited_s, waited_s)
        self.stopped = tuple(stopped)
