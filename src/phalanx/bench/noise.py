"""Whether the machine was quiet enough to believe what was measured on it.

Three witnesses. The same piece of work, a loop and a copy, timed again and again between the cases: its spread
shows what slows a core down (its frequency, a neighbour on the same core or in the shared cache). The kernel's count
of stolen time: what the hypervisor gave to another guest. And the CPU time that was spent on this machine but not by
the ranks: what other programs took. Each has a bound; past it the row is marked and the reason is said in words.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from phalanx.bench.samples import Summary

__all__ = ["CpuClock", "Noise", "Usage", "parse_cpu_times", "probe_spread", "reasons", "severity", "worst"]

# A quiet machine keeps the probe within 3 %, steals nothing and leaves others less than 2 % of its cores; a
# difference of 10 % between two medians means something up to these bounds, and little past them.
PROBE_SPREAD = 0.10
STOLEN = 0.02
OTHERS = 0.05
LOAD_PER_CORE = 0.5

_REPEATS = 15
_WARM = 3
_LOOPS = 30_000
# Within the cache of one core: the ranks probe at once and would disturb each other on the way to memory.
_COPY_BYTES = 128 << 10
_COPIES = 16


@dataclass(frozen=True)
class Usage:
    """CPU seconds of the whole machine since it was started, and how many cores it has."""

    busy_s: float
    stolen_s: float
    cores: int


@dataclass(frozen=True)
class Noise:
    """What disturbed one case.

    Attributes:
        probe_spread: interquartile range over median of the probe, on the rank where it was largest.
        stolen: share of the machine's CPU time that the hypervisor gave away.
        others: share of it that went to other programs.
    """

    probe_spread: float
    stolen: float
    others: float


def reasons(noise: Noise) -> list[str]:
    """In words, what was too much; empty on a quiet machine."""
    found = []
    if noise.probe_spread > PROBE_SPREAD:
        found.append(f"the same piece of work took times that differ by {noise.probe_spread:.0%}")
    if noise.stolen > STOLEN:
        found.append(f"the hypervisor took {noise.stolen:.0%} of the CPU time")
    if noise.others > OTHERS:
        found.append(f"other programs took {noise.others:.0%} of the CPU time")
    return found


def severity(noise: Noise) -> float:
    """One number to compare by: the figure that exceeds its bound most, as a multiple of it."""
    return max(noise.probe_spread / PROBE_SPREAD, noise.stolen / STOLEN, noise.others / OTHERS)


def load_reason(load: float, cores: int) -> str:
    """In words, that the machine was busy before anything began; empty if it was not."""
    if load <= LOAD_PER_CORE * cores:
        return ""
    return f"the load average was {load:.1f} on {cores} cores before the first measurement"


def worst(noises: Iterable[Noise]) -> Noise:
    """The largest of each figure."""
    columns = [asdict(noise) for noise in noises] or [asdict(Noise(0.0, 0.0, 0.0))]
    return Noise(**{name: max(column[name] for column in columns) for name in columns[0]})


def probe_spread(samples: Sequence[float]) -> float:
    """Interquartile range over median."""
    summary = Summary.of(samples)
    return (summary.q3 - summary.q1) / summary.median


def probe() -> list[float]:
    """Time the fixed piece of work, about half a millisecond a time; the samples, in seconds."""
    source = ctypes.create_string_buffer(_COPY_BYTES)
    target = ctypes.create_string_buffer(_COPY_BYTES)
    samples = []
    for index in range(_WARM + _REPEATS):
        started = time.perf_counter()
        for _ in range(_LOOPS):
            pass
        for _ in range(_COPIES):
            ctypes.memmove(target, source, _COPY_BYTES)
        if index >= _WARM:  # the first meet fresh pages and a cache full of the last case
            samples.append(time.perf_counter() - started)
    return samples


def parse_cpu_times(text: str, ticks_per_s: int) -> Usage:
    """Read ``/proc/stat``. Interrupts are left out: they are mostly the ranks' own (Gloo's loopback)."""
    first, *rest = text.splitlines()
    user, nice, system, _idle, _iowait, _irq, _softirq, stolen = (int(word) for word in first.split()[1:9])
    cores = sum(line.startswith("cpu") for line in rest)
    return Usage((user + nice + system) / ticks_per_s, stolen / ticks_per_s, cores)


class CpuClock:
    """What happened on the machine between two looks at it."""

    def __init__(self) -> None:
        self._usage = self._now()
        self._own_s = time.process_time()
        self._since = time.monotonic()

    @staticmethod
    def _now() -> Usage:
        with open("/proc/stat") as file:
            return parse_cpu_times(file.read(), os.sysconf("SC_CLK_TCK"))

    def own_s(self) -> float:
        """CPU seconds this process has used since the clock was made."""
        return time.process_time() - self._own_s

    def shares(self, ranks_s: float) -> tuple[float, float]:
        """Which share of the machine's CPU time was stolen, and which went to others.

        Args:
            ranks_s: CPU seconds of all ranks together since the clock was made.
        """
        now, elapsed = self._now(), time.monotonic() - self._since
        total = max(elapsed * now.cores, 1e-3)
        # The kernel counts in ticks of 10 ms per core; less than two of them is nothing.
        grain = 2 * now.cores / os.sysconf("SC_CLK_TCK")
        others = now.busy_s - self._usage.busy_s - ranks_s - grain
        stolen = now.stolen_s - self._usage.stolen_s
        return min(1.0, max(0.0, stolen / total)), min(1.0, max(0.0, others / total))
