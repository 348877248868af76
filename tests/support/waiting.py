"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_LOOKS = 3


def soon(happens: Callable[[], object], timeout_s: float = 60.0) -> bool:
    """Whether it happens within ``timeout_s``; returns as soon as it does."""
    until = time.monotonic() + timeout_s
    while not happens():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def stop(pid: int) -> None:
    """Stop another process, again if a launcher continues it, and return when none of its threads runs any more."""

    def stopped() -> bool:
        os.kill(pid, signal.SIGSTOP)
        return _states(pid) == {"T"}

    assert soon(stopped), _states(pid)


def await_stop(pid: int) -> None:
    """Return when none of the threads of a process that is being stopped runs any more."""
    assert soon(lambda: _states(pid) == {"T"}), _states(pid)


def await_end(pid: int) -> None:
    """Return when a process has ended, whether or not somebody has waited for it."""
    assert soon(lambda: not Path(f"/proc/{pid}").exists() or _state(Path(f"/proc/{pid}")) == "Z"), _states(pid)


def when_waiting(act: Callable[[], object]) -> None:
    """Call ``act``, in a thread, as soon as the main thread waits at one place, and inside the kernel."""

    def look() -> None:
        main = threading.main_thread().ident or 0
        seen: list[tuple[object, ...]] = []
        while len(seen) < _LOOKS or len(set(seen[-_LOOKS:])) > 1 or not seen[-1]:
            time.sleep(0.01)  # in which the main thread can have the interpreter, if it waits for that alone
            frame = sys._current_frames()[main]
            asleep = _state(Path(f"/proc/self/task/{os.getpid()}")) == "S"
            seen.append((frame.f_code, frame.f_lasti) if asleep else ())
            del frame
        act()

    threading.Thread(target=look, daemon=True).start()


def _state(process: Path) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _states(pid: int) -> set[str]:
    states = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            states.add((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states
