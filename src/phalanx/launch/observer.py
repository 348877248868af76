"""Look at the flight recorders of one agent's ranks; a look takes microseconds.

The agent says nothing as long as they go on. Once a rank has been in one operation for long it says so at every look,
and it says which ranks are stopped whenever that changes. The supervisor then asks what the ranks do
(``examination.py``). An answer has few operations of each rank, and never more than ``LARGEST_ANSWER`` bytes of them:
it travels over the link by which the ranks' output comes.
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
from phalanx.launch.rank.trace import Trace, last_recording
from phalanx.system import processes

if TYPE_CHECKING:
    from phalanx.diagnosis.snapshot import Recording
    from phalanx.launch.running.rank_look import WatchedRank

__all__ = ["Observer", "within"]

# What the operations of all ranks of one agent may take in an answer, as JSON, in bytes.
LARGEST_ANSWER = 1 << 20
_LONGEST_STACK = 1 << 14


class Observer:
    """Looks at the ranks of one agent.

    Args:
        trace: where they have their recorders.
        numbers: their ranks in the world, in the order of their parts.
        pids: the processes of those that run, by part; the agent takes out those that have ended.
        watch_after_s: after how long a wait it says so; 0 for never.
    """

    def __init__(self, trace: Trace, numbers: Sequence[int], pids: dict[int, int], watch_after_s: float) -> None:
        self._trace, self._numbers, self._pids = trace, numbers, pids
        self._times = Diagnosis(watch_after_s)
        self._started = dict(pids)
        self._watched: dict[int, WatchedRank] = {}  # by part, once somebody looks at them by phalanx top
        self._glances: dict[int, Position] = {}
        self._waited_s = 0.0  # how long the rank that has been in its operation for longest has been there
        self._moved_at = time.monotonic()
        self._has_said: tuple[bool, list[int]] = (False, [])
        self.look_at = self._moved_at + self._times.look_every_s if watch_after_s else None

    def look(self, now: float) -> Waits | None:
        """Look at the ranks, if it is time to; what is to be said of it."""
        if self.look_at is None or now < self.look_at or not self._pids:
            return None
        stopped = self._look(now)
        self.look_at = now + self._times.look_again_in_s(self._times.ask_after_s - self._waited_s)
        before, self._has_said = self._has_said, (self._waited_s >= self._times.ask_after_s, stopped)
        if not self._has_said[0] and before == (False, stopped):
            return None
        waited_s = self._waited_s if self._has_said[0] else 0.0
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
                "recording": within(room, last_recording(self._trace, part), question.records),
            }
            for part, pid in self._pids.items()
        }
        cut = {rank: stack[-_LONGEST_STACK:] for rank, stack in stacks.items()}
        return Examined(
            number=question.number, waited_s=self._waited_s, still_s=now - self._moved_at, ranks=seen, stacks=cut
        )


def within(nbytes: int, recording: Recording | None, records: int) -> dict[str, Any] | None:
    """Cut a rank's last operations to so many bytes of JSON, as plain values.

    Args:
        nbytes: how many bytes.
        recording: its operations; None if there are none.
        records: how many of them are wanted at most.

    Returns:
        The values, for :meth:`Recording.from_json`; None if not even the fewest fit.
    """
    while recording is not None:
        values = recording.excerpt(records).to_json()
        if len(json.dumps(values)) <= nbytes:
            return values
        if not records:
            break
        records //= 2
    return None
