"""What it costs to compare the lines from which the ranks call: an all_reduce with and without that.

    phalanx run -n 2 benchmarks/lines.py
    phalanx run --mpi mpiexec -n 2 benchmarks/lines.py mpi

Measured as in recorder.py: two groups that differ in nothing else, in turns.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
import torch.distributed as dist

import phalanx
from phalanx import settings
from recorder import TURNS, of_calls, show

SIZES = (4, 1024, 16384)


def main() -> None:
    """Print the table, on rank 0."""
    world = phalanx.init(backend=sys.argv[1] if len(sys.argv) > 1 else None)
    os.environ[settings.CALL_SITES] = "ignore"
    without = dist.new_group()
    del os.environ[settings.CALL_SITES]
    compared = dist.new_group()
    if world.rank == 0:
        print("all_reduce            bytes   without µs   compared µs   ratio (2 % quantiles; medians)")
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(TURNS):
            for which in (0, 1) if turn % 2 else (1, 0):
                group = (without, compared)[which]
                times[which].append(of_calls(partial(dist.all_reduce, tensor, group=group), 200))
        if world.rank == 0:
            show(nbytes, *times)
    phalanx.close()


if __name__ == "__main__":
    main()
