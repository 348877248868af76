"""Ranks that leave a group in order: what goes on without them, and the last call, which no later one compares."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.fault.test_deaths import hosts_of
from tests.support.ranks import Member, on_ranks, run_ranks, values
from tests.support.waiting import await_stop, when_waiting

from phalanx.c10d import process_group
from phalanx.errors import CollectiveMismatch, PeerLost, PhalanxError
from phalanx.membership import liveness  # noqa: F401 - it has something to do at exit
from phalanx.system.host import machine_name

SOON_S = 20.0  # far below any timeout here
LARGE = 600_000  # float32: in chunks between hosts
long = pytest.mark.long


# -- a rank that has left in order -------------------------------------------------------------------------------------


def test_master_receives_from_the_workers_that_are_left() -> None:
    """Rank 1 sends and leaves; rank 2 sends when it is waited for. Then nobody is left who could send."""

    def body(member: Member) -> None:
        member.join()
        tensor = torch.tensor([member.rank])
        if member.rank:
            if member.rank == 2:
                member.await_said("gone", "waits")
            dist.send(tensor, 0)
            dist.destroy_process_group()
            member.say("gone")
            return
        dist.recv(tensor)
        assert tensor.item() == 1
        when_waiting(lambda: member.say("waits"))
        dist.recv(tensor)
        assert tensor.item() == 2
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"all other ranks of the group left .* recv from any rank.*test_leaving"):
            dist.recv(tensor)
        assert time.monotonic() - started < SOON_S

    on_ranks(body, 3)


def test_only_a_message_of_the_rank_that_left_fails() -> None:
    """A receive from it, and sends to it, small and large; the others of the group go on as before."""

    def body(member: Member) -> None:
        member.join()
        tensor = torch.zeros(4)
        if member.rank == 2:
            dist.send(torch.full((4,), 7.0), 0)
            dist.destroy_process_group()
            (member.folder / "pid").write_text(str(os.getpid()))
            member.say("gone")
            return
        member.await_said("gone")
        pid, host = int((member.folder / "pid").read_text()), machine_name()
        if member.rank == 0:
            dist.recv(tensor, 2)  # what it sent before it left is there
            assert tensor.tolist() == [7.0] * 4
        text = rf"rank 2 of the group \(pid {pid} on {host}\) left the group in order"
        with pytest.raises(PeerLost, match=text) as caught:
            dist.recv(tensor, 2)
        assert (caught.value.group_rank, caught.value.pid, caught.value.host) == (2, pid, host)
        for numel in (4, 3_000_000):
            with pytest.raises(PeerLost, match="send to"):
                dist.send(torch.ones(numel), 2)
        work = dist.irecv(tensor, 2)
        assert work is not None
        with pytest.raises(RuntimeError, match="left the group in order"):
            work.get_future().wait()
        receive = dist.irecv(tensor, 1 - member.rank)
        dist.send(torch.full((4,), 3.0), 1 - member.rank)
        assert receive is not None
        receive.wait()
        assert tensor.tolist() == [3.0] * 4

    on_ranks(body, 3)


# -- the last call -----------------------------------------------------------------------------------------------------


def join(member: Member) -> None:
    member.join()
    vars(process_group)["LAST_CALLS_S"] = 100.0  # instead of a second: a busy machine takes longer


def broadcast(rank: int, src: int, count: int) -> None:
    dist.broadcast(torch.ones(count), src)


def scatter(rank: int, src: int, count: int) -> None:
    parts = [torch.ones(count) for _ in range(dist.get_world_size())] if rank == src else None
    dist.scatter(torch.ones(count), parts, src)


@pytest.mark.parametrize(
    ("place", "odd", "call", "src", "count"),
    [
        ("000", 0, broadcast, 0, 4),
        ("000", 0, scatter, 0, LARGE),
        ("011", 2, broadcast, 2, LARGE),
        pytest.param("00122", 1, broadcast, 0, LARGE, marks=long),
        pytest.param("00122", 2, scatter, 1, LARGE, marks=long),
    ],
)
def test_mismatch_in_the_last_call_is_raised_when_the_group_is_destroyed(
    place: str, odd: int, call: Callable[[int, int, int], None], src: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root of a broadcast waits for nobody, and calls nothing more. A host's ranks compare their calls."""
    size = hosts_of(place, monkeypatch)

    def body(member: Member) -> str:
        join(member)
        if len(set(place)) == 1:
            if member.rank:
                member.await_said("waits")
            else:
                when_waiting(lambda: member.say("waits"))
        found = ""
        try:
            call(member.rank, src, count + (member.rank == odd))
            dist.destroy_process_group()
        except CollectiveMismatch as error:
            found = str(error)
            dist.destroy_process_group()  # nothing is left to tell
        return found

    name, texts = call.__name__, on_ranks(body, size)
    assert all(text for rank, text in enumerate(texts) if place[rank] == place[odd])
    for text in filter(None, texts):
        assert f"rank {odd}: {name}(float32[{count + 1}], src={src}) at" in text
        assert f"{name}(float32[{count}], src={src}) at" in text.replace(f"rank {odd}: ", "")


