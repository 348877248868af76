"""Messages in worlds that span hosts: the tests of messages on one host, and what only several hosts can get wrong."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import ISLANDS, divide_by
from tests.support.ranks import Member, on_ranks
from tests.world import test_message_handles as handles
from tests.world import test_order as order
from tests.world import test_point_to_point as point_to_point

from phalanx.errors import CollectiveTimeout, PeerLost
from phalanx.transports.hosts import communicator as hosts


@pytest.fixture(autouse=True, params=ISLANDS)
def over_hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    divide_by(monkeypatch, ISLANDS[request.param])
    return str(request.param)


# The tests of one host, in such worlds.
test_pairs = point_to_point.test_every_pair_exchanges_every_size_both_ways_at_once
test_tags = point_to_point.test_tags_find_their_receives_in_any_order
test_any_source = point_to_point.test_receiving_from_anyone_tells_from_whom
test_batches = point_to_point.test_batches
test_elsewhere = point_to_point.test_a_large_send_goes_on_while_its_rank_is_elsewhere
test_futures = point_to_point.test_futures_views_and_completion
test_threads = point_to_point.test_threads_send_and_receive_beside_collectives
test_sizes_that_differ = point_to_point.test_messages_of_different_size_raise_on_both_sides
test_failing_unwaited = point_to_point.test_a_message_that_fails_before_it_is_waited_for_names_its_call
test_failed = handles.test_a_failed_message_stays_failed_and_writes_nothing
test_told = handles.test_every_thread_that_waits_for_a_failed_message_is_told
test_refused = handles.test_a_rank_outside_the_group_is_refused
test_oneself = handles.test_messages_to_oneself
test_destroyed = handles.test_a_destroyed_group_refuses_and_gives_up_its_messages
test_destroying = handles.test_destroying_a_group_ends_the_waits_of_other_threads
test_orders = order.test_a_thread_for_each_group


def until_exists(*paths: Path) -> None:
    """Wait for files of other ranks."""
    while not all(path.exists() for path in paths):
        time.sleep(0.005)


def met_group(place: Member, timeout_s: float) -> Any:
    """A group of all ranks, which have met: the timeout counts from then on."""
    group: Any = dist.new_group()
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=timeout_s))
    place.meet("in the group")  # one that is still in the barrier would hear of the first timeout there
    return group


COUNTS = (0, 1, 1000, 20_000, 100_000)  # float32: in a frame, in a stage, straight into the tensor


@pytest.mark.parametrize(
    ("size", "seed"),
    [(3, 1), (4, 2), (5, 3), *(pytest.param(4, seed, marks=pytest.mark.long) for seed in range(10, 30))],
)
def test_receives_from_any_rank_and_from_one_lose_none_and_double_none(size: int, seed: int) -> None:
    """Every rank sends to every rank, in bursts, and receives in another order, some of it from anyone.

    A message says from whom it is and its number among those of its sender, receiver and tag.
    """

    def body(place: Member) -> list[str]:
        place.join()
        plan, mine = random.Random(seed), random.Random(f"{seed} {place.rank}")
        # How many messages go from one rank to another with each tag, and their size, which receives must know.
        sizes = [plan.choice(COUNTS) for _ in range(4)]
        counts = {
            (source, to, tag): plan.randrange(6) for source in range(size) for to in range(size) for tag in range(4)
        }
        sends = [(to, tag) for (source, to, tag), count in counts.items() if source == place.rank for _ in range(count)]
        mine.shuffle(sends)
        receives: list[tuple[int | None, int]] = []
        for tag in range(4):
            from_each = {source: counts[source, place.rank, tag] for source in range(size)}
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
                works.append(dist.isend(torch.full((sizes[tag] + 2,), 1000.0 * place.rank + number), to, tag=tag))
            else:
                source, tag = receives.pop()
                box = torch.full((sizes[tag] + 2,), -1.0)
                work = dist.irecv(box, source, tag=tag)
                boxes.append((work, box, source, tag))
                if mine.random() < 0.1:
                    assert work is not None
                    work.is_completed()
        mine.shuffle(works)
        for work in works:
            assert work is not None
            work.wait()
        wrong, expected = [], dict.fromkeys(((source, tag) for source in range(size) for tag in range(4)), 0)
        for work, box, source, tag in boxes:
            assert work is not None
            work.wait()
            came = work._source_rank()
            number = expected[came, tag]
            expected[came, tag] += 1
            if source not in (None, came) or not bool((box == 1000.0 * came + number).all()):
                wrong.append(f"tag {tag} of {source}: {box[:2].tolist()} from {came}, number {number}")
        wrong += [
            f"{count} of {source} with tag {tag}"
            for (source, tag), count in expected.items()
            if count != counts[source, place.rank, tag]
        ]
        dist.barrier()
        dist.destroy_process_group()
        return wrong

    assert on_ranks(body, size) == [[]] * size


@pytest.mark.parametrize("anyone", [False, True])
def test_a_large_message_that_another_one_has_passed_is_received(anyone: bool) -> None:
    """Its receive is posted while it is being received aside, and its sender sends nothing more."""

    def body(place: Member) -> list[float]:
        place.join(timeout_s=300)
        got: list[float] = []
        for turn in range(3):
            big, small = torch.full((8_000_000,), 1.0 + turn), torch.full((1,), 2.0)
            if place.rank == 0:
                for work in (dist.isend(big, 1, tag=1), dist.isend(small, 1, tag=2)):
                    assert work is not None
                    work.wait()
            else:
                dist.recv(small.zero_(), 0, tag=2)
                dist.recv(big.zero_(), None if anyone else 0, tag=1)
                got += [small.item(), big.min().item(), big.max().item()]
        dist.barrier()
        dist.destroy_process_group()
        return got

    assert on_ranks(body, 2, timeout_s=100)[1] == [2.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(("count", "ahead"), [(25_000, 5), (25_000, 30), (1000, 8), (1000, 50), (100_000, 8)])
def test_a_send_is_received_by_a_rank_that_has_sent_first(count: int, ahead: int) -> None:
    """One rank starts more sends than it has credit for, and then receives; the others send to it, and then receive."""

    def body(place: Member) -> list[float]:
        place.join()
        others = range(1, place.size)
        got: list[float] = []
        if place.rank == 0:
            works = [
                dist.isend(torch.full((count,), float(number)), rank, tag=1)
                for number in range(ahead)
                for rank in others
            ]
            for rank in others:
                box = torch.zeros(300_000)
                dist.recv(box, rank, tag=2)
                got += [box.min().item(), box.max().item()]
            for work in works:
                assert work is not None
                work.wait()
        else:
            dist.send(torch.full((300_000,), float(place.rank)), 0, tag=2)
            for _ in range(ahead):
                box = torch.full((count,), -1.0)
                dist.recv(box, 0, tag=1)
                got.append(box.mean().item())
        dist.barrier()
        dist.destroy_process_group()
        return got

    expected = [float(number) for number in range(ahead)]
    assert on_ranks(body, 3, timeout_s=200) == [[1.0, 1.0, 2.0, 2.0], expected, expected]


def test_a_rank_that_leaves_before_it_has_had_a_message_is_not_waited_for() -> None:
    def body(place: Member) -> tuple[int, str]:
        place.join()
        group = dist.new_group([0, 1], timeout=timedelta(seconds=600))
        told = -1, ""
        if place.rank == 0:
            with pytest.raises(PeerLost, match="left the group in order") as caught:
                dist.recv(torch.empty(4), 1, group=group)
            told = caught.value.group_rank, str(caught.value)
        dist.destroy_process_group(group)
        dist.barrier()
        dist.destroy_process_group()
        return told

    rank, text = on_ranks(body, 2)[0]
    assert rank == 1
    assert "recv from rank 1, float32[4] at " in text


def test_a_message_inside_a_host_waits_as_long_as_the_timeout_says(
    over_hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective inside a host waits longer than between hosts, so that it hears what its leader has found."""
    monkeypatch.setattr(hosts, "_LEADERS_GRACE", timedelta(seconds=200))
    late = 1 if over_hosts == "halves" else 2  # beside rank 0

    def body(place: Member) -> str:
        place.join()
        group, told = met_group(place, timeout_s=1), place.folder / "told"
        text = ""
        if place.rank == 0:
            with pytest.raises(CollectiveTimeout) as caught:
                dist.recv(torch.empty(4), late, group=group)
            text = str(caught.value)
            told.touch()
        until_exists(told)
        dist.destroy_process_group(group)
        dist.destroy_process_group()
        return text

    text = on_ranks(body, 3, timeout_s=100)[0]
    assert f"rank {late} of the group" in text
    assert "did not come within 1 s while rank 0 was in recv from rank" in text


