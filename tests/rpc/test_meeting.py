"""Ranks that become workers again: after they were, after an attempt that failed, beside a worker that still ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

import phalanx
from phalanx import rpc
from phalanx.errors import InitializationError, PhalanxError, WorkerLost
from phalanx.rpc.members import Members
from tests.rpc.workers import add, next_of
from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks, run_ranks, values

SIZE, LAST = 3, 2


class Adder:
    def sum(self, one: int, other: int) -> int:
        return one + other


@contextmanager
def no_store() -> Iterator[None]:
    """No rank can become a worker in this process."""

    def fail(*_: Any) -> None:
        raise PhalanxError("the store does not answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Members, "join", fail)
        yield


def works(member: Member) -> Any:
    """Call the next rank, then stop being a worker; returns what the call has returned."""
    assert len(rpc.workers()) == member.size
    value = rpc.call((member.rank + 1) % member.size, add, member.rank, 1)
    rpc.shutdown()
    return value


def test_rank_that_failed_to_become_a_worker_may_try_again() -> None:
    """They wait for it meanwhile."""

    def body(member: Member) -> Any:
        member.join()
        if member.rank == LAST:
            for _ in range(2):
                with no_store(), pytest.raises(PhalanxError, match="does not answer"):
                    rpc.init()
        rpc.init()
        return works(member)

    assert on_ranks(body, SIZE) == [rank + 1 for rank in range(SIZE)]


@pytest.mark.parametrize(("lost", "way"), [(0, "fails"), (LAST, "is slow")])
def test_ranks_that_waited_in_vain_meet_when_all_try_again(
    lost: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = Members.join

    def body(member: Member) -> Any:
        def join_late(members: Members, *arguments: Any) -> None:
            member.await_said(*[f"in-vain-{rank}" for rank in range(SIZE) if rank != lost])
            join(members, *arguments)

        member.join()
        rpc.serve("adder", Adder(), ["sum"])
        if member.rank != lost:
            with pytest.raises(InitializationError):
                rpc.init(wait_s=0.5)
            member.say(f"in-vain-{member.rank}")
        elif way == "fails":
            with no_store(), pytest.raises(PhalanxError, match="does not answer"):
                rpc.init()
        else:
            with monkeypatch.context() as patch, pytest.raises(InitializationError, match=r"waited 0\.5 s for rpc"):
                patch.setattr(Members, "join", join_late)
                rpc.init(wait_s=0.5)
        member.meet("again")
        rpc.init()
        served = rpc.service(next_of(member), "adder", Adder).sum(member.rank, 2)
        return works(member), served

    assert on_ranks(body, SIZE) == [(rank + 1, rank + 2) for rank in range(SIZE)]


def test_rank_whose_name_was_taken_joins_under_another() -> None:
    def body(member: Member) -> list[str]:
        member.join()
        refused = ""
        try:
            rpc.init("x" if member.rank in (0, LAST) else None)
        except InitializationError as error:
            refused = str(error)
        if refused:
            assert "is called x already" in refused
            rpc.init("y")
        names = sorted(worker.name for worker in rpc.workers())
        works(member)
        return names

    assert on_ranks(body, SIZE) == [["worker1", "x", "y"]] * SIZE


@pytest.mark.parametrize("has_come", [False, True])
def test_rank_that_is_killed_as_it_joins_holds_nobody(has_come: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank is. Those that had to wait for it say so; for those that had not it is a worker that is lost."""
    join = Members.join

    def be_killed(members: Members, *arguments: Any) -> None:
        if has_come:
            join(members, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    def body(member: Member) -> None:
        member.join("gloo")
        if member.rank == LAST:
            monkeypatch.setattr(Members, "join", be_killed)
        with pytest.raises(WorkerLost if has_come else InitializationError):
            rpc.init(wait_s=300.0 if has_come else 0.3)
            rpc.call(LAST, add, 1, 1)

    outcomes = run_ranks(body, SIZE)
    assert outcomes.pop(LAST).signal == signal.SIGKILL
    values(outcomes)


@pytest.mark.parametrize("wait", [True, False])
def test_rank_that_is_quick_meets_the_others_anew(wait: bool) -> None:
    """Not those that are about to leave, nor itself as it was before."""

    def body(member: Member) -> None:
        member.join()
        for _ in range(5):
            rpc.init()
            rpc.shutdown(wait=wait)
        rpc.init()
        assert len({rpc.call(rank, os.getpid) for rank in range(SIZE)}) == SIZE
        rpc.shutdown()

    on_ranks(body, SIZE)


@pytest.mark.parametrize("size", [1, SIZE])
def test_ranks_meet_again_with_and_without_a_world_of_their_own(size: int) -> None:
    def body(member: Member) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        os.environ.update(place, RANK=str(member.rank))
        names = [f"worker{rank}" for rank in range(size)]
        for turn in range(2):
            member.meet(f"turn {turn}")
            with phalanx.init(quiet=True):
                rpc.init()
                assert [worker.name for worker in rpc.workers()] == names
                rpc.shutdown()
            rpc.init()  # it joins the ranks by itself
            assert [worker.name for worker in rpc.workers()] == names
            rpc.shutdown()
            assert not dist.is_initialized()

    with held_port() as port:
        on_ranks(body, size)
