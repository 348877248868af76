"""Whether the machine was quiet enough to believe what was measured on it.

Three figures say so. The first is the spread of the probe: one piece of work, a loop and a copy, is timed again and
again between the cases, and its times differ if something slows a core down (its frequency, a neighbour on the same
core or in the shared cache). The second is the kernel's count of stolen time, which the hypervisor gave to another
guest. The third is the CPU time that other programs than the ranks used. A row is marked if one of them is above its
bound.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from phalanx.bench.samples import Summary

__all__ = ["CpuClock", "Noise", "Usage", "parse_cpu_times", "probe_spread", "reasons", "severity", "worst"]

# On a quiet machine the probe's spread is within 3 %, nothing is stolen, and other programs take less than 2 % of the
# CPU time. Below these bounds a difference of 10 % between two medians means something; above them it means little.
PROBE_SPREAD = 0.10
STOLEN = 0.02
OTHERS = 0.05
LOAD_PER_CORE = 0.5

_REPEATS = 15
_WARM = 3
_LOOPS = 30_000
# The copy fits in the cache of one core. The ranks probe at the same time and would slow each other down in main
# memory.
_COPY_BYTES = 128 << 10
_COPIES = 16


@dataclass(frozen=True)
class Usage:
    """CPU seconds that the whole machine has used since it was started, and how many cores it has."""

    busy_s: float
    stolen_s: float
    cores: int


@dataclass(frozen=True)
class Noise:
    """The disturbances of one case.

    Attributes:
        probe_spread: the interquartile range of the probe's times over their median, on the rank where it was largest.
        stolen: the share of the machine's CPU time that the hypervisor gave to other guests.
        others: the share of it that other programs used.
    """

    probe_spread: float
    stolen: float
    others: float

    @property
    def excessive(self) -> bool:
        """Whether a figure is above its bound, so that what was measured meanwhile is not to be believed."""
        return self.probe_spread > PROBE_SPREAD or self.stolen > STOLEN or self.others > OTHERS


def reasons(noise: Noise) -> list[str]:
    """In words, which figures are above their bounds: one text for each."""
    found = []
    if noise.probe_spread > PROBE_SPREAD:
        found.append(f"the same piece of work took times that differ by {noise.probe_spread:.0%}")
    if noise.stolen > STOLEN:
        found.append(f"the hypervisor took {noise.stolen:.0%} of the CPU time")
    if noise.others > OTHERS:
        found.append(f"other programs took {noise.others:.0%} of the CPU time")
    return found


def severity(noise: Noise) -> float:
    """How noisy it was, in one number: the largest figure as a multiple of its bound."""
    return max(noise.probe_spread / PROBE_SPREAD, noise.stolen / STOLEN, noise.others / OTHERS)


def load_reason(load: float, cores: int) -> str | None:
    """In words, that the machine was busy before the first measurement; None if it was not."""
    if load <= LOAD_PER_CORE * cores:
        return None
    return f"the load average was {load:.1f} on {cores} cores before the first measurement"


def worst(noises: Iterable[Noise]) -> Noise:
    """The largest of each figure among several cases."""
    columns = [asdict(noise) for noise in noises] or [asdict(Noise(0.0, 0.0, 0.0))]
    return Noise(**{name: max(column[name] for column in columns) for name in columns[0]})


def probe_spread(samples: Sequence[float]) -> float:
    """The interquartile range over the median."""
    summary = Summary.of(samples)
    return (summary.q3 - summary.q1) / summary.median


def probe() -> list[float]:
    """Time the probe, which takes about half a millisecond, several times; the samples are in seconds."""
    source = ctypes.create_string_buffer(_COPY_BYTES)
    target = ctypes.create_string_buffer(_COPY_BYTES)
    samples = []
    for index in range(_WARM + _REPEATS):
        started = time.perf_counter()
        for _ in range(_LOOPS):
            pass
        for _ in range(_COPIES):
            ctypes.memmove(target, source, _COPY_BYTES)
        if index >= _WARM:  # the first are slower: their pages are new, and the cache is full of the last case
            samples.append(time.perf_counter() - started)
    return samples


def parse_cpu_times(text: str, ticks_per_s: int) -> Usage:
    """Read ``/proc/stat``. Interrupts are not counted, because most are caused by the ranks (Gloo's loopback)."""
    first, *rest = text.splitlines()
    user, nice, system, _idle, _iowait, _irq, _softirq, stolen = (int(ticks) for ticks in first.split()[1:9])
    cores = sum(line.startswith("cpu") for line in rest)
    return Usage((user + nice + system) / ticks_per_s, stolen / ticks_per_s, cores)


class CpuClock:
    """How the machine's CPU time was used since this clock was made."""

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
        """Which share of the machine's CPU time was stolen, and which share other programs used.

        Args:
            ranks_s: CPU seconds of all ranks together since the clock was made.
        """
        now, elapsed = self._now(), time.monotonic() - self._since
        total = max(elapsed * now.cores, 1e-3)
        # The kernel counts in ticks of 10 ms for each core, so a difference below two ticks a core may be rounding.
        grain = 2 * now.cores / os.sysconf("SC_CLK_TCK")
        others = now.busy_s - self._usage.busy_s - ranks_s - grain
        stolen = now.stolen_s - self._usage.stolen_s
        return min(1.0, max(0.0, stolen / total)), min(1.0, max(0.0, others / total))
