"""Several groups at once: whoever keeps one order within each group is never locked out, whatever the order between."""

from __future__ import annotations

import random
import threading

import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank

TURNS = 40


def overlapping_groups(size: int) -> list[tuple[dist.ProcessGroup, list[int]]]:
    """Four groups that share ranks: the world twice, all but the last rank, all but the first."""
    members = [list(range(size)), list(range(size)), list(range(size - 1)), list(range(1, size))]
    groups = [dist.new_group(ranks) for ranks in members]
    return [(group, ranks) for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks]


@every_rank(5)
def test_overlapping_groups_with_operations_in_different_orders(member: Member) -> None:
    """Each rank interleaves the groups' operations in an order of its own and waits for them in another."""
    groups = overlapping_groups(member.size)
    mine = random.Random(member.rank)
    for turn in range(TURNS):
        started: list[tuple[dist.Work, torch.Tensor, float]] = []
        queues = [[(group, ranks, index) for index in range(3)] for group, ranks in groups]
        while any(queues):
            queue = mine.choice([queue for queue in queues if queue])
            group, ranks, index = queue.pop(0)
            count = (1, 700, 70_000)[(turn + index) % 3]
            tensor = torch.full((count,), float(member.rank + turn + index))
            if index == 1:
                root = ranks[turn % len(ranks)]
                work = dist.broadcast(tensor, root, group=group, async_op=True)
                expected = float(root + turn + index)
            else:
                work = dist.all_reduce(tensor, group=group, async_op=True)
                expected = float(sum(rank + turn + index for rank in ranks))
            assert work is not None
            started.append((work, tensor, expected))
        assert len(started) == 3 * len(groups)
        mine.shuffle(started)
        for work, tensor, expected in started:
            work.wait()
            assert bool((tensor == expected).all())


@every_rank(3, ["one host", "two hosts, in turn"])
def test_a_thread_for_each_group(member: Member) -> None:
    """Blocking calls, a thread and a pace of its own for each of four groups, beside messages of the world."""
    groups = [dist.new_group() for _ in range(4)]
    wrong: list[str] = []

    def work(number: int, group: dist.ProcessGroup) -> None:
        try:
            for turn in range(TURNS * (number + 1)):
                tensor = torch.full(((1, 3_000, 100_000)[turn % 3],), float(member.rank + number))
                dist.all_reduce(tensor, group=group)
                expected = float(sum(rank + number for rank in range(member.size)))
                if not bool((tensor == expected).all()):
                    wrong.append(f"group {number}, turn {turn}")
        except BaseException as error:
            wrong.append(f"group {number}: {error!r}")

    threads = [threading.Thread(target=work, args=item) for item in enumerate(groups)]
    for thread in threads:
        thread.start()
    for turn in range(TURNS):
        sent = dist.isend(torch.tensor([turn]), (member.rank + 1) % member.size)
        received = torch.empty(1, dtype=torch.int64)
        dist.recv(received, (member.rank - 1) % member.size)
        assert sent is not None
        sent.wait()
        assert received.item() == turn
    for thread in threads:
        thread.join()
    assert not wrong, wrong
