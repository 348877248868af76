"""The program that a starter runs on a host whose agent is lost: it kills what is left of the job there.

An agent leaves nothing behind. But if it is killed with its ranks, as by ``pkill -9 python``, nobody is left on that
host who knows what the ranks had started. All that an agent and its descendants run has the variable
by which they are found here (``settings.AGENT``), unless a program was started without its parent's environment.

It is run by its path, and imports nothing of Phalanx, which may be found by PYTHONPATH there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

__all__ = ["main"]

# Processes that come and go all the time could keep it from ever being sure.
_LONGEST_S = 5.0
_PAUSE_S = 0.002
# Where these stand in /proc/<pid>/stat behind the name: the state, the kernel's flags, the end of the environment.
_STATE, _FLAGS, _ENVIRONMENT_END = 0, 6, 48
_IS_KERNEL_THREAD = 0x00200000


class _Look:
    """One look at all processes of this user after the other.

    Args:
        mark: the assignment that all processes of the job's share of this host have in their environment.
    """

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._ended: set[int] = set()
        self.sure = False

    def take(self) -> list[int]:
        """List the processes with the mark; ``sure`` is whether there are no others."""
        found, ended = [], set()
        self.sure = True
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                if os.stat(f"/proc/{name}").st_uid != os.geteuid():
                    continue
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                if fields[_STATE] in (b"Z", b"X"):
                    ended.add(int(name))
                elif not int(fields[_FLAGS]) & _IS_KERNEL_THREAD:
                    with open(f"/proc/{name}/environ", "rb") as file:
                        if self._mark in file.read().split(b"\0"):
                            found.append(int(name))
                        elif fields[_ENVIRONMENT_END] == b"0":
                            self.sure = False  # in the middle of an exec, it has not got its environment yet
            except PermissionError:
                continue  # a program that took another user's rights
            except OSError:
                self.sure = False  # it has ended since they were listed, and may have started another one before
        self.sure &= ended <= self._ended
        self._ended = ended
        return found


def main() -> None:
    """Kill processes until none is left that has the mark, which is the argument."""
    look = _Look(os.fsencode(sys.argv[1]))
    until = time.monotonic() + _LONGEST_S
    while time.monotonic() < until:
        found = look.take()
        if look.sure and not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
