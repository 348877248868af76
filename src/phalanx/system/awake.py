"""A clock for timeouts that stands still while the process does.

A whole job may be stopped for longer than any timeout (SIGSTOP, docker pause, a batch system's suspend). When it goes
on, no rank has waited in vain for another. The core's waits count alike (``native/csrc/futex.h``).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

__all__ = ["SLICE_S", "AwakeClock", "ended_early", "wait_awake"]

SLICE_S = 1.0  # a thread that waits reads the clock at least as often
_LONGEST_S = 2 * SLICE_S  # of a longer gap between two readings no more than this counts


class AwakeClock:
    """Seconds since it was made in which the process ran. Any thread may read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = time.monotonic()
        self._now = 0.0

    def now(self) -> float:
        """The time; read it every ``SLICE_S`` while somebody waits by it."""
        with self._lock:
            real = time.monotonic()
            self._now += min(real - self._read_at, _LONGEST_S)
            self._read_at = real
            return self._now


def wait_awake(wait: Callable[[float], bool], timeout_s: float | None, clock: AwakeClock | None = None) -> bool:
    """Wait in slices until ``wait``, which is called with the seconds it may take, returns True; False at the timeout.

    Args:
        wait: waits at most so many seconds.
        timeout_s: how long in all, not counting time in which the process was stopped; None for without limit.
        clock: one that the caller goes on to read; it is read often enough meanwhile. By default one is made.
    """
    clock = clock or AwakeClock()
    end = math.inf if timeout_s is None else clock.now() + timeout_s
    while not wait(max(0.0, min(SLICE_S, end - clock.now()))):
        if clock.now() >= end:
            return False
    return True


def ended_early(began_s: float, timeout_s: float) -> bool:
    """Whether a wait that has failed did so for another reason than its timeout, whose error may have the same text.

    Stores and Gloo raise one class of error for both, so the time tells them apart: less than half of the timeout is no
    timeout, whatever clock they count by.

    Args:
        began_s: when the wait began, by ``time.monotonic()``.
        timeout_s: how long it could have taken.
    """
    return time.monotonic() - began_s < timeout_s / 2
