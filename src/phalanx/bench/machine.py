"""The machine on which a figure was measured, and the versions of the software."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phalanx import settings

__all__ = ["clock_mhz", "cpu_model", "machine", "mpi_description", "versions"]

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def machine() -> dict[str, Any]:
    """The hardware and the kernel, and the load before anything is measured."""
    with open("/proc/cpuinfo") as file:
        model = cpu_model(file.read())
    return {
        "cpu": model,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "clock_mhz": clock_mhz(),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "system": platform.system(),
        "load_average": list(os.getloadavg()),
    }


def cpu_model(cpuinfo: str) -> str:
    """The processor's name in the text of ``/proc/cpuinfo``, whose key depends on the architecture."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    named = {key.strip(): value.strip() for key, _, value in lines}
    return named.get("model name") or named.get("Model") or named.get("CPU part") or "unknown"


def clock_mhz() -> list[float]:
    """The present clock of each core, in the order of the kernel; empty if it does not say."""
    with open("/proc/cpuinfo") as file:
        lines = (line.partition(":") for line in file)
        return [float(value) for key, _, value in lines if key.strip() == "cpu MHz"]


def _caches() -> list[str]:
    found = []
    for index in sorted(_CACHES.glob("index*")):
        with contextlib.suppress(OSError):
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            found.append(f"L{level}{ {'Data': 'd', 'Instruction': 'i'}.get(kind, '') } {size}")
    return found


def versions() -> dict[str, str]:
    """The versions of Python, Phalanx, and the packages that influence a figure."""
    found = {"python": platform.python_version(), "phalanx": settings.VERSION}
    for package in ("torch", "numpy", "mpi4py"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def mpi_description(mpi: Any) -> dict[str, str]:
    """Name and version of an MPI library: ``Open MPI``, ``5.0.11``, and the whole text that it gives.

    Args:
        mpi: the module ``mpi4py.MPI``.
    """
    name, number = mpi.get_vendor()
    text = mpi.Get_library_version().strip("\0 \n").splitlines()[0]
    return {"name": name, "version": ".".join(map(str, number)), "library_version": " ".join(text.split())}
