"""The user's signals to ranks that have no handler for them yet.

SIGUSR1 and SIGUSR2 are for the script, and one that comes during a start or a restart would end the job. So the agent
holds such a signal back. The kernel reports no change of a process's handlers, so the agent looks again and again, but
only while it holds a signal.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping

from phalanx.system import processes

__all__ = ["HeldSignals"]

# How long after its start a rank, or the program that it becomes, may take to set its handler.
_HANDLERS_S = 20.0
_LOOK_S = 0.05


class HeldSignals:
    """The signals that an agent has for its ranks, from when they come to when they are sent."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int]] = []
        self._until: float | None = None

    def begin(self) -> None:
        """The ranks have been started; before, every signal waits."""
        self._until = time.monotonic() + _HANDLERS_S

    def add(self, ranks: Iterable[int], signum: int) -> None:
        """A signal has come for these ranks; :meth:`send` sends it."""
        self._held += [(rank, signum) for rank in ranks]

    def due_in_s(self) -> float | None:
        """When :meth:`send` has something to do; None for never."""
        return _LOOK_S if self._held and self._until is not None else None

    def send(self, pids: Mapping[int, int]) -> None:
        """Send the signals to the ranks, by pid, that have a handler, or have had the time to set one.

        They go to the ranks alone: what those have started, such as a loader's workers, need not handle the signal.
        """
        if self._until is None:
            return
        waits = time.monotonic() < self._until
        held, self._held = [(rank, signum) for rank, signum in dict.fromkeys(self._held) if rank in pids], []
        for rank, signum in held:
            sets = processes.signal_sets(pids[rank], signum)
            handled = "SigIgn" in sets or ("SigCgt" in sets and "SigBlk" not in sets)
            if waits and not handled:
                self._held.append((rank, signum))
            else:
                with contextlib.suppress(PermissionError):  # it has become a program of another user
                    os.kill(pids[rank], signum)