@pytest.mark.parametrize("count", [4, 30_000])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("sender", [0, 1])
def test_what_a_rank_sends_before_it_destroys_its_group_arrives(sender: int, opened: bool, count: int) -> None:
    """However late it is received. Whether the two have talked before decides who holds it meanwhile."""

    def body(place: Member) -> list[list[float]]:
        place.join()
        group, peer, got = dist.new_group(), 1 - place.rank, []
        if opened:
            greeting = dist.irecv(torch.empty(1), peer, group=group)
            dist.send(torch.empty(1), peer, group=group)
            assert greeting is not None
            greeting.wait()
        dist.barrier()
        if place.rank == sender:
            for value in (10.0, 20.0):
                dist.send(torch.full((count,), value), peer, group=group)
        else:
            time.sleep(2.5)  # longer than a rank that leaves waits before it goes on
            for _ in range(2):
                box = torch.empty(count)
                dist.recv(box, sender, group=group)
                got.append(box[[0, -1]].tolist())
            with pytest.raises(PeerLost, match="left the group in order"):
                dist.recv(box, sender, group=group)
        dist.destroy_process_group(group)
        dist.barrier()
        dist.destroy_process_group()
        return got

    outcomes = on_ranks(body, 2)
    assert outcomes[1 - sender] == [[10.0, 10.0], [20.0, 20.0]]


