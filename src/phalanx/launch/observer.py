"""Look at the flight recorders of one agent's ranks; a look takes microseconds.

Once a rank has been in one operation for long, or is stopped, the agent says so at every look, and once more when that
is over. The supervisor then asks what the ranks do (``hang_watch.py``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.diagnosis.reading import Position, read_position
from phalanx.launch.job.options import Diagnosis
from phalanx.launch.protocol import Examine, Examined, Look, Looked, Waits
from phalanx.launch.rank.trace import Trace
from phalanx.system import processes

if TYPE_CHECKING:
    from phalanx.diagnosis.snapshot import Recording
    from phalanx.launch.running.rank_look import WatchedRank

__all__ = ["Observer", "within"]

# What the operations of all ranks may take in an answer, as JSON, in bytes: the ranks' output comes by the same link.
LARGEST_ANSWER = 1 << 20
_LONGEST_STACK = 1 << 14


class Observer:
    """Watch the ranks of one agent.

    ``numbers`` are their ranks in the world, in the order of their parts of the trace, and ``pids`` the processes of
    those that run, by part; the agent takes out those that have ended. With ``watch_after_s`` 0 it never says anything.
    """

    def __init__(self, trace: Trace, numbers: Sequence[int], pids: dict[int, int], watch_after_s: float) -> None:
        self._trace, self._numbers, self._pids = trace, numbers, pids
        self._times = Diagnosis(watch_after_s)
        self._started = dict(pids)
        self._watched: dict[int, WatchedRank] = {}  # by part, once somebody looks at them by phalanx top
        self._glances: dict[int, Position] = {}
        self._waited_s = 0.0  # how long the rank that has been in its operation for longest has been there
        self._moved_at = time.monotonic()
        self._has_said = False  # whether something was to be said at the last look
        self.look_at = self._moved_at + self._times.look_every_s if watch_after_s else None

    def look(self, now: float) -> Waits | None:
        """Look at the ranks, if it is time to; what is to be said of it."""
        if self.look_at is None or now < self.look_at or not self._pids:
            return None
        stopped = self._look(now)
        self.look_at = now + self._times.look_again_in_s(self._times.ask_after_s - self._waited_s)
        waited_s = self._waited_s if self._waited_s >= self._times.ask_after_s else 0.0
        before, self._has_said = self._has_said, bool(waited_s or stopped)
        if not (self._has_said or before):
            return None
        return Waits(waited_s=waited_s, still_s=now - self._moved_at, stopped=stopped)

    def _look(self, now: float) -> list[int]:
        """Find the ranks that a signal has stopped, and that have not moved since the look before."""
        self._waited_s, stopped = 0.0, []
        for part, pid in self._pids.items():
            found = read_position(self._trace.descriptor, self._trace.place_of_recorder(part))
            moves = self._glances.get(part) != found
            if not moves and processes.state_of(pid) == "T":
                stopped.append(self._numbers[part])
            if found is None:
                self._glances.pop(part, None)
                continue
            if moves:
                self._glances[part], self._moved_at = found, now
            if found.under_way_since_ns:
                self._waited_s = max(self._waited_s, now - found.under_way_since_ns / 1e9)
        return stopped

    def look_closely(self, question: Look) -> Looked:
        """Collect what ``phalanx top`` shows of the ranks, those that have ended included."""
        # Not imported at the top, because it needs numpy, and most jobs are never looked at.
        from phalanx.launch.running.rank_look import WatchedRank, pause_after_s

        began_s, now_ns = time.process_time(), time.monotonic_ns()
        looks = []
        for part, pid in self._started.items():
            if part not in self._watched:
                self._watched[part] = WatchedRank(self._trace, part, self._numbers[part], pid)
            looks.append(self._watched[part].look(now_ns, runs=part in self._pids))
        seen = msgspec.to_builtins(looks)
        return Looked(number=question.number, pause_s=pause_after_s(time.process_time() - began_s), looks=seen)

    def answer(self, question: Examine, stacks: Mapping[int, str]) -> Examined:
        """Collect what is seen of the ranks now; ``stacks`` has what they have written, by rank in the world."""
        now = time.monotonic()
        self._look(now)
        room = LARGEST_ANSWER // max(1, len(self._pids))
        seen = {
            self._numbers[part]: {
                "state": processes.state_of(pid),
                "asked": self._trace.asked(part),
                "recording": within(room, self._trace.recording(part), question.records),
            }
            for part, pid in self._pids.items()
        }
        cut = {rank: stack[-_LONGEST_STACK:] for rank, stack in stacks.items()}
        return Examined(
            number=question.number, waited_s=self._waited_s, still_s=now - self._moved_at, ranks=seen, stacks=cut
        )


def within(nbytes: int, recording: Recording | None, records: int) -> dict[str, Any] | None:
    """Cut a rank's last operations, at most ``records``, to so many bytes of JSON, for :meth:`Recording.from_json`.

    None if there are none, or if not even the fewest fit.
    """
    while recording is not None:
        values = recording.excerpt(records).to_json()
        if len(json.dumps(values)) <= nbytes:
            return values
        if not records:
            break
        records //= 2
    return None
