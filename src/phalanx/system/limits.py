"""What this machine can bear, asked before anything is started.

Starting 500 ranks where 200 fit ends in an out-of-memory kill or in a fork that fails half way. The numbers
below are read from the kernel, and the error names the limit that is too small and how many ranks would fit.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.errors import LaunchError

__all__ = ["Limit", "check_limits", "count_oom_kills", "machine_limits", "raise_file_limit", "usable_cores"]

# Two pipes of two ends and one report file a rank, all open while the ranks are being forked; and the rest.
FILES_PER_RANK = 5
FILES_BESIDE = 32
# A rank's main thread and the two threads a Gloo process group starts; the supervisor, the zygote, the store.
TASKS_PER_RANK = 3
TASKS_BESIDE = 8
# Memory of its own that a forked rank has when it ends, after a process group, a backward pass and the
# interpreter's finalisation: 59 MiB, and 35 if it closes its groups first, measured by benchmarks/start_ranks.py
# --memory. Not all ranks end at once, which is the reserve. What the script's own data adds, nobody can know.
BYTES_PER_RANK = 60 << 20
BYTES_BESIDE = 400 << 20


@dataclass(frozen=True)
class Limit:
    """One resource: what is left of it, what a rank takes, what the launcher itself takes.

    Attributes:
        name: the resource, in the words of the message.
        remedy: what the user can change.
        available: how much is left, in the resource's own unit.
        per_rank: how much one rank takes.
        beside: how much the launcher takes once.
    """

    name: str
    remedy: str
    available: int
    per_rank: int
    beside: int

    @property
    def fits(self) -> int:
        """How many ranks fit."""
        return max(0, (self.available - self.beside) // self.per_rank)


def usable_cores() -> int:
    """Number of cores this process may keep busy: by its affinity and its cgroup's quota, not what the machine has."""
    cores = len(os.sched_getaffinity(0))
    for directory in _cgroups():
        with contextlib.suppress(OSError, ValueError), open(os.path.join(directory, "cpu.max")) as file:
            quota, period = file.read().split()
            if quota != "max":
                cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def raise_file_limit() -> tuple[int, int]:
    """Raise the soft limit on open files to the hard one; return the limits as they were, for the ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def machine_limits(*, python: bool, forked: bool = True) -> list[Limit]:
    """The limits in force here, in the order they are checked.

    Args:
        python: whether the ranks will carry an interpreter with torch; a bare program's memory is unknown,
            so memory is not checked for it.
        forked: whether they are forked here; what an MPI launcher starts may run on hosts with limits of their own.
    """
    limits = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        remedy = "raise the hard limit (ulimit -Hn, or LimitNOFILE)"
        limits.append(Limit("open files", remedy, soft, FILES_PER_RANK, FILES_BESIDE))
    if not forked:
        return limits
    tasks = _tasks_left()
    if tasks is not None:
        remedy = "raise the limit (ulimit -u, or pids.max of the cgroup)"
        limits.append(Limit("processes and threads", remedy, tasks, TASKS_PER_RANK, TASKS_BESIDE))
    memory = _memory_left()
    if python and memory is not None:
        remedy = "free memory, or start fewer ranks"
        limits.append(Limit("bytes of memory", remedy, memory, BYTES_PER_RANK, BYTES_BESIDE))
    return limits


def check_limits(ranks: int, limits: list[Limit]) -> None:
    """Refuse a number of ranks that cannot run.

    Raises:
        LaunchError: a limit is too small; the message names it and the number of ranks that would fit.
    """
    for limit in limits:
        if ranks > limit.fits:
            need = ranks * limit.per_rank + limit.beside
            raise LaunchError(
                f"{ranks} ranks need about {_amount(limit.name, need)}, "
                f"and {_amount(limit.name, limit.available)} are left here, enough for {limit.fits} ranks; "
                f"{limit.remedy}"
            )


def _amount(name: str, value: int) -> str:
    if name == "bytes of memory":
        return f"{value / (1 << 30):.1f} GiB of memory"
    return f"{value} {name}"


def _tasks_left() -> int | None:
    left = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel does not hold root to this limit.
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        left.append(soft - _tasks_of(os.geteuid()))
    for directory in _cgroups():
        most, now = _number(directory, "pids.max"), _number(directory, "pids.current")
        if most is not None and now is not None:
            left.append(most - now)
    return min(left) if left else None


def _tasks_of(uid: int) -> int:
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def _memory_left() -> int | None:
    left = []
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        left += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    for directory in _cgroups():
        most, now = _number(directory, "memory.max"), _number(directory, "memory.current")
        if most is not None and now is not None:
            # Pages of files count as used but are given up under pressure.
            left.append(most - now + _counter(directory, "memory.stat", "inactive_file"))
    return min(left) if left else None


def count_oom_kills() -> int:
    """Number of processes that the kernel's out-of-memory killer ended in this process's cgroup so far."""
    for directory in _cgroups():
        return _counter(directory, "memory.events", "oom_kill")
    return 0


def _cgroups() -> Iterator[str]:
    """The version 2 cgroup of this process and those above it, each of which may limit it."""
    path = None
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            if line.startswith("0::"):
                path = line[3:].strip()
    if path is None:
        return
    while True:
        directory = "/sys/fs/cgroup" + path.rstrip("/")
        if os.path.isdir(directory):
            yield directory
        if path in ("", "/"):
            return
        path = os.path.dirname(path)


def _number(directory: str, name: str) -> int | None:
    try:
        with open(os.path.join(directory, name)) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None  # Absent, or the word "max".


def _counter(directory: str, name: str, key: str) -> int:
    with contextlib.suppress(OSError, ValueError), open(os.path.join(directory, name)) as file:
        for line in file:
            word, _, value = line.partition(" ")
            if word == key:
                return int(value)
    return 0
