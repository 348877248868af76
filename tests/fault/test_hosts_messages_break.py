"""A rank of one of several hosts is killed in the middle of messages: every survivor says which rank, and where."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import ISLANDS, divide_by
from tests.support.ranks import Member, run_ranks

from phalanx.errors import PeerLost

SMALL, STAGED, LARGE = 8, 30_000, 3_000_000
WITHIN_S = 20.0  # of seconds that a busy machine may need, where a fault would wait for the group's timeout


@pytest.fixture(autouse=True, params=ISLANDS)
def over_hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    divide_by(monkeypatch, ISLANDS[request.param])
    return str(request.param)


@pytest.mark.parametrize("count", [SMALL, STAGED, LARGE])
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 0), (4, 1), (5, 4)])
def test_survivors_name_a_rank_that_is_killed(size: int, victim: int, count: int, over_hosts: str) -> None:
    def body(member: Member) -> Any:
        member.join(timeout_s=300)
        dist.barrier()
        others = [rank for rank in range(size) if rank != member.rank]
        if member.rank == victim:
            for rank in others:
                dist.isend(torch.ones(count), rank)
                dist.irecv(torch.ones(count), rank)
            time.sleep(0.05)  # the others are in the middle of it
            (member.folder / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            while True:
                works = [dist.isend(torch.ones(count), rank) for rank in others]
                works += [dist.irecv(torch.ones(count), rank) for rank in others]
                for work in works:
                    assert work is not None
                    work.wait()
        raised = time.monotonic()
        waited_s = raised - float((member.folder / "killed").read_text())
        with pytest.raises(PeerLost):
            dist.recv(torch.ones(count), victim)  # it stays broken
        # A survivor that ends before another one has raised would be one more rank that is lost.
        (member.folder / f"raised{member.rank}").touch()
        while len(list(member.folder.glob("raised*"))) < size - 1 and time.monotonic() - raised < 100:
            time.sleep(0.02)
        return caught.value.group_rank, str(caught.value), waited_s

    for outcome in run_ranks(body, size):
        if outcome.rank != victim:
            assert outcome.error is None, outcome.traceback
            rank, text, waited_s = outcome.value
            assert rank == victim, text
            assert f"rank {victim} of the group" in text
            assert f"h{ISLANDS[over_hosts](victim, size)}" in text or "pid" in text
            assert waited_s < WITHIN_S, text
