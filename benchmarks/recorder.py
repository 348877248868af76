"""What the flight recorder costs: a record by itself, and an all_reduce with and without it.

    phalanx run -n 2 benchmarks/recorder.py

Two groups of all ranks differ only in that one is recorded, and so compares the lines of calls too. They are measured
in turns, many calls of each in a row, so that what the machine does meanwhile falls on both. Of many turns the 2 %
quantile and the median count.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import phalanx
from phalanx.diagnosis import recorder
from phalanx.native.core import RecordedGroup, quick_entry

SIZES = (4, 1024, 16384, 65536, 1 << 20)
TURNS = 400


def main() -> None:
    """Print the table, on rank 0."""
    world = phalanx.init()
    with mock.patch.object(recorder, "group", return_value=None):
        without = dist.new_group()
    recorded = dist.new_group()
    if world.rank == 0:
        print(f"a record, from Python: {of_record():.0f} ns; of that in the core {of_core():.0f} ns")
        print("all_reduce            bytes   without µs   recorded µs   ratio (2 % quantiles; medians)")
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4)
        calls = max(5, min(200, (4 << 20) // nbytes))
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(TURNS):
            for which in (0, 1) if turn % 2 else (1, 0):
                group = (without, recorded)[which]
                times[which].append(of_calls(partial(dist.all_reduce, tensor, group=group), calls))
        if world.rank == 0:
            show(nbytes, *times)
    phalanx.close()


def of_calls(call: Callable[[], object], calls: int) -> float:
    """Microseconds a call."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def of_record() -> float:
    """Nanoseconds for a record's begin and end, called from Python, with the line of the call found."""
    group = RecordedGroup()
    address = ctypes.addressof(group)
    return quickest(lambda: recorder.end(recorder.begin(address, 1, 4, -1), False)) - quickest(lambda: None)


def of_core() -> float:
    """Nanoseconds for the core's part: the same calls, less those that are for no group."""
    entry: Any = quick_entry()
    group = RecordedGroup()
    address = ctypes.addressof(group)
    return quickest(lambda: entry.record_end(entry.record_begin(address, 1, 4, 0, -1), False)) - quickest(
        lambda: entry.record_end(entry.record_begin(0, 1, 4, 0, -1), False)
    )


def quickest(call: Callable[[], object]) -> float:
    """Nanoseconds of the quickest of many short turns: other processes hardly disturb one of those."""

    def turn() -> float:
        start = time.perf_counter()
        for _ in range(200):
            call()
        return (time.perf_counter() - start) / 200 * 1e9

    return min(turn() for _ in range(2000))


def show(nbytes: int, without: list[float], recorded: list[float]) -> None:
    """One line of the table."""
    low = [sorted(times)[round(0.02 * TURNS)] for times in (without, recorded)]
    middle = [statistics.median(times) for times in (without, recorded)]
    print(
        f"{nbytes:27,} {low[0]:12.2f} {low[1]:13.2f}   {low[1] / low[0]:.3f} ({middle[1] / middle[0]:.3f})", flush=True
    )


if __name__ == "__main__":
    main()
