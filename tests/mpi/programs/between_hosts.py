"""Ranks that make the checks of the contract as if on several hosts, with MPI between them.

The first argument is a folder for the store, the second how the ranks are placed, and the others name the checks. A
line for each check and rank.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
from tests.support.connecting import PLACEMENTS, over_hosts
from tests.support.contract import run_check
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from phalanx.transports.hosts.mpi_lane import MpiEngine
from phalanx.transports.mpi.runtime import start


def main() -> None:
    folder, placement, *names = sys.argv[1:]
    torch.set_num_threads(1)
    runtime = start()
    rank, size = runtime.world.rank, runtime.world.size
    store = FileStore(f"{folder}/store", size)

    def engine(store: Store, rank: int, size: int, timeout: timedelta) -> MpiEngine:
        return MpiEngine(runtime, range(size), placement, timeout)

    for name in names:
        own = PrefixStore(f"{placement}/{name}", store)
        communicator = over_hosts(own, rank, size, PLACEMENTS[placement], engine=engine)
        skipped, wrong = run_check(name, communicator, 100_000)
        sys.stdout.write(f"{name}|{skipped}|{'; '.join(wrong)}\n")
        sys.stdout.flush()
        runtime.world.Barrier()


if __name__ == "__main__":
    main()
