"""What a process is doing and what it uses, as the kernel says in one line of /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

__all__ = ["STATES", "ProcessUse", "has_ended", "process_use", "start_of", "state_text"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# In words, what the kernel's letters mean that are of interest.
STATES = {
    "T": "stopped (state T)",
    "t": "held by a debugger (state t)",
    "D": "waiting for a disk or a driver (state D)",
    "R": "running",
}


@dataclass(frozen=True)
class ProcessUse:
    """One look at a process.

    Attributes:
        state: of its main thread, as the kernel names it: ``R``, ``S``, ``D``, ``T`` (stopped), ``t`` (held by a
            debugger), ``Z`` (ended, and not reaped).
        start: when it was started, in clock ticks after the boot. With the process id it names a process for good.
        cpu_s: the time that all of its threads have had on a core, without the processes that it has started.
        resident_bytes: its memory that is in RAM, with what it shares with others.
    """

    state: str
    start: int
    cpu_s: float
    resident_bytes: int

    @property
    def has_ended(self) -> bool:
        return self.state in "ZX"


def process_use(pid: int) -> ProcessUse | None:
    """A look at a process; None if there is none with this id."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        # The command between the parentheses may hold spaces and parentheses of its own. See proc(5) for the fields,
        # which are counted from the third here.
        fields = file.read().rpartition(b")")[2].split()
        cpu_ticks = int(fields[11]) + int(fields[12])
        return ProcessUse(fields[0].decode(), int(fields[19]), cpu_ticks * _TICK_S, int(fields[21]) * _PAGE_BYTES)
    return None


def start_of(pid: int) -> int:
    """When a process was started, in clock ticks after the boot; 0 if there is none, or if it has ended."""
    found = process_use(pid)
    return 0 if found is None or found.has_ended else found.start


def has_ended(pid: int, start: int) -> bool:
    """Whether the process that had this id, and was started then, has ended."""
    if start_of(pid) == start:
        return False
    if process_use(pid) is not None:
        return True  # a zombie, or another process of the same id
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the second for a number that no process can have
        return True
    except PermissionError:
        return False
    return False  # /proc hides it


def state_text(state: str) -> str:
    """What the kernel's letter for a process's state means, as "stopped (state T)"."""
    return STATES.get(state) or ("sleeping" if state == "S" else f"state {state}" if state else "not known")
