"""The few things about Linux processes that Python's os module does not offer.

Prior art: systemd and containerd use cgroups to find every descendant; that needs a cgroup of one's own, which
an ordinary user seldom has. The child subreaper flag (Linux 3.4) gives a launcher the same without privileges:
a descendant whose parent dies is handed to the nearest ancestor with the flag, so it never leaves the tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable

__all__ = [
    "adopt_orphans",
    "belongs_to",
    "children_of",
    "descendants_of",
    "die_with_parent",
    "live_past_parent",
    "send_to_group",
    "set_name",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if _libc.prctl(ctypes.c_int(option), value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends.

    Args:
        parent: the process id the parent had before the fork. If it has ended already, nobody would send the
            signal any more, so this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def live_past_parent() -> None:
    """Undo :func:`die_with_parent`, for a process that notices its parent's end by other means."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Make this process the new parent of every descendant that loses its own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Name this process in ``ps`` and ``top`` (at most 15 bytes are kept)."""
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_NAME, name.encode()[:15])


def children_of(pid: int) -> list[int]:
    """The children of ``pid``, zombies included; empty when it has gone."""
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return children
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children += [int(child) for child in file.read().split()]
        except FileNotFoundError:
            # Either the thread has just ended, or this kernel was built without CONFIG_PROC_CHILDREN.
            if os.path.exists(f"/proc/{pid}/task/{thread}"):
                return _children_by_scan(pid)
        except OSError:
            continue
    return children


def _children_by_scan(parent: int) -> list[int]:
    children = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                # The command between the parentheses may hold spaces and parentheses of its own.
                if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                    children.append(int(name))
    return children


def descendants_of(pids: Iterable[int]) -> list[int]:
    """Everything below ``pids``, parents before their children, ``pids`` themselves left out."""
    found: list[int] = []
    seen: set[int] = set()
    front = list(pids)
    while front:
        front = [child for pid in front for child in children_of(pid) if child not in seen]
        seen.update(front)
        found += front
    return found


def belongs_to(pid: int, session: int, memfd_name: str, environment: Iterable[bytes]) -> bool:
    """Whether an adopted orphan came from a given rank.

    A child of a rank may have left its process group, its session and its parent. It still stands in the
    rank's session, or was started with the rank's environment, or, if it is a plain fork, holds the rank's
    report file open.

    Args:
        pid: the orphan.
        session: the rank's session.
        memfd_name: the name of the rank's report file.
        environment: assignments (``b"RANK=3"``) that only this rank's programs were started with.
    """
    try:
        if os.getsid(pid) == session:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            assignments = set(file.read().split(b"\0"))
        if assignments.issuperset(environment):
            return True
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(f"/memfd:{memfd_name} "):
                    return True
    except OSError:
        return False
    return False


def send_to_group(leader: int, signum: int) -> None:
    """Signal the process group of ``leader``, or ``leader`` alone while it has none of its own yet.

    The caller must not have reaped ``leader``: until then its number cannot belong to anybody else.
    """
    try:
        os.killpg(leader, signum)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, signum)
    except PermissionError:
        # A member changed its user (sudo, a setuid program); the others have been signalled.
        pass
