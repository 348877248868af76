"""Ranks of which one calls something else; the file with the cases is the one argument. Prints what is wrong."""

from __future__ import annotations

import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from tests.support.programs import GROUPS, Program, Step
from tests.support.replay import Run

from phalanx.errors import CollectiveMismatch

TOLD_S = 5.0


def main() -> None:
    torch.set_num_threads(1)
    cases: list[tuple[Program, int, int, Step]] = pickle.loads(Path(sys.argv[1]).read_bytes())
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, (program, at, odd, other) in enumerate(cases):
        # Groups of their own for each case: one whose ranks were out of step stays broken, the world does not.
        groups: list[dist.ProcessGroup | None] = []
        for group in GROUPS[size]:
            made = dist.new_group(list(group.members))
            groups.append(made if rank in group.members else None)
        last = Step("barrier", program.steps[at].group)
        program = replace(program, steps=(*program.steps, last))
        began = time.monotonic()
        run = Run(rank, groups, program, (at, other) if rank == odd else None, catch=Exception)
        elapsed_s = time.monotonic() - began
        wrong = list(run.wrong)
        if elapsed_s > TOLD_S:
            wrong.append(f"told only after {elapsed_s:.1f} s")
        told = {program.steps[index].group for index, _ in run.errors}
        if told != ({last.group} if rank in program.members(last) else set()):
            wrong.append(f"errors in groups {told}, not in {last.group}")
        wrong += [repr(error) for _, error in run.errors if not isinstance(error, CollectiveMismatch)]
        for text in wrong:
            print(f"rank {rank}, case {number}: {text}\n{(program, at, odd, other)}")
        dist.barrier()
        for made in groups:
            if made is not None:
                dist.destroy_process_group(made)
    dist.destroy_process_group()
    print(f"rank {rank} has run {len(cases)}")


if __name__ == "__main__":
    main()
