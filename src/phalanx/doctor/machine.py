"""Whether this machine has room for the ranks: cores, memory, files, processes, shared memory, folders."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator

from phalanx.doctor.finding import Finding, Level
from phalanx.system.limits import Limit, Resource, machine_limits, usable_cores
from phalanx.words import format_count, format_gib

__all__ = ["machine"]

SHARED_MEMORY = "/dev/shm"
_RDMA = "/dev/infiniband"
# A DataLoader worker puts each batch into /dev/shm. Below the first it cannot work at all; Docker gives 64 MiB, too
# little for batches of images.
_SHARED_MEMORY_LEAST = 16 << 20
_SHARED_MEMORY_USUAL = 256 << 20
_TEMPORARY_LEAST = 16 << 20


def machine(ranks: int | None = None) -> Iterator[Finding]:
    """Findings about what this machine has left.

    Args:
        ranks: how many ranks are to run here; as many as there are usable cores by default.
    """
    wanted = ranks or usable_cores()
    yield _cores(ranks)
    for limit in machine_limits(python=True):
        yield _room(limit, wanted)
    yield from _locked_memory()
    yield _shared_memory()
    yield from _folders()


def _cores(ranks: int | None) -> Finding:
    there, allowed, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0)), usable_cores()
    said = f"{usable} of {there} may be used here"
    if usable < allowed:
        why, remedy = "a cgroup's quota (cpu.max)", "docker --cpus, limits.cpu of Kubernetes, CPUQuota of systemd"
    else:
        why, remedy = "the affinity of this process", "srun --cpus-per-task, taskset, the launcher's binding"
    if ranks is not None and ranks > usable:
        remedy = f"start fewer ranks, or ask for more cores: {remedy}" if usable < there else "start fewer ranks"
        return Finding(Level.WARNING, "cores", f"{said}, and {format_count(ranks, 'rank')} would take turns", remedy)
    if usable == 1 and there > 1:
        return Finding(
            Level.WARNING, "cores", f"only {said}, by {why}: all ranks would take turns", f"ask for more: {remedy}"
        )
    return Finding(Level.OK, "cores", said if usable == there else f"{said}, by {why}")


def _room(limit: Limit, ranks: int) -> Finding:
    subject = limit.resource.value
    said = f"{limit.resource.describe(limit.available)} left, enough for {format_count(limit.fits, 'rank')}"
    if limit.fits < ranks:
        return Finding(Level.FAILURE, subject, f"{said}, not for {ranks}", limit.remedy)
    if limit.resource is Resource.FILES and limit.available < 1024:
        return Finding(Level.WARNING, subject, f"{said}, but few for data loaders", limit.remedy)
    return Finding(Level.OK, subject, said)


def _locked_memory() -> Iterator[Finding]:
    if not os.path.isdir(_RDMA):
        return  # nothing else needs it
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding(Level.OK, "locked memory", "no limit")
        return
    yield Finding(
        Level.WARNING,
        "locked memory",
        f"at most {soft >> 10} KiB, and InfiniBand registers the memory that it sends",
        "ulimit -l unlimited; LimitMEMLOCK=infinity for slurmd, docker --ulimit memlock=-1",
    )


def _shared_memory() -> Finding:
    subject = SHARED_MEMORY
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return Finding(
            Level.WARNING,
            subject,
            f"cannot be used ({error.strerror}), and DataLoader workers pass their batches through it",
            f"mount it: mount -t tmpfs tmpfs {SHARED_MEMORY}",
        )
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    said = f"{format_gib(free)} of {format_gib(size)} free"
    if free < min(_SHARED_MEMORY_LEAST, size):
        remedy = f"look for what ended programs have left there, and remove it: ls -l {SHARED_MEMORY}"
        return Finding(
            Level.FAILURE, subject, f"full ({said}): DataLoader workers end with a bus error (SIGBUS)", remedy
        )
    if size < _SHARED_MEMORY_USUAL:
        said += ": DataLoader workers with large batches end with a bus error (SIGBUS)"
        return Finding(Level.WARNING, subject, said, "docker run --shm-size=8g, or --ipc=host")
    return Finding(Level.OK, subject, said)


def _folders() -> Iterator[Finding]:
    try:
        yield Finding(Level.OK, "directory", os.getcwd())
    except FileNotFoundError:
        yield Finding(Level.FAILURE, "directory", "the one this was started in has been removed", "cd to another one")
    try:
        folder = tempfile.gettempdir()
        status = os.statvfs(folder)
    except OSError as error:
        said = f"no folder for temporary files can be written: {error.strerror}"
        yield Finding(Level.FAILURE, "temporary files", said, "set TMPDIR to one that can")
        return
    free = status.f_bavail * status.f_frsize
    if free < _TEMPORARY_LEAST:
        said = f"{folder} is full ({free >> 10} KiB free)"
        yield Finding(Level.FAILURE, "temporary files", said, "make room there, or set TMPDIR to another folder")
    else:
        yield Finding(Level.OK, "temporary files", f"{folder}, {format_gib(free)} free")
