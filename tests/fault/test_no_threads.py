"""A rank that can start no more threads, as under a limit on processes: its messages go on, or say at once why not."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import divide_by
from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks

import phalanx
from phalanx.errors import BackendError, InitializationError, PeerLost

TIMEOUT_S = 200.0
SMALL, LARGE = 4, 1_000_000
START = next(name for name in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, name))

Call = Callable[[torch.Tensor, int], object]
# What the first rank does, and what the last one does with it, each given a tensor and the other rank.
CALLS: dict[str, tuple[Call, Call]] = {
    "send": (dist.send, dist.recv),
    "isend": (lambda tensor, peer: dist.isend(tensor, peer).wait(), dist.recv),  # type: ignore[union-attr]
    "irecv": (lambda tensor, peer: dist.irecv(tensor, peer).wait(), dist.send),  # type: ignore[union-attr]
    "recv from any": (lambda tensor, peer: dist.recv(tensor), dist.send),
}


CASES = [
    ("isend", SMALL),
    ("irecv", LARGE),
    pytest.param("send", LARGE, marks=pytest.mark.long),
    pytest.param("recv from any", SMALL, marks=pytest.mark.long),
]


def refuse(*arguments: object, **options: object) -> None:
    raise RuntimeError("can't start new thread")


def join(member: Member) -> None:
    member.join(timeout_s=TIMEOUT_S)
    dist.barrier()
    member.meet("joined")  # one that is still in there might raise there


@pytest.mark.parametrize(("name", "count"), CASES)
def test_messages_of_one_host_need_no_thread_to_be_waited_for(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(member: Member) -> list[float]:
        join(member)
        got, last = torch.full((count,), float(member.rank)), 2
        if member.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(threading, START, refuse)
                CALLS[name][0](got, last)
            CALLS[name][0](got, last)  # there are threads again
        if member.rank == last:
            for _ in range(2):
                CALLS[name][1](got, 0)
        dist.barrier()
        dist.destroy_process_group()
        return [got[0].item(), got[-1].item()]

    first, *_, last = on_ranks(body, 3)
    sent = 0.0 if "send" in name else 2.0
    assert first == last == [sent, sent]
    said = capfd.readouterr().err
    assert said.count("warning") <= 1
    assert said.count("a message moves on only while it is waited for") == said.count("warning")


@pytest.mark.parametrize(("name", "count"), CASES)
def test_no_thread_for_messages_between_hosts_is_told(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that needs the thread raises; the other ranks are told, and nobody waits for the timeout."""
    divide_by(monkeypatch, lambda rank, size: int(rank == 2))

    def body(member: Member) -> str:
        join(member)
        tensor, last = torch.full((count,), float(member.rank)), 2
        if member.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(threading, START, refuse)
                with pytest.raises(BackendError, match=r"no more threads .*ulimit -u") as caught:
                    CALLS[name][0](tensor, last)
            text = str(caught.value)
        else:
            with pytest.raises(PeerLost) as lost:
                if member.rank == last:
                    CALLS[name][1](tensor, 0)
                dist.barrier()
            assert lost.value.group_rank == 0
            text = str(lost.value)
        dist.destroy_process_group()
        return text

    for text in on_ranks(body, 3, timeout_s=TIMEOUT_S / 2)[1:]:
        assert "rank 0 of the group" in text
        assert "has failed (BackendError: the system gives this process no more threads" in text


def test_no_thread_for_a_group_over_hosts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    divide_by(monkeypatch, lambda rank, size: int(rank == 2))

    def body(member: Member) -> str:
        if member.rank == 0:
            monkeypatch.setattr(threading, START, refuse)
        with pytest.raises(BackendError if member.rank == 0 else InitializationError) as caught:
            member.join(timeout_s=TIMEOUT_S)
        return str(caught.value)

    for rank, text in enumerate(on_ranks(body, 3, timeout_s=TIMEOUT_S / 2)):
        assert "no more threads" in text
        assert rank == 0 or text.startswith("rank 0 ")


def test_rank_0_that_has_no_thread_for_the_store_says_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(member: Member) -> str:
        monkeypatch.setattr(threading, START, refuse)
        where = f"tcp://127.0.0.1:{port}"
        with pytest.raises(BackendError) as caught:
            phalanx.init(timeout_s=TIMEOUT_S, quiet=True, init_method=where, rank=0, world_size=2)
        return str(caught.value)

    with held_port() as port:
        assert on_ranks(body, 1)[0].startswith("the system gives this process no more threads")
