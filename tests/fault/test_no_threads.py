"""A rank that can start no more threads, as under a limit on processes: its messages go on, or say at once why not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import divide_by
from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks

import phalanx
from phalanx.errors import BackendError, PeerLost

TIMEOUT_S = 200.0
SMALL, LARGE = 4, 1_000_000
START = next(name for name in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, name))

Call = Callable[[torch.Tensor, int], object]
# What the first rank does, and what the last one does with it, each given a tensor and the other rank.
CASES: list[Any] = [
    pytest.param(lambda tensor, peer: dist.isend(tensor, peer).wait(), dist.recv, SMALL, id="isend"),  # type: ignore[union-attr]
    pytest.param(lambda tensor, peer: dist.irecv(tensor, peer).wait(), dist.send, LARGE, id="irecv"),  # type: ignore[union-attr]
    pytest.param(dist.send, dist.recv, LARGE, id="send", marks=pytest.mark.long),
    pytest.param(lambda tensor, peer: dist.recv(tensor), dist.send, SMALL, id="any source", marks=pytest.mark.long),
]


def refuse(*arguments: object, **options: object) -> None:
    raise RuntimeError("can't start new thread")


def join(member: Member) -> None:
    member.join(timeout_s=TIMEOUT_S)
    dist.barrier()
    member.meet("joined")  # one that is still in there might raise there


@pytest.mark.parametrize(("first", "last", "count"), CASES)
def test_messages_of_one_host_need_no_thread_to_be_waited_for(
    first: Call, last: Call, count: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(member: Member) -> list[float]:
        join(member)
        got = torch.full((count,), float(member.rank))
        if member.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(threading, START, refuse)
                first(got, 2)
            first(got, 2)  # there are threads again
        if member.rank == 2:
            for _ in range(2):
                last(got, 0)
        dist.barrier()
        dist.destroy_process_group()
        return [got[0].item(), got[-1].item()]

    at_first, _, at_last = on_ranks(body, 3)
    sent = 0.0 if last is dist.recv else 2.0
    assert at_first == at_last == [sent, sent]
    said = capfd.readouterr().err
    assert said.count("warning") <= 1
    assert said.count("a message moves on only while it is waited for") == said.count("warning")


@pytest.mark.parametrize(("first", "last", "count"), [case for case in CASES if case.values[1] is dist.recv])
def test_no_thread_for_messages_between_hosts_is_told(
    first: Call, last: Call, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send, which dials on a thread, raises; the other ranks are told, and nobody waits for the timeout."""
    divide_by(monkeypatch, lambda rank, size: int(rank == 2))

    def body(member: Member) -> None:
        join(member)
        tensor = torch.full((count,), float(member.rank))
        if member.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(threading, START, refuse)
                with pytest.raises(BackendError, match=r"no more threads .*ulimit -u"):
                    first(tensor, 2)
        else:
            why = r"rank 0 of the group .* has failed \(BackendError: the system gives this process no more threads"
            with pytest.raises(PeerLost, match=why) as lost:
                if member.rank == 2:
                    last(tensor, 0)
                dist.barrier()
            assert lost.value.group_rank == 0
        dist.destroy_process_group()

    on_ranks(body, 3, timeout_s=TIMEOUT_S / 2)


def test_rank_0_that_has_no_thread_for_the_store_says_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(member: Member) -> None:
        monkeypatch.setattr(threading, START, refuse)
        with pytest.raises(BackendError, match=r"^the system gives this process no more threads"):
            phalanx.init(timeout_s=200, quiet=True, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)

    with held_port() as port:
        on_ranks(body, 1)
