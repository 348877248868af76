"""How other processes of this job have ended, as the launcher says that is their parent: nobody else can know.

Of a process of another host it says so later, and says what that did last too, since nobody here can read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.system import processes

__all__ = ["AT_ONCE_S", "Ending", "ended_elsewhere", "how_ended", "learn_by", "learn_elsewhere_by"]

# The parent says how a process has ended before it reaps it. As long as the process is there, ending or a zombie, its
# end may still be said. Only a busy machine, or much memory to give back, makes that late.
PATIENCE_S = 2.0
AT_ONCE_S = 0.1
_POLL_S = 0.001


class Ending(NamedTuple):
    """How a process has ended.

    Attributes:
        text: as ``with exit code 3`` or ``by signal 9 (SIGKILL)``; empty if that is not known.
        signal: by which signal; 0 if by none, or if that is not known.
    """

    text: str = ""
    signal: int = 0


_look: Callable[[int], Ending | None] | None = None


def learn_by(function: Callable[[int], Ending | None]) -> None:
    """Have ends looked up by ``function``, which takes a pid and gives None for a process that runs.

    The launcher does so in its ranks.
    """
    global _look
    _look = function


_look_elsewhere: Callable[[str, int], dict[str, Any] | None] | None = None


def learn_elsewhere_by(function: Callable[[str, int], dict[str, Any] | None]) -> None:
    """Have ends of processes of other hosts looked up by ``function``, which takes the host's name and the pid.

    The launcher of a job on several hosts does so in its ranks.
    """
    global _look_elsewhere
    _look_elsewhere = function


def ended_elsewhere(host: str, pid: int) -> dict[str, Any] | None:
    """What the launcher says of a process of another host that has ended; None if it never says that to this process.

    Returns:
        ``how`` it has ended, its ``signal``, its ``last_operation`` and ``last_line``, and whether it ``was_in_it``;
        empty if nothing has been said so far.
    """
    return None if _look_elsewhere is None else _look_elsewhere(host, pid) or {}


def how_ended(pid: int, patience_s: float = PATIENCE_S) -> Ending:
    """How a process that is gone, or is ending, has ended, as far as a launcher says so within ``patience_s``."""
    if _look is None:
        return Ending()
    until = time.monotonic() + patience_s
    while True:
        # In this order: the end of one that has been reaped was said before.
        may_be_said = processes.state_of(pid) != "" and time.monotonic() < until
        found = _look(pid)
        if found is not None or not may_be_said:
            return found or Ending()
        time.sleep(_POLL_S)
