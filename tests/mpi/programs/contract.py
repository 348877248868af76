"""Ranks that make the checks of the contract over MPI, named by the arguments. A line for each check and rank."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.support.contract import run_check

from phalanx.transports.mpi.communicator import MpiCommunicator
from phalanx.transports.mpi.runtime import running


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mpi")
    runtime, size = running(), dist.get_world_size()
    if runtime is None:
        raise SystemExit("backend 'mpi' has not started MPI")
    for name in sys.argv[1:]:
        communicator = MpiCommunicator(runtime, runtime.world.Dup(), range(size), name, timedelta(seconds=60))
        skipped, wrong = run_check(name, communicator, 100_000)
        print(f"{name}|{skipped}|{'; '.join(wrong)}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
