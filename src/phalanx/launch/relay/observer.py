"""What the parent of ranks that the launcher cannot see looks at for it: a host's agent does so, for example.

It looks at their recorders, as the launcher does with ranks of its own host, and says nothing as long as they go on.
Once a rank has been in one operation for long it says so at every look, and it says which ranks are stopped whenever
that changes. The launcher then asks what the ranks do (``survey.py``). An answer has few operations of each rank, and
never more than ``LARGEST_ANSWER`` bytes of them: it travels over the connection by which the ranks' output comes.

All times are those of this host's clock, or tell how long ago something was; the answer has the time of this clock.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.diagnosis.reading import read_recording
from phalanx.diagnosis.snapshot import Recording
from phalanx.errors import PhalanxError
from phalanx.launch.job.diagnosis import Diagnosis
from phalanx.launch.rank.progress import Progress
from phalanx.launch.rank.trace import Trace
from phalanx.system import processes

__all__ = ["LARGEST_ANSWER", "Observer", "within"]

#: What the operations of all ranks of one parent may take in an answer, as JSON, in bytes.
LARGEST_ANSWER = 1 << 20
_LONGEST_STACK = 1 << 14


class Observer:
    """Looks at the ranks of one parent.

    Args:
        trace: where they have their recorders and write their stacks.
        numbers: their ranks in the world, in the order of their parts.
        diagnosis: after how long a wait it says so; None for never.
        say: sends a message to the relay.
    """

    def __init__(
        self,
        trace: Trace,
        numbers: Sequence[int],
        diagnosis: Diagnosis | None,
        say: Callable[..., None],
    ) -> None:
        self._trace, self._numbers, self._say = trace, numbers, say
        self._diagnosis = diagnosis
        self._progress = Progress(trace)
        self._pids: dict[int, int] = {}
        self._next: float | None = None
        self._has_said: tuple[bool, list[int]] = (False, [])
        self._questions: deque[Mapping[str, Any] | None] = deque()

    def begin(self, pids: Sequence[int]) -> None:
        """The ranks run from now on, with these process ids."""
        self._pids = dict(enumerate(pids))
        if self._diagnosis is not None:
            self._next = time.monotonic() + self._diagnosis.look_every_s

    def forget(self, part: int) -> None:
        """A rank has ended."""
        self._pids.pop(part, None)
        if not self._pids:
            self._next = None

    def due_in_s(self) -> float | None:
        """When :meth:`look` has something to do; None for never."""
        return None if self._next is None else max(0.0, self._next - time.monotonic())

    def look(self) -> None:
        """Look at the ranks, if it is time to, and say so if one waits for long or is stopped, or is not any more."""
        now = time.monotonic()
        if self._diagnosis is None or self._next is None or now < self._next:
            return
        self._progress.look(self._pids)
        self._next = now + self._diagnosis.look_again_in_s(self._diagnosis.ask_after_s - self._progress.waited_s)
        waits = self._progress.waited_s >= self._diagnosis.ask_after_s
        stopped = [self._numbers[part] for part in self._progress.stopped]
        if waits or self._has_said != (False, stopped):
            pace = self._pace(now)
            self._say(event="waits", stopped=stopped, **(pace if waits else {**pace, "waited_s": 0.0}))
        self._has_said = waits, stopped

    def _pace(self, now: float) -> dict[str, float]:
        return {"waited_s": self._progress.waited_s, "still_s": now - self._progress.moved_at}

    # Questions.

    def take_question(self, question: Mapping[str, Any] | None) -> list[int]:
        """Take a question; the parts of the ranks whose stacks it needs. It is answered at once if it needs none.

        Args:
            question: what the launcher wants to know (``survey.py``); None if a person has asked for all stacks, which
                are not for this object. Stacks come in the order in which they were asked for.
        """
        parts = [] if question is None else [part for part in self._pids if self._numbers[part] in question["of"]]
        if question is None or parts:
            self._questions.append(question)
        else:
            self.answer(question, {})
        return parts

    def take_next(self) -> Mapping[str, Any] | None:
        """The question to which the stacks that have come now belong."""
        return self._questions.popleft() if self._questions else None

    def answer(self, question: Mapping[str, Any], stacks: Mapping[int, str]) -> None:
        """Send what is seen of the ranks.

        Args:
            question: the question.
            stacks: what the ranks have written, by rank in the world.
        """
        now = time.monotonic()
        self._progress.look(self._pids)
        self._say(
            event="examined",
            number=question["number"],
            now_ns=time.monotonic_ns(),
            stacks={rank: stack[-_LONGEST_STACK:] for rank, stack in stacks.items()},
            ranks=self._seen(question["records"]),
            **self._pace(now),
        )

    def _seen(self, records: int) -> dict[int, dict[str, Any]]:
        """Of each rank that runs: its state, what it has asked for, and its last operations as far as there is room."""
        room = LARGEST_ANSWER // max(1, len(self._pids))
        return {
            self._numbers[part]: {
                "state": processes.state_of(pid),
                "asked": self._trace.asked(part),
                "recording": within(room, self._recording(part), records),
            }
            for part, pid in self._pids.items()
        }

    def _recording(self, part: int) -> Recording | None:
        try:
            return read_recording(self._trace.descriptor, self._trace.place_of_recorder(part))
        except (OSError, ValueError, PhalanxError):
            return None


def within(nbytes: int, recording: Recording | None, records: int) -> dict[str, Any] | None:
    """As many of a rank's last operations as fit into so many bytes of JSON, as plain values.

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
