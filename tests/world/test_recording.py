"""Every operation of a group is in the flight recorder, whichever way it was called, and torch's analyser reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks

import phalanx
from phalanx.diagnosis.reading import read_process
from phalanx.diagnosis.report import write_torch_traces
from phalanx.diagnosis.snapshot import Recording
from phalanx.errors import ArgumentError


def own_recording() -> Recording:
    found = read_process(os.getpid())
    assert found is not None
    return found


def calls(member: Member) -> list[tuple[Any, ...]]:
    """Each kind of call once, by the quick way where there is one, and then asynchronously or in its long form."""
    member.join()
    other, before = (member.rank + 1) % 3, (member.rank + 2) % 3
    x, parts, whole = torch.ones(4), [torch.ones(4) for _ in range(3)], torch.ones(12)
    of_root = parts if member.rank == 0 else None
    dist.all_reduce(x)
    dist.all_reduce(x.to(torch.int64), op=dist.ReduceOp.MAX, async_op=True).wait()
    dist.all_reduce(torch.ones(4, 4).t())
    dist.broadcast(x, 0)
    dist.broadcast(x, 2, async_op=True).wait()
    dist.reduce(x, 0)
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(whole, x)
    dist.reduce_scatter_tensor(x, whole)
    dist.reduce_scatter(x, parts)
    dist.gather(x, of_root)
    dist.scatter(x, of_root)
    dist.all_to_all_single(whole.clone(), whole)
    dist.barrier()
    for count in (4, 1 << 20):  # the second is larger than a ring, so that it is not sent at once
        works: list[Any] = [dist.isend(torch.ones(count), other), dist.irecv(torch.empty(count), before)]
        for work in works:
            work.wait()
    group = dist.new_group([0])
    if member.rank == 0:
        dist.all_reduce(torch.ones(2, dtype=torch.float64), group=group)
    found = own_recording().records
    dist.destroy_process_group()
    assert not any(r.under_way or r.failed or r.site.rpartition(":")[0] != __file__ for r in found)
    return [(r.kind, r.in_group, r.nbytes, r.dtype, r.op, r.peer, r.group.ranks) for r in found]


def test_each_call_is_recorded_once() -> None:
    collectives: list[tuple[Any, ...]] = [
        ("all_reduce", 16, "float32", "sum", -1),
        ("all_reduce", 32, "int64", "max", -1),
        ("all_reduce", 64, "float32", "sum", -1),
        ("broadcast", 16, "float32", "", 0),
        ("broadcast", 16, "float32", "", 2),
        ("reduce", 16, "float32", "sum", 0),
        ("all_gather", 16, "float32", "", -1),
        ("all_gather", 16, "float32", "", -1),
        ("reduce_scatter", 16, "float32", "sum", -1),
        ("reduce_scatter", 16, "float32", "sum", -1),
        ("gather", 16, "float32", "", 0),
        ("scatter", 16, "float32", "", 0),
        ("all_to_all", 48, "float32", "", -1),
        ("barrier", 0, "", "", -1),
    ]
    for rank, found in enumerate(on_ranks(calls, 3)):
        ends = ("send", (rank + 1) % 3), ("recv", (rank + 2) % 3)
        messages = [(kind, nbytes, "float32", "", peer) for nbytes in (16, 4 << 20) for kind, peer in ends]
        expected = [
            (kind, number, *more, (0, 1, 2))
            for of_kind in (collectives, messages)
            for number, (kind, *more) in enumerate(of_kind, 1)
        ]
        in_group = [("all_reduce", 1, 16, "float64", "sum", -1, (0,))]
        assert found == expected + (in_group if rank == 0 else [])


def steps(member: Member) -> list[tuple[int, str]]:
    world = phalanx.init()
    x = torch.ones(1)
    world.all_reduce(x)
    world.step(3)
    with phalanx.label("training"):
        world.all_reduce(x)
        with phalanx.label("evaluation"):
            world.all_reduce(x)
        world.step(4)
        world.all_reduce(x)
    world.all_reduce(x)
    with pytest.raises(ArgumentError, match="4294967296 is not a number"):
        world.step(1 << 32)
    found = [(record.step, record.label) for record in own_recording().records[-5:]]
    phalanx.close()
    return found


def test_operations_carry_what_the_script_said_of_itself() -> None:
    expected = [(-1, ""), (3, "training"), (3, "evaluation"), (4, "training"), (4, "")]
    assert on_ranks(steps, 1) == [expected]


def one_is_missing(member: Member) -> Recording:
    member.join()
    x = torch.ones(4)
    for _ in range(5):
        dist.all_reduce(x)
    if member.rank == 0:
        dist.broadcast(x, 0)
    work: Any = (dist.isend if member.rank == 0 else dist.irecv)(x, 1 - member.rank)
    work.wait()
    return own_recording()


@pytest.mark.long
def test_torchs_own_analyser_reads_the_recordings(tmp_path: Path) -> None:
    """It matches what belongs together, and says which rank is missing in the collective that one has not called."""
    recordings = on_ranks(one_is_missing, 2)
    write_torch_traces(tmp_path / "traces", dict(enumerate(recordings)))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path / "traces")]
    done = subprocess.run([*command, "--prefix", "rank_"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert "gloo:broadcast" in text
    assert "missing ranks: {1}" in text


def test_a_forked_child_has_operations_of_its_own_alone() -> None:
    def kinds() -> list[str]:
        found = read_process(os.getpid())
        return [] if found is None else [record.kind for record in found.records]

    def child(member: Member) -> list[list[str]]:
        before = kinds()
        member.join()
        dist.broadcast(torch.ones(1), 0)
        return [before, kinds()]

    def parent(member: Member) -> list[list[str]]:
        member.join()
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        (of_child,) = on_ranks(child, 1)
        return [*of_child, kinds()]

    assert on_ranks(parent, 1) == [[[], ["broadcast"], ["all_reduce"]]]
