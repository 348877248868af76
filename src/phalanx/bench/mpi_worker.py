"""A rank that ``mpiexec`` has started: the same measurement, with MPI as one backend more."""

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
    """Take the rank from ``MPI.COMM_WORLD`` and measure; the folder with the options is the one argument."""
    die_with_parent(os.getppid())
    folder = Path(sys.argv[1])
    description = json.loads((folder / "options.json").read_text())
    options = BenchOptions.from_json(description["options"])
    # Each library at its best. Only the main thread calls MPI here, and asking for no more spares the library its
    # locks; but MPICH gives up the core while it waits only if other threads may call it, and waits for whole time
    # slices (500 times as long, measured) when ranks share cores without.
    level = "funneled" if description["size"] <= usable_cores() else "multiple"
    importlib.import_module("mpi4py").rc.thread_level = level
    mpi = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    try:
        if world.size != description["size"]:
            raise RuntimeError(
                f"{description['size']} ranks were started and each found a world of {world.size}: this mpiexec does "
                f"not belong to the library that mpi4py loads ({mpi.Get_library_version().splitlines()[0]}); give "
                f"the right one with --mpi"
            )
        from phalanx.bench.measure import run_rank

        run_rank(world.rank, world.size, folder, options, mpi)
    except BaseException:
        (folder / f"error-{world.rank}").write_text(traceback.format_exc())
        world.Abort(1)