@pytest.mark.parametrize(("place", "leaver"), [("00", 1), ("011", 2)])
def test_rank_that_leaves_without_the_last_call_is_named_on_its_host(
    place: str, leaver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = hosts_of(place, monkeypatch)

    def body(member: Member) -> None:
        join(member)
        if member.rank == leaver:
            dist.destroy_process_group()
            return
        if place[member.rank] != place[leaver]:  # what the ranks of another host find in its last call it may miss
            with contextlib.suppress(PeerLost):
                dist.broadcast(torch.ones(4), 0)
                dist.destroy_process_group()
            return
        with pytest.raises(PeerLost) as caught:
            dist.broadcast(torch.ones(4), 0)
            dist.destroy_process_group()
        assert caught.value.group_rank == leaver
        assert f"rank {leaver} of the group" in str(caught.value)
        assert "has left the group in order" in str(caught.value)
        assert "broadcast(float32[4], src=0) at" in str(caught.value)

    on_ranks(body, size)


@pytest.mark.parametrize(("place", "how"), [("00", "stopped"), ("00", "late"), ("0011", "killed")])
def test_destroying_a_group_does_not_wait_for_a_rank_that_does_not_come(
    place: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = hosts_of(place, monkeypatch)
    last = size - 1

    def body(member: Member) -> None:
        member.join()
        dist.barrier()
        (member.folder / f"pid-{member.rank}").write_text(str(os.getpid()))
        member.meet("joined")
        pid = int((member.folder / f"pid-{last}").read_text())
        if member.rank == last:
            if how != "late":
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            member.await_said(*(f"done-{rank}" for rank in range(last)))
            with contextlib.suppress(PhalanxError):  # the others have left
                dist.broadcast(torch.ones(1), 0)
            return
        if how == "stopped":
            await_stop(pid)  # else it may stop when it has been told to go on
        failed = False
        try:
            dist.broadcast(torch.ones(1), 0)
        except PhalanxError:
            failed = True
        started = time.monotonic()
        with contextlib.suppress(PhalanxError) if failed else contextlib.nullcontext():  # it need not be said twice
            dist.destroy_process_group()
        assert time.monotonic() - started < SOON_S
        member.say(f"done-{member.rank}")
        if how == "stopped" and member.rank == 0:
            member.await_said(*(f"done-{rank}" for rank in range(last)))
            os.kill(pid, signal.SIGCONT)

    outcomes = run_ranks(body, size)
    values(outcomes[:last] if how == "killed" else outcomes)


def test_destroying_a_group_replaces_no_error_and_tells_none_twice() -> None:
    def body(member: Member) -> None:
        member.join()
        with pytest.raises(KeyError):
            try:
                if member.rank == 0:
                    dist.broadcast(torch.ones(4), 0)
                raise KeyError("the script's own")
            finally:
                dist.destroy_process_group()
        member.meet("destroyed")
        member.join(name="again")
        with pytest.raises(PhalanxError):
            dist.all_reduce(torch.ones(4 + member.rank))
        dist.destroy_process_group()

    on_ranks(body, 2)
