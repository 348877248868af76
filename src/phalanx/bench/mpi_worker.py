"""A rank that ``mpiexec`` has started: it measures the same, and MPI as one more backend."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from phalanx.bench.cases import BenchOptions
from phalanx.system.limits import usable_cores
from phalanx.system.processes import die_with_parent

__all__ = ["main"]


def main() -> None:
    """Take the rank from ``MPI.COMM_WORLD`` and measure; the only argument is the folder with the options."""
    die_with_parent(os.getppid())
    folder = Path(sys.argv[1])
    description = json.loads((folder / "options.json").read_text())
    options = BenchOptions.from_json(description["options"])
    # The level at which each library is quickest. Only the main thread calls MPI here, and with "funneled" the library
    # needs no locks. But if ranks share cores, MPICH must yield its core while it waits, and it does so only if other
    # threads may call it; otherwise a call waits for whole time slices (measured: 500 times as long).
    level = "funneled" if description["size"] <= usable_cores() else "multiple"
    importlib.import_module("mpi4py").rc.thread_level = level
    mpi = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    try:
        if world.size != description["size"]:
            raise RuntimeError(
                f"{description['size']} ranks were started, and each of them found a world of {world.size}: this "
                f"mpiexec does not belong to the library that mpi4py loads "
                f"({mpi.Get_library_version().splitlines()[0]}); give that library's mpiexec with --mpi"
            )
        from phalanx.bench.rank import run_rank

        run_rank(world.rank, world.size, folder, options, mpi)
    except BaseException:
        (folder / f"error-{world.rank}").write_text(traceback.format_exc())
        world.Abort(1)
