"""Runs programs of ``tests/support/call_programs.py`` in worlds of MPI, and writes what each rank said and raised.

Arguments: a folder, in which rank N writes ``rank-N.json``, and the names of the programs, some of which are here.
``--by-mpi4py``: have mpi4py make all calls of MPI, as on machines where the core cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mpi4py import MPI  # the script owns MPI, so there may be many worlds
from tests.support import call_programs
from tests.support.ranks import Member

from phalanx.errors import PhalanxError
from phalanx.transports.mpi import direct

Call = Callable[[Any], object]


def swapped_in_a_group(member: Member) -> None:
    """Of the last two ranks."""
    ranks = [member.size - 2, member.size - 1]
    group = dist.new_group(ranks)
    if member.rank in ranks:
        for task in ("a", "b") if member.rank == ranks[0] else ("b", "a"):
            if task == "a":
                dist.all_reduce(torch.ones(2), group=group)
            if task == "b":
                dist.all_reduce(torch.ones(2), group=group)


def swapped_of_every_kind(member: Member) -> None:
    """Two calls of each collective, of which the last rank makes the second first; a group of its own for each kind."""
    size, everybody = member.size, list(range(member.size))

    def swap(one_call: Call, other: Call) -> None:
        group = dist.new_group(everybody)
        for call in (other, one_call) if member.rank == size - 1 else (one_call, other):
            call(group)

    t = torch.ones(2)
    all_ = [torch.ones(2) for _ in everybody]
    of_root = all_ if member.rank == 0 else None
    swap(lambda a: dist.barrier(a), lambda b: dist.barrier(b))
    swap(lambda a: dist.broadcast(t, 0, a), lambda b: dist.broadcast(t, 0, b))
    swap(lambda a: dist.reduce(t, 0, group=a), lambda b: dist.reduce(t, 0, group=b))
    swap(lambda a: dist.all_gather(all_, t, a), lambda b: dist.all_gather(all_, t, b))
    swap(lambda a: dist.reduce_scatter(t, all_, group=a), lambda b: dist.reduce_scatter(t, all_, group=b))
    swap(lambda a: dist.gather(t, of_root, 0, a), lambda b: dist.gather(t, of_root, 0, b))
    swap(lambda a: dist.scatter(t, of_root, 0, a), lambda b: dist.scatter(t, of_root, 0, b))
    swap(lambda a: dist.all_to_all(all_, all_, a), lambda b: dist.all_to_all(all_, all_, b))


HERE = (swapped_in_a_group, swapped_of_every_kind)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--by-mpi4py", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machines = () if options.by_mpi4py else direct._MACHINES
    with mock.patch.object(direct, "_MACHINES", machines):
        results = {name: ran(name, options.folder) for name in options.programs}
    (options.folder / f"rank-{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(results))


def ran(name: str, folder: Path) -> dict[str, Any]:
    """What came of a program in a world of its own."""
    programs = {program.__name__: program for program in (*call_programs.MISTAKES, *call_programs.RIGHT, *HERE)}
    error = ""
    dist.init_process_group("mpi")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            programs[name](Member(dist.get_rank(), dist.get_world_size(), folder))
            # A rank that has no other call to come to comes here, where those that have one find a mismatch.
            dist.barrier()
        except PhalanxError as caught:
            error = f"{type(caught).__name__}: {caught}"
    dist.destroy_process_group()
    return {"said": said.getvalue(), "error": error}


if __name__ == "__main__":
    main()
