"""Check before any rank is started that the kernel's limits leave room for all."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from phalanx.errors import PROCESS_LIMIT_HINT, LaunchError
from phalanx.words import format_gib

# What a rank takes, and the launcher beside it: two pipes of two ends each and a report file, open while the ranks are
# being forked; the main thread and the two that a Gloo process group starts.
FILES_PER_RANK, FILES_BESIDE = 5, 32
TASKS_PER_RANK, TASKS_BESIDE = 3, 8
# What a forked rank shares with no other when it ends: 59 MiB, or 35 if it closes its groups first (`python
# benchmarks/start_ranks.py --memory`). The script's own data is unknown, so it is not counted.
BYTES_PER_RANK, BYTES_BESIDE = 60 << 20, 400 << 20
# How far apart the ranks' parts of the trace are.
TRACE_BYTES_PER_RANK = 1 << 32


class Resource(Enum):
    """A resource that a machine can run out of; the value is its name in messages."""

    FILES = "open files"
    TASKS = "processes and threads"
    MEMORY = "memory"
    FILE_SIZE = "file size"

    def describe(self, amount: int) -> str:
        """Say an amount of it: ``137 open files``, ``1.2 GiB of memory``."""
        counts_bytes = self in (Resource.MEMORY, Resource.FILE_SIZE)
        return f"{format_gib(amount)} of {self.value}" if counts_bytes else f"{amount} {self.value}"


@dataclass(frozen=True)
class Limit:
    """One resource: how much is left, how much a rank takes, and the launcher once, and what the user can change."""

    resource: Resource
    remedy: str
    available: int
    per_rank: int
    beside: int

    @property
    def fits(self) -> int:
        """Return how many ranks fit."""
        return max(0, (self.available - self.beside) // self.per_rank)


def machine_limits(*, python: bool, forked: bool = True, logs: bool = False) -> list[Limit]:
    """Read the limits in force here, in the order they are checked.

    Args:
        python: whether the ranks run Python with torch; memory is checked only then.
        forked: whether they are forked here; else only the limits on files are checked.
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
    if (tasks := _tasks_left()) is not None:
        limits.append(Limit(Resource.TASKS, PROCESS_LIMIT_HINT, tasks, TASKS_PER_RANK, TASKS_BESIDE))
    if python and (memory := memory_left()) is not None:
        remedy = "free memory, or start fewer ranks"
        limits.append(Limit(Resource.MEMORY, remedy, memory, BYTES_PER_RANK, BYTES_BESIDE))
    return limits


def check_limits(ranks: int, limits: list[Limit]) -> None:
    """Raise LaunchError if a limit is too small for so many ranks."""
    for limit in limits:
        if ranks > limit.fits:
            need = ranks * limit.per_rank + limit.beside
            raise LaunchError(
                f"{ranks} ranks need about {limit.resource.describe(need)}, "
                f"and {limit.resource.describe(limit.available)} are left here, enough for {limit.fits} ranks; "
                f"{limit.remedy}"
            )


def raise_file_limit() -> tuple[int, int]:
    """Raise the soft limit on open files to the hard one; return both as they were, so that ranks can restore them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def usable_cores() -> int:
    """Count the cores that this process may keep busy, by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    for cgroup in _cgroups():
        with contextlib.suppress(OSError, ValueError):
            quota, period = (cgroup / "cpu.max").read_text().split()
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))  # int("max") is a ValueError: no quota
    return cores


def memory_left() -> int | None:
    """Count how many bytes of memory this process's machine and cgroups have left; None if the kernel does not say."""
    left = []
    if available := _entry(Path("/proc/meminfo"), "MemAvailable:"):
        left.append(available * 1024)
    for cgroup in _cgroups():
        # Cached pages of files count as used, but the kernel drops them when memory runs short.
        left += [room + _entry(cgroup / "memory.stat", "inactive_file") for room in _room(cgroup, "memory")]
    return min(left, default=None)


def count_oom_kills() -> int:
    """Count the processes of this process's cgroup that the kernel's out-of-memory killer has ended so far."""
    return next((_entry(cgroup / "memory.events", "oom_kill") for cgroup in _cgroups()), 0)


def _tasks_left() -> int | None:
    left = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # it does not apply to root
        left.append(soft - _tasks_of(os.geteuid()))
    left += [room for cgroup in _cgroups() for room in _room(cgroup, "pids")]
    return min(left, default=None)


def _tasks_of(uid: int) -> int:
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == uid:
                count += len(os.listdir(entry / "task"))
    return count


def _cgroups() -> Iterator[Path]:
    """Return the folders of this process's cgroup (version 2) and of those above it, which may all limit it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = Path("/sys/fs/cgroup", line[4:])
                yield from (folder for folder in (own, *own.parents) if folder.is_dir() and "cgroup" in folder.parts)


def _room(cgroup: Path, kind: str) -> list[int]:
    """Say what a cgroup has left of a resource; nothing if it does not limit it."""
    try:
        return [int((cgroup / f"{kind}.max").read_text()) - int((cgroup / f"{kind}.current").read_text())]
    except (OSError, ValueError):
        return []  # there is no such file, or it says "max"


def _entry(file: Path, key: str) -> int:
    """Return the number on the line of a file that begins with this word; 0 without one."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, number, *_ = line.split()
            if name == key:
                return int(number)
    return 0