@pytest.mark.parametrize("how", ["message", "collective"])
def test_a_timeout_that_torch_sets_later_holds(how: str) -> None:
    def body(place: Member) -> bool:
        place.join(timeout_s=100)
        group = dist.new_group()
        dist.barrier(group=group)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
        place.meet("set")
        if place.rank == 1:
            with pytest.raises(CollectiveTimeout, match="within 1 s"):
                dist.recv(torch.ones(1), 0, group=group) if how == "message" else dist.barrier(group=group)
        dist.barrier()
        dist.destroy_process_group(group)
        dist.destroy_process_group()
        return True

    assert on_ranks(body, 2, timeout_s=60) == [True, True]


SENDS_AND_ENDS = """
    import sys, time
    from datetime import timedelta
    import torch, torch.distributed as dist
    from tests.support.islands import pretend_host

    rank, sender, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    pretend_host(rank)
    store = dist.FileStore(path, 2)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    dist.barrier()
    box = torch.full((30_000,), 7.0)
    if rank == sender:
        dist.send(box, 1 - rank)
        if sys.argv[4].startswith("destroys"):  # the last group, so nothing of this process answers others any more
            dist.destroy_process_group()
    else:
        time.sleep(2.5)
        box.zero_()
        dist.recv(box, sender)
        print(box.eq(7).all().item())
"""


# The last case several times: which rank dials the other is decided by the ports that the kernel gives.
@pytest.mark.parametrize("then", ["ends", "destroys", "destroys again", "destroys once more"])
@pytest.mark.parametrize("sender", [0, 1])
def test_what_a_rank_sends_before_its_script_ends_arrives(
    sender: int, then: str, over_hosts: str, tmp_path: Path
) -> None:
    if over_hosts != "halves":
        return  # with two ranks, both are the same
    script = dedent(SENDS_AND_ENDS)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(sender), str(tmp_path / "store"), then],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[1 - sender] == ("True\n", "")
    assert said[sender] == ("", "")


def test_a_message_that_is_late_is_named_by_every_rank_that_waits(over_hosts: str) -> None:
    late, other = (2, 1) if over_hosts == "halves" else (1, 2)  # on the other host; beside rank 0

    def body(place: Member) -> tuple[int, str]:
        place.join()
        group = met_group(place, timeout_s=1 if place.rank == 0 else 600)
        told = -1, ""
        if place.rank == late:
            time.sleep(3)
        else:
            with pytest.raises(CollectiveTimeout) as caught:
                dist.recv(torch.empty(4 + place.rank), late, group=group)
            told = caught.value.group_rank, str(caught.value)
        dist.barrier()
        dist.destroy_process_group(group)
        dist.destroy_process_group()
        return told

    outcomes = on_ranks(body, 3)
    for own in (0, other):
        rank, text = outcomes[own]
        assert rank == late, text
        assert f"did not come within 1 s while rank 0 was in recv from rank {late}, float32[4] at " in text
        assert own == 0 or f"Rank {other} was in recv from rank {late}, float32[{4 + other}] at " in text
        assert "{" not in text
