"""What the handles of messages tell: to several threads, through futures, to oneself, and after the group has gone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks

from phalanx.errors import ClosedError, CollectiveMismatch, RankError

SIZES = [2, 3]


def until(condition: object, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.005)
    return bool(condition())  # type: ignore[operator]


def pending(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


@pytest.mark.parametrize("size", SIZES)
def test_a_failed_message_stays_failed_and_writes_nothing(size: int) -> None:
    def body(place: Member) -> bool:
        place.join()
        if place.rank == 1:
            dist.barrier()
            with pytest.raises(CollectiveMismatch):
                pending(dist.isend(torch.ones(4_000_000), 0)).wait()
            return True
        if place.rank == 2:
            dist.barrier()
            return True
        box = torch.full((4, 2), 7.0)[:, 0]  # not contiguous: received into a stand-in
        work = pending(dist.irecv(box, 1))
        future = work.get_future()
        dist.barrier()
        with pytest.raises(CollectiveMismatch):
            work.wait()
        assert until(future.done)
        with pytest.raises(RuntimeError, match="CollectiveMismatch"):
            future.wait()
        for _ in range(2):
            assert work.is_completed()
            assert not work.is_success()
            assert isinstance(work.exception(), CollectiveMismatch)
            with pytest.raises(CollectiveMismatch):
                work.wait()
        with pytest.raises(RuntimeError, match="CollectiveMismatch"):
            work.get_future().wait()
        return box.tolist() == [7.0] * 4

    assert on_ranks(body, size) == [True] * size


def test_every_thread_that_waits_for_a_failed_message_is_told() -> None:
    """Also one that comes while another is still asking the ranks what they did."""

    def body(place: Member) -> list[str]:
        place.join()
        told: list[str] = []
        if place.rank == 0:
            work = pending(dist.irecv(torch.zeros(4), 1))

            def wait() -> None:
                try:
                    told.append(str(work.wait()))
                except CollectiveMismatch as error:
                    told.append(type(error).__name__)

            threads = [threading.Thread(target=wait) for _ in range(4)]
            for thread in threads:
                thread.start()
            dist.barrier()
            for thread in threads:
                thread.join()
        else:
            dist.barrier()
            dist.isend(torch.ones(5), 0)
            time.sleep(1)  # it does not tell what it did, so the others ask until their patience ends
        return told

    assert on_ranks(body, 2) == [["CollectiveMismatch"] * 4, []]


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_outside_the_group_is_refused(size: int) -> None:
    def body(place: Member) -> bool:
        place.join()
        group = dist.group.WORLD
        assert group is not None
        for peer in (place.size, place.size + 5, 100_000, -1, -5):
            with pytest.raises(RankError, match=f"rank {peer} is not in the group"):
                group.send([torch.ones(4)], peer, 0)
            with pytest.raises(RankError, match=f"rank {peer} is not in the group"):
                group.recv([torch.ones(4)], peer, 0)
        dist.barrier()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


@pytest.mark.parametrize("size", SIZES)
def test_messages_to_oneself(size: int) -> None:
    def body(place: Member) -> bool:
        place.join()
        for count in (0, 1, 1_000_000):
            box = torch.zeros(count)
            before = pending(dist.irecv(box, place.rank, tag=1))
            send = pending(dist.isend(torch.full((count,), 3.0), place.rank, tag=1))
            after = pending(dist.isend(torch.full((2,), 4.0), place.rank, tag=2))
            late = torch.zeros(2)
            for work in (pending(dist.irecv(late, place.rank, tag=2)), after, send, before):
                work.wait()
            assert bool((box == 3).all())
            assert late.tolist() == [4.0, 4.0]
        dist.barrier()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_destroyed_group_refuses_and_gives_up_its_messages(size: int) -> None:
    def body(place: Member) -> bool:
        place.join()
        group = dist.new_group(list(range(place.size)))
        box, done = torch.zeros(4), torch.zeros(4)
        peer = (place.rank + 1) % place.size
        left = group.recv([box], place.rank, 0)  # from a rank that does not leave the group first
        sends = [group.send([torch.ones(4)], peer, 1)]
        got = group.recv([done], (place.rank - 1) % place.size, 1)
        future = left.get_future()
        for work in (*sends, got):
            work.wait()
        dist.destroy_process_group(group)
        assert until(future.done)
        with pytest.raises(RuntimeError, match="ClosedError"):
            future.wait()
        for _ in range(2):
            with pytest.raises(ClosedError):
                left.wait()
            assert left.is_completed()
            assert not left.is_success()
            assert isinstance(left.exception(), ClosedError)
        assert got.is_success()
        assert got.wait()
        with pytest.raises(ClosedError):
            group.send([torch.ones(4)], peer, 0)
        with pytest.raises(ClosedError):
            group.recv([torch.ones(4)], peer, 0)
        with pytest.raises(ClosedError):
            group.recv_anysource([torch.ones(4)], 0)
        dist.barrier()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


def test_destroying_a_group_ends_the_waits_of_other_threads() -> None:
    def body(place: Member) -> list[str]:
        place.join()
        told: list[str] = []
        # In turn: where the other rank has left the group, a message from it fails for that.
        for destroyer in range(2):
            group = dist.new_group([0, 1])

            def wait(tag: int, group: Any = group) -> None:
                try:
                    told.append(str(group.recv([torch.zeros(4)], 1 - place.rank, tag).wait()))
                except ClosedError as error:
                    told.append(type(error).__name__)

            if place.rank == destroyer:
                threads = [threading.Thread(target=wait, args=(tag,)) for tag in range(3)]
                for thread in threads:
                    thread.start()
                time.sleep(0.1)
                started = time.monotonic()
                dist.destroy_process_group(group)
                for thread in threads:
                    thread.join()
                assert time.monotonic() - started < 20  # not the group's timeout
            dist.barrier()
            if place.rank != destroyer:
                dist.destroy_process_group(group)
        dist.destroy_process_group()
        return told

    assert on_ranks(body, 2) == [["ClosedError"] * 3] * 2


@pytest.mark.parametrize("size", SIZES)
def test_every_future_of_a_message_completes(size: int) -> None:
    def body(place: Member) -> bool:
        place.join()
        if place.rank == 0:
            work = pending(dist.irecv(torch.zeros(4), 1))
            futures = [work.get_future() for _ in range(3)]
            dist.barrier()
            assert all(future.wait()[0].tolist() == [1.0] * 4 for future in futures)
            assert work.get_future().wait()[0].tolist() == [1.0] * 4
        else:
            dist.barrier()
            if place.rank == 1:
                dist.send(torch.ones(4), 0)
        dist.barrier()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_message_that_does_not_come_holds_up_no_other(size: int) -> None:
    def body(place: Member) -> bool:
        place.join()
        first, second = torch.zeros(4), torch.zeros(4)
        if place.rank == 0:
            stuck = pending(dist.irecv(first, 1, tag=1))
            future = pending(dist.irecv(second, 1, tag=2)).get_future()
            time.sleep(0.1)  # the thread that looks after them is at the first
            dist.barrier()
            assert until(future.done, 60.0)
            dist.barrier()
            stuck.wait()
        else:
            dist.barrier()
            if place.rank == 1:
                dist.send(torch.ones(4), 0, tag=2)
            dist.barrier()
            if place.rank == 1:
                dist.send(torch.ones(4), 0, tag=1)
        dist.barrier()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


def test_a_message_that_another_thread_finishes_wakes_its_waiter_at_once() -> None:
    """Rank 1 sends nothing more: only the thread that tests finds the message, and must tell the one that sleeps."""

    def body(place: Member) -> bool:
        place.join()
        if place.rank == 0:
            slow = 0
            for turn in range(30):
                woken: list[float] = []
                work = pending(dist.irecv(torch.zeros(1), 1, tag=turn))
                other = pending(dist.irecv(torch.zeros(1), 1, tag=1000 + turn))
                thread = threading.Thread(target=lambda w=work, t=woken: (w.wait(), t.append(time.monotonic())))
                thread.start()
                time.sleep(0.002)
                dist.barrier()
                while not other.is_completed():
                    pass
                seen = time.monotonic()
                thread.join()
                slow += woken[0] - seen > 0.03
            assert slow < 30  # a busy machine may let it wait, but a waiter that slept its slice out is always late
        else:
            for turn in range(30):
                dist.barrier()
                dist.send(torch.ones(1), 0, tag=turn)
                dist.send(torch.ones(1), 0, tag=1000 + turn)
        dist.barrier()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, 2) == [True, True]
