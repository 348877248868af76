"""Runs programs of ``tests/support/call_programs.py`` in worlds of MPI, and writes what each rank said and raised.

Arguments: a folder, in which rank N writes ``rank-N.json``, and the names of the programs, some of which are here.
``--by-mpi4py``: have mpi4py make all calls of MPI, as on machines where the core cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
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
from phalanx.transports.crossing import crossed_lines
from phalanx.transports.mpi import crossing, direct
from phalanx.transports.mpi.crossing import Lines

Call = Callable[[Any], object]
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)
OPERATIONS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)


def many_lines_in_turns(member: Member) -> None:
    """There is room for 16 pairs of lines, and a line makes a pair of its own for each dtype and operation."""
    for step in range(40):
        for dtype, operation in itertools.product(DTYPES, OPERATIONS):
            for turn in range(2):
                if (step + turn) % 2 == member.rank % 2:
                    dist.all_reduce(torch.ones(2, dtype=dtype), operation)
                else:
                    dist.all_reduce(torch.zeros(2, dtype=dtype), operation)


def many_lines_after_a_swap(member: Member) -> None:
    call_programs.swapped_functions(member)
    many_lines_in_turns(member)
    call_programs.swapped_functions(member)


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


HERE = (many_lines_in_turns, many_lines_after_a_swap, swapped_in_a_group, swapped_of_every_kind)


class Counted:
    """How often the ranks have conferred, and asked what the others have found in that; how often this one judged."""

    def __init__(self) -> None:
        self._confer, self._least, self._judge = Lines.confer, Lines._least, crossed_lines
        self.clear()

    def clear(self) -> None:
        self.conferred = self.asked = self.judged = 0

    def confer(self, lines: Lines) -> str | None:
        self.conferred += 1
        return self._confer(lines)

    def ask(self, lines: Lines, number: int) -> int:
        self.asked += 1
        return self._least(lines, number)

    def judge(self, *arguments: Any) -> Any:
        self.judged += 1
        return self._judge(*arguments)

    def patches(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(mock.patch.object(Lines, "confer", lambda lines: self.confer(lines)))
        stack.enter_context(mock.patch.object(Lines, "_least", lambda lines, number: self.ask(lines, number)))
        stack.enter_context(mock.patch.object(crossing, "crossed_lines", self.judge))
        return stack


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--by-mpi4py", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machines = () if options.by_mpi4py else direct._MACHINES
    counted = Counted()
    with mock.patch.object(direct, "_MACHINES", machines), counted.patches():
        results = {name: ran(name, options.folder, counted) for name in options.programs}
    (options.folder / f"rank-{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(results))


def ran(name: str, folder: Path, counted: Counted) -> dict[str, Any]:
    """What came of a program in a world of its own."""
    mistakes = (*call_programs.MISTAKES, call_programs.swapped_beside_rank_0)
    programs = {program.__name__: program for program in (*mistakes, *call_programs.RIGHT, *HERE)}
    counted.clear()
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
    counts = {"conferred": counted.conferred, "asked": counted.asked, "judged": counted.judged}
    return {"said": said.getvalue(), "error": error, **counts}


if __name__ == "__main__":
    main()
