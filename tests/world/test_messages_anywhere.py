"""Messages between ranks, on one host and between hosts: tags, any source, handles, both ways at once, late ones."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.waiting import soon
from tests.support.worlds import ANYWHERE, BETWEEN, Ranks, every_rank, in_worlds

from phalanx.errors import ClosedError, CollectiveMismatch, CollectiveTimeout, PeerLost, UnsupportedTensor

LARGE = 1_000_000  # float32: far more than one ring holds
ONE_OR_TWO = ANYWHERE[:2]  # two ranks have no other place
COUNTS = (0, 1, 1000, 20_000, 300_000)  # float32: in a frame, in a stage, straight into the tensor


def pending(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


@every_rank(2, ONE_OR_TWO)
def test_a_large_send_goes_on_while_its_rank_is_elsewhere(member: Member) -> None:
    """In a collective that the receiver has not joined yet, and in no call at all."""
    if member.rank == 0:
        work = dist.isend(torch.full((LARGE,), 7.0), 1)
        dist.barrier()
        dist.isend(torch.full((LARGE,), 8.0), 1)
        member.await_said("received")  # nothing of this group is called or held
        pending(work).wait()
    else:
        for value in (7.0, 8.0):
            x = torch.zeros(LARGE)
            dist.recv(x, 0)
            assert bool((x == value).all())
            if value == 7.0:
                dist.barrier()
        member.say("received")


@every_rank(2, ONE_OR_TWO)
def test_futures_views_and_completion(member: Member) -> None:
    peer = 1 - member.rank
    box = torch.zeros(4, 6)[:, ::2]
    receive = pending(dist.irecv(box, peer))
    dist.barrier()
    send = pending(dist.isend(torch.full((3, 4), float(member.rank)).t(), peer))
    done = receive.get_future().then(lambda future: future.value()[0].sum().item())
    assert done.wait() == 12.0 * peer
    assert receive.is_completed()
    assert box.tolist() == [[float(peer)] * 3] * 4
    send.wait()
    late = pending(dist.irecv(torch.zeros(1), peer))
    futures = [late.get_future() for _ in range(3)]
    assert not late.is_completed()
    with pytest.raises(RuntimeError, match="still under way"):
        late.wait(timedelta(milliseconds=20))
    dist.barrier()
    dist.send(torch.ones(1), peer)
    assert late.wait()
    assert [future.wait()[0].item() for future in (*futures, late.get_future())] == [1.0] * 4


@every_rank(3)
def test_a_tensor_that_cannot_be_written_to_is_refused(member: Member) -> None:
    if member.rank == 0:
        for _ in range(2):
            dist.send(torch.ones(3, 4), dst=1)
    elif member.rank == 1:
        with pytest.raises(UnsupportedTensor, match=r"shape \[3, 4\] and stride \[0, 1\]"):
            dist.irecv(torch.zeros(4).expand(3, 4), src=0)
        into = torch.zeros(2, 3, 4)
        for request in [dist.irecv(part, src=0) for part in into]:
            pending(request).wait()
        assert into.unique().tolist() == [1.0]


# -- handles -------------------------------------------------------------------------------------------


@every_rank(3, ANYWHERE, leaves=False)
def test_a_failed_message_stays_failed_and_writes_nothing(member: Member) -> None:
    if member.rank:
        member.meet("posted")  # a barrier of the group may end with it on a rank that is slow to leave it
        if member.rank == 1:
            with pytest.raises(CollectiveMismatch):
                pending(dist.isend(torch.ones(4_000_000), 0)).wait()
        return
    box = torch.full((4, 2), 7.0)[:, 0]  # not contiguous: received into a stand-in
    work = pending(dist.irecv(box, 1))
    future = work.get_future()
    member.meet("posted")
    with pytest.raises(CollectiveMismatch):
        work.wait()
    assert soon(future.done)
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
    assert box.tolist() == [7.0] * 4


@every_rank(3, ANYWHERE)
def test_a_destroyed_group_refuses_and_gives_up_its_messages(member: Member) -> None:
    group: Any = dist.new_group()
    box, done = torch.zeros(4), torch.zeros(4)
    peer = (member.rank + 1) % member.size
    left = group.recv([box], member.rank, 0)  # from a rank that does not leave the group first
    send = group.send([torch.ones(4)], peer, 1)
    got = group.recv([done], (member.rank - 1) % member.size, 1)
    future = left.get_future()
    send.wait()
    got.wait()
    dist.destroy_process_group(group)
    assert soon(future.done)
    with pytest.raises(RuntimeError, match="ClosedError"):
        future.wait()
    for _ in range(2):
        with pytest.raises(ClosedError):
            left.wait()
        assert isinstance(left.exception(), ClosedError)
    assert got.is_success()
    assert got.wait()
    for call in (
        lambda: group.send([torch.ones(4)], peer, 0),
        lambda: group.recv([torch.ones(4)], peer, 0),
        lambda: group.recv_anysource([torch.ones(4)], 0),
    ):
        with pytest.raises(ClosedError):
            call()


@every_rank(2, ONE_OR_TWO)
def test_destroying_a_group_ends_the_waits_of_other_threads(member: Member) -> None:
    # In turn: where the other rank has left the group, a message from it fails for that.
    for destroyer in range(2):
        group: Any = dist.new_group()
        if member.rank == destroyer:
            receive, begun = group.recv([torch.zeros(4)], 1 - member.rank, 0), threading.Barrier(4)
            told: list[str] = []

            def wait(receive: Any = receive, told: list[str] = told, begun: threading.Barrier = begun) -> None:
                begun.wait()
                with pytest.raises(ClosedError):
                    receive.wait()
                told.append("closed")

            threads = [threading.Thread(target=wait) for _ in range(3)]
            for thread in threads:
                thread.start()
            begun.wait()
            started = time.monotonic()
            dist.destroy_process_group(group)
            for thread in threads:
                thread.join()
            assert time.monotonic() - started < 20  # not the group's timeout
            assert told == ["closed"] * 3
        dist.barrier()
        if member.rank != destroyer:
            dist.destroy_process_group(group)


@every_rank(3)
def test_a_message_that_does_not_come_holds_up_no_other(member: Member) -> None:
    if member.rank == 0:
        first, second = torch.zeros(4), torch.zeros(4)
        stuck = pending(dist.irecv(first, 1, tag=1))
        future = pending(dist.irecv(second, 1, tag=2)).get_future()
        dist.barrier()
        assert soon(future.done)
        dist.barrier()
        stuck.wait()
        return
    for tag in (2, 1):
        dist.barrier()
        if member.rank == 1:
            dist.send(torch.ones(4), 0, tag=tag)


# -- between hosts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 14))])
@every_rank(4, ANYWHERE)
def test_receives_from_any_rank_and_from_one_lose_and_double_none(member: Member, seed: int) -> None:
    """Every rank sends to every rank, in bursts, and receives in another order, some of it from anyone.

    A message says from whom it is and its number among those of its sender, receiver and tag.
    """
    size, plan, mine = member.size, random.Random(seed), random.Random(f"{seed} {member.rank}")
    # How many messages go from one rank to another with each tag, and their size, which receives must know.
    sizes = [plan.choice(COUNTS) for _ in range(4)]
    counts = {(source, to, tag): plan.randrange(6) for source in range(size) for to in range(size) for tag in range(4)}
    sends = [(to, tag) for (source, to, tag), count in counts.items() if source == member.rank for _ in range(count)]
    mine.shuffle(sends)
    receives: list[tuple[int | None, int]] = []
    for tag in range(4):
        from_each = {source: counts[source, member.rank, tag] for source in range(size)}
        if tag % 2:  # all of a tag from anyone, or all of it from known ranks: else a receive may get none
            receives += [(None, tag)] * sum(from_each.values())
        else:
            receives += [(source, tag) for source, count in from_each.items() for _ in range(count)]
    mine.shuffle(receives)
    sent: dict[tuple[int, int], int] = {}
    works, boxes = [], []
    while sends or receives:
        if sends and (not receives or mine.random() < 0.5):
            to, tag = sends.pop()
            number = sent[to, tag] = sent.get((to, tag), -1) + 1
            works.append(dist.isend(torch.full((sizes[tag] + 2,), 1000.0 * member.rank + number), to, tag=tag))
        else:
            source, tag = receives.pop()
            box = torch.full((sizes[tag] + 2,), -1.0)
            work = pending(dist.irecv(box, source, tag=tag))
            boxes.append((work, box, source, tag))
            if mine.random() < 0.1:
                work.is_completed()
    mine.shuffle(works)
    for sending in works:
        pending(sending).wait()
    expected = dict.fromkeys(((source, tag) for source in range(size) for tag in range(4)), 0)
    for work, box, source, tag in boxes:
        work.wait()
        came = work._source_rank()
        number = expected[came, tag]
        expected[came, tag] += 1
        assert source in (None, came), (tag, source, came)
        assert bool((box == 1000.0 * came + number).all()), (tag, came, number, box[:2])
    assert expected == {(source, tag): counts[source, member.rank, tag] for source, tag in expected}


@every_rank(2, "two hosts")
def test_a_large_message_that_another_one_has_passed_is_received(member: Member) -> None:
    """Its receive is posted while it is being received aside, and its sender sends nothing more."""
    for turn in range(2):
        big, small = torch.full((4_000_000,), 1.0 + turn), torch.full((1,), 2.0)
        if member.rank == 0:
            for work in [dist.isend(big, 1, tag=1), dist.isend(small, 1, tag=2)]:
                pending(work).wait()
        else:
            dist.recv(small.zero_(), None if turn % 2 else 0, tag=2)
            dist.recv(big.zero_(), 0 if turn % 2 else None, tag=1)
            assert [small.item(), big.min().item(), big.max().item()] == [2.0, 1.0 + turn, 1.0 + turn]


@every_rank(3, BETWEEN)
def test_a_send_is_received_by_a_rank_that_has_sent_first(member: Member) -> None:
    """One rank starts more sends than it has credit for, and then receives; the others send to it, and then receive."""
    for count, ahead in ((25_000, 30), (1000, 50), (100_000, 8)):
        if member.rank == 0:
            numbers = [(rank, number) for number in range(ahead) for rank in (1, 2)]
            works = [dist.isend(torch.full((count,), float(number)), rank, tag=1) for rank, number in numbers]
            for rank in (1, 2):
                box = torch.zeros(300_000)
                dist.recv(box, rank, tag=2)
                assert box.unique().tolist() == [float(rank)]
            for work in works:
                pending(work).wait()
        else:
            dist.send(torch.full((300_000,), float(member.rank)), 0, tag=2)
            for number in range(ahead):
                box = torch.full((count,), -1.0)
                dist.recv(box, 0, tag=1)
                assert box.unique().tolist() == [float(number)]


@every_rank(4, "two hosts")
def test_what_a_rank_sends_before_it_destroys_its_group_arrives(member: Member) -> None:
    """However late it is received. Whether the two have talked before decides who holds it meanwhile."""
    pairs, own = ([0, 2], [1, 3]), member.rank % 2
    sends, peer = member.rank in (0, 3), (member.rank + 2) % 4
    for opened in (False, True):
        group: Any = [dist.new_group(pair) for pair in pairs][own]
        if opened:
            greeting = dist.irecv(torch.empty(1), peer, group=group)
            dist.send(torch.empty(1), peer, group=group)
            pending(greeting).wait()
        dist.barrier()
        if sends:
            for count in (4, 30_000):
                dist.send(torch.full((count,), float(count)), peer, group=group)
        else:
            # It waits for a second before it goes on, or for this rank to come, if that has to dial.
            soon((member.folder / f"{peer} left, {opened}").exists, 2.0)
            for count in (4, 30_000):
                box = torch.empty(count)
                dist.recv(box, peer, group=group)
                assert box.unique().tolist() == [float(count)]
            with pytest.raises(PeerLost, match="left the group in order") as caught:
                dist.recv(box, peer, group=group)
            assert caught.value.group_rank == pairs[own].index(peer)
            assert f"recv from rank {caught.value.group_rank}, float32[30000] at " in str(caught.value)
        dist.destroy_process_group(group)
        member.say(f"{member.rank} left, {opened}")


@pytest.mark.parametrize("late", [1, pytest.param(2, marks=pytest.mark.long)])
@in_worlds(3, "two hosts")
def test_a_late_message_is_named_by_every_rank_that_waits(world: Ranks, late: int) -> None:
    """Rank 1 is on the host of rank 0, whose patience is short, and rank 2 is on the other."""

    def body(member: Member) -> tuple[int | None, str]:
        group: Any = dist.new_group()
        dist.barrier(group)
        group.set_timeout(timedelta(seconds=0.3 if member.rank == 0 else 600))
        member.meet("in the group")  # one that is still in the barrier would hear of the first timeout there
        told: tuple[int | None, str] = -1, ""
        if member.rank == late:
            member.await_said("told 0", f"told {3 - late}")
        else:
            with pytest.raises(CollectiveTimeout) as caught:
                dist.recv(torch.empty(4 + member.rank), late, group=group)
            told = caught.value.group_rank, str(caught.value)
            member.say(f"told {member.rank}")
        dist.barrier()
        dist.destroy_process_group(group)
        return told

    outcomes = world.run(body)
    for own in (0, 3 - late):
        rank, text = outcomes[own]
        assert rank == late, text
        assert f"did not come within 0.3 s while rank 0 was in recv from rank {late}, float32[4] at " in text
        assert own == 0 or f"Rank {own} was in recv from rank {late}, float32[{4 + own}] at " in text
        assert "{" not in text
