"""Processes that this one sees: who sees whom, and whether one is stopped."""

from __future__ import annotations

import hashlib
import os

from phalanx.system.process_use import process_use

__all__ = ["own_sight", "state_if_stopped"]


def own_sight() -> str:
    """A name that is equal for processes which see each other under the same ids; empty if this one has no such ids."""
    try:
        if int(os.readlink("/proc/self")) != os.getpid():
            return ""  # /proc counts as another pid namespace does
        with open("/proc/sys/kernel/random/boot_id") as file:
            seen = [file.read(), str(os.stat("/proc").st_dev), str(os.getuid())]
        seen += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time")]
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


def state_if_stopped(pid: int, start: int) -> str:
    """The kernel's letter for the state of a process that is stopped or held by a debugger; empty for any other.

    Args:
        pid: its id.
        start: when it was started, as ``process_use.py`` counts: another process may have its id by now.
    """
    use = process_use(pid)
    return use.state if use is not None and use.start == start and use.state in "Tt" else ""
