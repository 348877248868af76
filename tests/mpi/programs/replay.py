"""Ranks that run random programs over MPI; the file with the programs is the one argument. Prints what is wrong."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.support.programs import GROUPS, Program
from tests.support.replay import Run


def main() -> None:
    torch.set_num_threads(1)
    programs: list[Program] = pickle.loads(Path(sys.argv[1]).read_bytes())
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    groups: list[dist.ProcessGroup | None] = [dist.group.WORLD]
    for group in GROUPS[size][1:]:
        made = dist.new_group(list(group.members))
        groups.append(made if rank in group.members else None)
    for number, program in enumerate(programs):
        for wrong in Run(rank, groups, program).wrong:
            print(f"program {number}: {wrong}\n{program}")
    dist.destroy_process_group()
    print(f"rank {rank} has run {len(programs)}")


if __name__ == "__main__":
    main()
