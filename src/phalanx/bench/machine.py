"""The machine on which a figure was measured: what it is, and whether it was quiet enough to believe the figure."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phalanx import settings

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# The bound of each figure of Noise, and what it means. On a quiet machine the probe's spread is within 3 %, nothing is
# stolen, and other programs take less than 2 %. Below these bounds a difference of 10 % between two medians counts.
_BOUNDS = {
    "probe_spread": (0.10, "the same piece of work took times that differ by {:.0%}"),
    "stolen": (0.02, "the hypervisor took {:.0%} of the CPU time"),
    "others": (0.05, "other programs took {:.0%} of the CPU time"),
}
_REPEATS, _WARM, _LOOPS = 15, 3, 30_000
# The copy fits in the cache of one core: the ranks probe at the same time, and share main memory.
_COPY_BYTES, _COPIES = 128 << 10, 16


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile, by R's method 7, numpy's default."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, median, high


def describe_machine() -> dict[str, Any]:
    """Return the hardware and the kernel, and the load before anything is measured."""
    named = dict(_cpuinfo())
    return {
        "cpu": named.get("model name") or named.get("Model") or named.get("CPU part") or "unknown",
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


def clock_mhz() -> list[float]:
    """Return the present clock of each core; empty if the kernel does not say."""
    return [float(value) for key, value in _cpuinfo() if key == "cpu MHz"]


def _cpuinfo() -> list[tuple[str, str]]:
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return [(key.strip(), value.strip()) for key, _, value in lines]


def _caches() -> list[str]:
    found = []
    for index in sorted(_CACHES.glob("index*")):
        with contextlib.suppress(OSError):
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            found.append(f"L{level}{ {'Data': 'd', 'Instruction': 'i'}.get(kind, '') } {size}")
    return found


def versions() -> dict[str, str]:
    """Return the versions of Python, Phalanx, and the packages that influence a figure."""
    found = {"python": platform.python_version(), "phalanx": settings.VERSION}
    for package in ("torch", "numpy", "mpi4py"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


@dataclass(frozen=True)
class Noise:
    """The disturbances of one case, or the worst of several.

    Attributes:
        probe_spread: the interquartile range of the probe's times over their median, on the rank where it was largest.
        stolen, others: the shares of the machine's CPU time that the hypervisor and other programs took.
    """

    probe_spread: float = 0.0
    stolen: float = 0.0
    others: float = 0.0

    @property
    def severity(self) -> float:
        """The largest figure as a multiple of its bound."""
        return max(float(getattr(self, name)) / bound for name, (bound, _) in _BOUNDS.items())

    @property
    def excessive(self) -> bool:
        return self.severity > 1

    def reasons(self) -> list[str]:
        """Say which figures are above their bounds."""
        figures = ((getattr(self, name), bound, said) for name, (bound, said) in _BOUNDS.items())
        return [said.format(figure) for figure, bound, said in figures if figure > bound]

    @staticmethod
    def worst(noises: Sequence[Noise]) -> Noise:
        """Return the largest of each figure."""
        return Noise(**{name: max((getattr(noise, name) for noise in noises), default=0.0) for name in _BOUNDS})


def probe_spread(samples: Sequence[float]) -> float:
    """Return the interquartile range over the median."""
    low, median, high = quartiles(samples)
    return (high - low) / median


def probe() -> list[float]:
    """Time a loop and a copy several times, in seconds: the times differ if something slows a core down."""
    source, target = ctypes.create_string_buffer(_COPY_BYTES), ctypes.create_string_buffer(_COPY_BYTES)
    samples = []
    for _ in range(_WARM + _REPEATS):
        started = time.perf_counter()
        for _ in range(_LOOPS):
            pass
        for _ in range(_COPIES):
            ctypes.memmove(target, source, _COPY_BYTES)
        samples.append(time.perf_counter() - started)
    return samples[_WARM:]  # the first are slower: their pages are new, and the cache is full of the last case


class CpuClock:
    """The use of the machine's CPU time since this clock was made."""

    def __init__(self) -> None:
        self._busy_s, self._stolen_s = self._read()
        self._own_s, self._since = time.process_time(), time.monotonic()

    @staticmethod
    def _read() -> tuple[float, float]:
        """Return busy and stolen seconds. Interrupts do not count: most are the ranks' (Gloo's)."""
        line = Path("/proc/stat").read_text().partition("\n")[0]
        user, nice, system, _idle, _iowait, _irq, _softirq, stolen = (int(ticks) for ticks in line.split()[1:9])
        per_s = os.sysconf("SC_CLK_TCK")
        return (user + nice + system) / per_s, stolen / per_s

    def own_s(self) -> float:
        """Return the CPU seconds that this process has used."""
        return time.process_time() - self._own_s

    def shares(self, ranks_s: float) -> tuple[float, float]:
        """Return which share of the CPU time was stolen, and which share other programs than the ranks used.

        Args:
            ranks_s: CPU seconds of all ranks of this machine together.
        """
        busy_s, stolen_s = self._read()
        cores = os.cpu_count() or 1
        total = max((time.monotonic() - self._since) * cores, 1e-3)
        # The kernel counts in ticks of 10 ms for each core, so a difference below two ticks a core may be rounding.
        others = busy_s - self._busy_s - ranks_s - 2 * cores / os.sysconf("SC_CLK_TCK")
        return min(1.0, max(0.0, (stolen_s - self._stolen_s) / total)), min(1.0, max(0.0, others / total))
