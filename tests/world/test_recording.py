"""Every operation of a group is in the flight recorder, whichever way it was called, and torch's analyser reads it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks

import phalanx
from phalanx.errors import ArgumentError
from phalanx.watch.records import Recording, read_process
from phalanx.watch.torch_trace import write_torch_traces


def own_recording() -> Recording:
    found = read_process(os.getpid())
    assert found is not None
    return found


def calls(member: Member) -> list[tuple[Any, ...]]:
    """Each kind of call once, by the quick way where there is one, and then asynchronously or in its long form."""
    member.join()
    size, other = member.size, (member.rank + 1) % member.size
    x, parts = torch.ones(4), [torch.ones(4) for _ in range(size)]
    whole = torch.ones(4 * size)
    dist.all_reduce(x)
    dist.all_reduce(x.to(torch.int64), op=dist.ReduceOp.MAX, async_op=True).wait()
    dist.all_reduce(torch.ones(4, 4).t())
    dist.broadcast(x, 0)
    dist.broadcast(x, size - 1, async_op=True).wait()
    dist.reduce(x, 0)
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(whole, x)
    dist.reduce_scatter_tensor(x, whole)
    dist.reduce_scatter(x, parts)
    dist.gather(x, parts if member.rank == 0 else None)
    dist.scatter(x, parts if member.rank == 0 else None)
    dist.all_to_all_single(whole.clone(), whole)
    dist.barrier()
    before = member.rank - 1 if member.rank else size - 1
    if size > 1:
        works: list[Any] = [dist.isend(x, other), dist.irecv(torch.empty(4), before)]
        for work in works:
            work.wait()
        # Larger than a ring, so that it is not sent at once.
        large = torch.ones(1 << 20)
        works = [dist.isend(large, other), dist.irecv(torch.empty(1 << 20), before)]
        for work in works:
            work.wait()
    group = dist.new_group([0])
    if member.rank == 0:
        dist.all_reduce(torch.ones(2, dtype=torch.float64), group=group)
    found = own_recording()
    dist.destroy_process_group()
    return [
        (
            *(r.kind, r.in_group, r.nbytes, r.dtype, r.op, r.peer),
            *(r.group.ranks, r.site.rpartition(":")[0], r.under_way, r.failed),
        )
        for r in found.records
    ]


@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.long)])
def test_each_call_is_recorded_once(size: int) -> None:
    world = tuple(range(size))
    for rank, found in enumerate(on_ranks(calls, size)):
        part = 16
        expected: list[tuple[Any, ...]] = [
            ("all_reduce", part, "float32", "sum", -1),
            ("all_reduce", 2 * part, "int64", "max", -1),
            ("all_reduce", 4 * part, "float32", "sum", -1),
            ("broadcast", part, "float32", "", 0),
            ("broadcast", part, "float32", "", size - 1),
            ("reduce", part, "float32", "sum", 0),
            ("all_gather", part, "float32", "", -1),
            ("all_gather", part, "float32", "", -1),
            ("reduce_scatter", part, "float32", "sum", -1),
            ("reduce_scatter", part, "float32", "sum", -1),
            ("gather", part, "float32", "", 0),
            ("scatter", part, "float32", "", 0),
            ("all_to_all", part * size, "float32", "", -1),
            ("barrier", 0, "", "", -1),
        ]
        collectives = [
            (kind, number, nbytes, dtype, op, peer, world, __file__, False, False)
            for number, (kind, nbytes, dtype, op, peer) in enumerate(expected, 1)
        ]
        other, before = (rank + 1) % size, (rank - 1) % size
        messages = [
            (kind, number, nbytes, "float32", "", peer, world, __file__, False, False)
            for number, (kind, nbytes, peer) in enumerate(
                [("send", 16, other), ("recv", 16, before), ("send", 4 << 20, other), ("recv", 4 << 20, before)], 1
            )
        ]
        in_group = [("all_reduce", 1, 16, "float64", "sum", -1, (0,), __file__, False, False)]
        assert found == collectives + (messages if size > 1 else []) + (in_group if rank == 0 else [])


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


def test_torchs_own_analyser_reads_the_recordings(tmp_path: Path) -> None:
    """It matches what belongs together, and says which rank is missing in the collective that one has not called."""
    recordings = on_ranks(one_is_missing, 2)
    write_torch_traces(tmp_path / "traces", dict(enumerate(recordings)))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path / "traces")]
    done = subprocess.run(
        [*command, "--prefix", "rank_", "-o", str(tmp_path / "out")], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    _, found = pickle.loads((tmp_path / "out").read_bytes())
    collectives = [c for c in found.collectives if "all_reduce" in c.collective_name]
    assert [c.pass_check for c in collectives] == [True] * 5
    assert {frame["filename"] for c in collectives for frame in c.collective_frames} == {__file__}
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
