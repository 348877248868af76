"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["await_stop", "soon", "stop"]


def soon(happens: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether it happens within ``timeout_s``; returns as soon as it does."""
    until = time.monotonic() + timeout_s
    while not happens():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def stop(pid: int) -> None:
    """Stop another process (SIGSTOP), and return when none of its threads runs any more.

    ``os.kill`` returns before that, and a quick worker may still answer a call meanwhile.
    """
    os.kill(pid, signal.SIGSTOP)
    await_stop(pid)


def await_stop(pid: int) -> None:
    """Return when none of the threads of a process that is being stopped runs any more."""
    assert soon(lambda: _states(pid) == {"T"}), _states(pid)


def _states(pid: int) -> set[str]:
    states = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            states.add((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states
