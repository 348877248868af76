"""What a host's agent sends of the calls of its ranks, which the launcher compares with those of the other hosts.

Nothing is sent of groups of Phalanx, which compares their calls by itself. A message has ``sent_calls.LARGEST`` bytes
at most, and none is made while the network has not taken the ones before: what the ranks call meanwhile waits in
their recorders, and then comes in part. The last calls of a rank are sent before its end is, however much waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.launch.rank.new_calls import EVERY_S, MOST_RANKS, PAUSE, NewCalls
from phalanx.launch.rank.trace import Trace
from phalanx.launch.relay.observer import within
from phalanx.watch.done_calls import DoneCalls
from phalanx.watch.sent_calls import calls_to_json

__all__ = ["CallSender"]

# How long the launcher has with each call of a class of ranks. All hosts together take 1/100 of its time.
_COMPARED_S, _PAUSE_OF_LAUNCHER = 4e-6, 100
# How many of its last operations a rank leaves at its end, and how many bytes they may take as JSON.
_RECORDS, _LARGEST_RECORDING = 128, 1 << 16


class CallSender:
    """Sends what the ranks of one host have called.

    Args:
        trace: where they have their recorders.
        numbers: their ranks in the world, in the order of their parts of the trace.
        ranks: how many ranks the job has.
        hosts: how many hosts send their calls to the same launcher.
        is_python: whether they run Python.
        say: sends a message to the relay.
        waiting: gives how many bytes the network has not taken yet.
    """

    def __init__(
        self,
        trace: Trace,
        numbers: Sequence[int],
        ranks: int,
        *,
        hosts: int,
        is_python: bool,
        say: Callable[..., Any],
        waiting: Callable[[], int],
    ) -> None:
        self._calls = NewCalls(trace, numbers, ranks) if is_python and 1 < ranks <= MOST_RANKS else None
        self._hosts, self._say, self._waiting = hosts, say, waiting
        self._next = time.monotonic() + EVERY_S

    def due_in_s(self) -> float | None:
        """When :meth:`look` has something to do; None for never."""
        if self._calls is None or self._calls.all_ended:
            return None
        return max(0.0, self._next - time.monotonic())

    def look(self) -> None:
        """Send what is new, if it is time to."""
        began = time.monotonic()
        if self._calls is None or self._calls.all_ended or began < self._next:
            return
        calls = self._calls.look() if not self._waiting() else []
        self._send(calls)
        now = time.monotonic()
        of_launcher_s = _COMPARED_S * self._hosts * sum(len(each.calls) for each in calls)
        self._next = now + max(EVERY_S, PAUSE * (now - began), _PAUSE_OF_LAUNCHER * of_launcher_s)

    def end(self, part: int) -> None:
        """A rank has ended: send what it has called last."""
        if self._calls is not None:
            self._send(self._calls.end(part))

    def recording(self, part: int) -> dict[str, Any] | None:
        """The last operations of a rank that has ended, for the account of a failure; None if nothing is known."""
        if self._calls is None:
            return None
        return within(_LARGEST_RECORDING, self._calls.recording(part, _RECORDS), _RECORDS)

    def _send(self, calls: Sequence[DoneCalls]) -> None:
        values = calls_to_json(calls) if calls else None
        if values is not None:
            self._say(event="calls", now_ns=time.monotonic_ns(), calls=values)
