"""Messages between two ranks: tags, any source, sizes beyond a ring, both ways at once, beside collectives."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.contract import draw
from tests.support.ranks import Member, on_ranks

from phalanx.errors import CollectiveMismatch, UnsupportedTensor

LARGE = 1_000_000  # float32: far more than one ring holds


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_every_pair_exchanges_every_size_both_ways_at_once(size: int) -> None:
    def body(place: Member) -> list[str]:
        place.join()
        wrong = []
        for count in (0, 1, 1000, 70000, 300000 if place.size < 8 else 100000):
            others = [peer for peer in range(place.size) if peer != place.rank]
            inboxes = {peer: torch.zeros(count) for peer in others}
            works = [dist.isend(draw(place.rank, count, torch.float32, peer), peer) for peer in others]
            works += [dist.irecv(inboxes[peer], peer) for peer in others]
            for work in works:
                assert work is not None
                work.wait()
            wrong += [
                f"{peer} x {count}"
                for peer, inbox in inboxes.items()
                if not torch.equal(inbox, draw(peer, count, torch.float32, place.rank))
            ]
        dist.destroy_process_group()
        return wrong

    assert on_ranks(body, size) == [[]] * size


def test_tags_find_their_receives_in_any_order() -> None:
    def body(place: Member) -> bool:
        place.join()
        if place.rank == 0:
            for tag in (1, 2, 3):
                dist.send(torch.full((LARGE,), float(tag)), 1, tag=tag)
            for value in (10.0, 11.0):
                dist.send(torch.tensor([value]), 1, tag=9)
        else:
            for tag in (3, 1, 2):
                x = torch.zeros(LARGE)
                dist.recv(x, 0, tag=tag)
                assert x[0].item() == tag
                assert x[-1].item() == tag
            for value in (10.0, 11.0):
                x = torch.zeros(1)
                dist.recv(x, 0, tag=9)
                assert x.item() == value
        dist.destroy_process_group()
        return True

    # Three messages of which the last is received first: the first two are set aside to let it through.
    assert on_ranks(body, 2) == [True, True]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_receiving_from_anyone_tells_from_whom(size: int) -> None:
    def body(place: Member) -> list[int]:
        place.join()
        sources: list[int] = []
        if place.rank == 0:
            for _ in range(3 * (place.size - 1)):
                x = torch.zeros(2)
                source = dist.recv(x)
                assert x.tolist() == [float(source)] * 2
                sources.append(source)
        else:
            for _ in range(3):
                dist.send(torch.full((2,), float(place.rank)), 0)
        dist.barrier()
        dist.destroy_process_group()
        return sorted(sources)

    assert on_ranks(body, size)[0] == sorted(list(range(1, size)) * 3)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_batches(size: int) -> None:
    def body(place: Member) -> bool:
        place.join()
        after, before = (place.rank + 1) % place.size, (place.rank - 1) % place.size
        inbox = torch.zeros(LARGE // 4)
        outbox = torch.full((LARGE // 4,), float(place.rank))
        operations = [dist.P2POp(dist.isend, outbox, after), dist.P2POp(dist.irecv, inbox, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        dist.destroy_process_group()
        return bool((inbox == before).all())

    assert on_ranks(body, size) == [True] * size


def test_a_large_send_goes_on_while_its_rank_is_elsewhere() -> None:
    """In a collective that the receiver has not joined yet, and in no call at all."""

    def body(place: Member) -> bool:
        place.join()
        if place.rank == 0:
            work = dist.isend(torch.full((LARGE,), 7.0), 1)
            dist.barrier()
            dist.isend(torch.full((LARGE,), 8.0), 1)
            time.sleep(1)  # computing; nothing of this group is called or held
            assert work is not None
            work.wait()
        else:
            for value in (7.0, 8.0):
                x = torch.zeros(LARGE)
                dist.recv(x, 0)
                assert bool((x == value).all())
                if value == 7.0:
                    dist.barrier()
        dist.barrier()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, 2) == [True, True]


def test_futures_views_and_completion() -> None:
    def body(place: Member) -> bool:
        place.join()
        peer = 1 - place.rank
        box = torch.zeros(4, 6)[:, ::2]
        receive = dist.irecv(box, peer)
        dist.barrier()
        send = dist.isend(torch.full((3, 4), float(place.rank)).t(), peer)
        assert send is not None
        assert receive is not None
        done = receive.get_future().then(lambda future: future.value()[0].sum().item())
        assert done.wait() == 12.0 * peer
        assert receive.is_completed()
        assert box.tolist() == [[float(peer)] * 3] * 4
        send.wait()
        late = dist.irecv(torch.zeros(1), peer)
        assert late is not None
        assert not late.is_completed()
        with pytest.raises(RuntimeError, match="still under way"):
            late.wait(timedelta(milliseconds=20))
        dist.barrier()
        dist.send(torch.ones(1), peer)
        assert late.wait()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, 2) == [True, True]


def test_threads_send_and_receive_beside_collectives() -> None:
    def body(place: Member) -> list[str]:
        place.join()
        wrong = []

        def ping(tag: int) -> None:
            x = torch.zeros(500)
            for turn in range(100):
                if place.rank == 0:
                    dist.send(torch.full((500,), float(turn)), 1, tag=tag)
                    dist.recv(x, 1, tag=tag)
                else:
                    dist.recv(x, 0, tag=tag)
                    dist.send(x, 0, tag=tag)
                if x[3].item() != turn:
                    wrong.append(f"tag {tag} turn {turn}: {x[3].item()}")

        threads = [threading.Thread(target=ping, args=(tag,)) for tag in (1, 2)]
        for thread in threads:
            thread.start()
        for turn in range(200):
            x = torch.full((1000,), float(turn))
            dist.all_reduce(x)
            if x[0].item() != 2 * turn:
                wrong.append(f"all_reduce {turn}")
        for thread in threads:
            thread.join()
        dist.destroy_process_group()
        return wrong

    assert on_ranks(body, 2) == [[], []]


def test_messages_of_different_size_raise_on_both_sides() -> None:
    def body(place: Member) -> str:
        place.join()
        with pytest.raises(CollectiveMismatch) as caught:
            if place.rank == 0:
                dist.send(torch.ones(LARGE), 1)
            else:
                dist.recv(torch.ones(3), 0)
        return str(caught.value)

    for text in on_ranks(body, 2):
        assert f"rank 0: send to rank 1, float32[{LARGE}] at " in text
        assert "rank 1: recv from rank 0, float32[3] at " in text
        assert "test_point_to_point.py:" in text


def test_a_message_that_fails_before_it_is_waited_for_names_its_call() -> None:
    def body(place: Member) -> str:
        place.join()
        work = dist.isend(torch.ones(LARGE), 1) if place.rank == 0 else dist.irecv(torch.ones(3), 0)
        assert work is not None
        time.sleep(0.5)  # the group's own thread finds the error meanwhile
        with pytest.raises(CollectiveMismatch) as caught:
            work.wait()
        return str(caught.value)

    for text in on_ranks(body, 2):
        assert f"rank 0: send to rank 1, float32[{LARGE}] at " in text
        assert "rank 1: recv from rank 0, float32[3] at " in text


@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_that_cannot_be_written_to_is_refused_and_later_messages_come(size: int) -> None:
    def body(member: Member) -> list[float]:
        member.join()
        if member.rank == 0:
            for _ in range(2):
                dist.send(torch.ones(3, 4), dst=1)
            return []
        if member.rank > 1:
            return []
        with pytest.raises(UnsupportedTensor, match=r"shape \[3, 4\] and stride \[0, 1\]"):
            dist.irecv(torch.zeros(4).expand(3, 4), src=0)
        into = torch.zeros(2, 3, 4)
        requests = [dist.irecv(part, src=0) for part in into]
        for request in requests:
            assert request is not None
            request.wait()
        return into.flatten().tolist()

    assert on_ranks(body, size)[1] == [1.0] * 24
