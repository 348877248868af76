"""How many ranks this machine has room for, checked before any is started.

Starting 500 ranks where 200 fit ends in an out-of-memory kill, or in a fork that fails half way. So the limits are read
from the kernel first, and the error names the limit that is too small and how many ranks would fit.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from phalanx.errors import PROCESS_LIMIT_HINT, LaunchError
from phalanx.words import format_gib

__all__ = [
    "Limit",
    "Resource",
    "check_limits",
    "count_oom_kills",
    "machine_limits",
    "memory_left",
    "raise_file_limit",
    "usable_cores",
]

# A rank has two pipes of two ends each and one report file, all open while the ranks are being forked. FILES_BESIDE are
# the launcher's own.
FILES_PER_RANK = 5
FILES_BESIDE = 32
# A rank has its main thread and the two that a Gloo process group starts. TASKS_BESIDE are the supervisor, the zygote,
# the store, and their threads.
TASKS_PER_RANK = 3
TASKS_BESIDE = 8
# How much memory a forked rank shares with no other when it ends, after a process group, a backward pass and the
# interpreter's finalisation: 59 MiB, or 35 if it closes its groups first (`python benchmarks/start_ranks.py --memory`).
# Ranks rarely end all at once, so this leaves a reserve. The script's own data is unknown, so it is not counted.
BYTES_PER_RANK = 60 << 20
BYTES_BESIDE = 400 << 20
# How far apart the ranks' parts of the file in memory are in which they say where they are.
TRACE_BYTES_PER_RANK = 1 << 32


class Resource(Enum):
    """A resource that a machine can run out of, counted in files, tasks or bytes; the value is its name in messages."""

    FILES = "open files"
    TASKS = "processes and threads"
    MEMORY = "memory"
    FILE_SIZE = "file size"

    def describe(self, amount: int) -> str:
        """An amount of it, for a message: ``137 open files``, ``1.2 GiB of memory``."""
        if self in (Resource.MEMORY, Resource.FILE_SIZE):
            return f"{format_gib(amount)} of {self.value}"
        return f"{amount} {self.value}"


@dataclass(frozen=True)
class Limit:
    """One resource: how much of it is left, how much a rank takes, how much the launcher itself takes.

    Attributes:
        resource: what is limited.
        remedy: what the user can change.
        available: how much is left: files, tasks or bytes.
        per_rank: how much one rank takes.
        beside: how much the launcher takes once.
    """

    resource: Resource
    remedy: str
    available: int
    per_rank: int
    beside: int

    @property
    def fits(self) -> int:
        """How many ranks fit."""
        return max(0, (self.available - self.beside) // self.per_rank)


def usable_cores() -> int:
    """How many cores this process may keep busy: its affinity and its cgroup's quota count, not the machine's cores."""
    cores = len(os.sched_getaffinity(0))
    for directory in _cgroups():
        with contextlib.suppress(OSError, ValueError), open(os.path.join(directory, "cpu.max")) as file:
            quota, period = file.read().split()
            if quota != "max":
                cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def raise_file_limit() -> tuple[int, int]:
    """Raise the soft limit on open files to the hard one; return both as they were, so that ranks can restore them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def machine_limits(*, python: bool, forked: bool = True, logs: bool = False) -> list[Limit]:
    """The limits in force here, in the order they are checked.

    Args:
        python: whether the ranks run Python with torch. If not, memory is not checked, because it is unknown how much
            another program needs.
        forked: whether they are forked here. If not, only the limits on open files and on the size of files are
            checked, because the ranks of an MPI launcher may be on other hosts, with other limits.
        logs: whether each rank has a log file, which is open as well.
    """
    limits = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        remedy = "raise the hard limit (ulimit -Hn, or LimitNOFILE)"
        limits.append(Limit(Resource.FILES, remedy, soft, FILES_PER_RANK + logs, FILES_BESIDE))
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY:
        remedy = "lift the limit, which holds for files in memory too: ulimit -f unlimited"
        limits.append(Limit(Resource.FILE_SIZE, remedy, largest, TRACE_BYTES_PER_RANK, 0))
    if not forked:
        return limits
    tasks = _tasks_left()
    if tasks is not None:
        limits.append(Limit(Resource.TASKS, PROCESS_LIMIT_HINT, tasks, TASKS_PER_RANK, TASKS_BESIDE))
    memory = memory_left()
    if python and memory is not None:
        remedy = "free memory, or start fewer ranks"
        limits.append(Limit(Resource.MEMORY, remedy, memory, BYTES_PER_RANK, BYTES_BESIDE))
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
                f"{ranks} ranks need about {limit.resource.describe(need)}, "
                f"and {limit.resource.describe(limit.available)} are left here, enough for {limit.fits} ranks; "
                f"{limit.remedy}"
            )


def _tasks_left() -> int | None:
    left = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # This limit does not apply to root.
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


def memory_left() -> int | None:
    """How many bytes of memory this process's machine and cgroups have left; None if the kernel does not say."""
    left = []
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        left += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    for directory in _cgroups():
        most, now = _number(directory, "memory.max"), _number(directory, "memory.current")
        if most is not None and now is not None:
            # Cached pages of files count as used, but the kernel drops them when memory runs short.
            left.append(most - now + _counter(directory, "memory.stat", "inactive_file"))
    return min(left) if left else None


def count_oom_kills() -> int:
    """The number of processes in this process's cgroup that the kernel's out-of-memory killer has ended so far."""
    for directory in _cgroups():
        return _counter(directory, "memory.events", "oom_kill")
    return 0


def _cgroups() -> Iterator[str]:
    """The folders of this process's cgroup (version 2) and of those above it; each of them may limit it."""
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
        return None  # there is no such file, or it says "max"


def _counter(directory: str, file_name: str, key: str) -> int:
    with contextlib.suppress(OSError, ValueError), open(os.path.join(directory, file_name)) as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0
