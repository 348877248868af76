"""What a group does with values and objects, parts of groups, messages in batches, tensors in one piece, and turns."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks, run_ranks, values
from tests.support.worlds import every_rank, join_world

from phalanx.errors import ArgumentError, PeerFailed, RankError

SIZES = (1, 2, 3)
Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@pytest.mark.parametrize("size", SIZES)
def test_values_are_reduced_into_new_ones_of_the_same_form(size: int, backend: str) -> None:
    def body(member: Member) -> Any:
        world = join_world(member, backend)
        rank = world.rank
        tensor = torch.tensor([[rank, 1], [2, -rank]])
        # The same keys, in another order on each rank; a total that is not a fraction yet on rank 0.
        entries: list[tuple[str, Any]] = [
            ("loss", rank + 0.5),
            ("seen", 10 * rank),
            ("deep", [tensor, (rank, -rank)]),
            ("zero", rank * 0.5 or 0),
        ]
        value = dict(entries[rank % 4 :] + entries[: rank % 4])
        results = [world.sum(value), world.mean(value), world.max(value), world.min(value)]
        assert list(results[0]) == list(value)
        assert value["deep"][0] is tensor
        assert tensor.tolist() == [[rank, 1], [2, -rank]]
        pair = world.sum(Pair(rank, torch.tensor(rank == 0)))
        assert isinstance(pair, Pair)
        assert (pair.left, pair.right.item()) == (sum(range(size)), 1)
        assert world.mean(torch.tensor([rank])).item() == pytest.approx((size - 1) / 2)
        assert world.sum(2**53 if rank == 0 else 0) == 2**53
        assert world.max({}) == {}
        return [{k: [v[0].tolist(), *v[1:]] if k == "deep" else v for k, v in r.items()} for r in results]

    ranks, top = range(size), size - 1
    total = sum(ranks)
    expected: list[dict[str, Any]] = [
        {
            "loss": total + 0.5 * size,
            "seen": 10 * total,
            "deep": [[[total, size], [2 * size, -total]], (total, -total)],
            "zero": total / 2,
        },
        {
            "loss": total / size + 0.5,
            "seen": 10 * total / size,
            "deep": [[[total / size, 1.0], [2.0, -total / size]], (total / size, -total / size)],
            "zero": total / 2 / size,
        },
        {"loss": top + 0.5, "seen": 10 * top, "deep": [[[top, 1], [2, 0]], (top, 0)], "zero": top / 2},
        {"loss": 0.5, "seen": 0, "deep": [[[0, 1], [2, -top]], (0, -top)], "zero": 0},
    ]
    for results in on_ranks(body, size):
        for result, wanted in zip(results, expected, strict=True):
            assert result == {key: pytest.approx(value) if key != "deep" else value for key, value in wanted.items()}
        assert [type(result["seen"]) for result in results] == [int, float, int, int]


@pytest.mark.parametrize("size", [2, 3])
def test_values_of_different_forms_are_refused_on_every_rank_and_the_group_goes_on(size: int) -> None:
    def body(member: Member) -> list[str]:
        world = join_world(member)
        texts = []
        for value in (
            {"loss": 1.0} if world.rank else {"lost": 1.0},
            torch.ones(2 + world.rank),
            [1, 2] if world.rank else [1],
        ):
            with pytest.raises(ArgumentError) as caught:
                world.mean(value)
            texts.append(str(caught.value))
        with pytest.raises(ArgumentError, match=r"sum takes numbers, tensors, .* got a str at \['name'\]"):
            world.sum({"name": "x"})
        with pytest.raises(ArgumentError, match="gather_for_metrics: the ranks gave different values"):
            world.gather_for_metrics(torch.ones(2, 1 + world.rank))
        assert world.sum(1) == size
        return texts

    for texts in on_ranks(body, size):
        assert "rank 0: ['lost'] number\nrank 1: ['loss'] number" in texts[0]
        assert "torch.float32 [2]" in texts[1]
        assert "rank 0: nothing more\nrank 1: [1] number" in texts[2]


@pytest.mark.parametrize("size", SIZES)
def test_metrics_of_every_item_are_gathered_once_in_the_order_of_the_dataset(size: int) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(11), torch.arange(11) % 2 == 0)

    def body(member: Member) -> Any:
        world = join_world(member)
        found: list[Any] = []
        for items, even in world.loader(dataset, 2):
            joined = world.gather_for_metrics({"items": items, "even": even, "rank": world.rank, "n": len(items)})
            assert joined["rank"].tolist() == list(range(size))
            assert joined["n"].sum() == len(joined["items"])
            found += zip(joined["items"].tolist(), joined["even"].tolist(), strict=True)
        # Ranks without rows take part, and memory that is not in order is fine.
        few = world.gather_for_metrics(torch.arange(6.0).view(2, 3).T[: 3 * (world.rank == 0)])
        assert few.tolist() == [[0, 3], [1, 4], [2, 5]]
        return found

    assert on_ranks(body, size) == [[(item, item % 2 == 0) for item in range(11)]] * size


@pytest.mark.parametrize("size", SIZES)
def test_objects_are_returned(size: int) -> None:
    def body(member: Member) -> Any:
        world = join_world(member)
        last = size - 1
        own = {"rank": world.rank}
        gathered = world.gather_object(own, dst=last)
        filled: list[Any] = [None] * size
        assert world.all_gather_object(filled, own) is filled
        with pytest.raises(RankError):
            world.broadcast_object(1, src=size)
        scattered = world.scatter_object([f"for {r}" for r in range(size)] if world.rank == last else None, src=last)
        return world.broadcast_object(own, src=last), gathered, filled, world.all_gather_object(own), scattered

    every = [{"rank": rank} for rank in range(size)]
    for rank, (broadcast, gathered, filled, returned, scattered) in enumerate(on_ranks(body, size)):
        assert broadcast == {"rank": size - 1}
        assert gathered == (every if rank == size - 1 else None)
        assert filled == returned == every
        assert scattered == f"for {rank}"


@every_rank(1, joins=False)
def test_a_scatter_of_too_few_objects_is_refused(member: Member) -> None:
    with pytest.raises(ArgumentError, match="rank 0 must give 1 objects, one for each rank; got 2"):
        join_world(member).scatter_object([1, 2])


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@pytest.mark.parametrize("size", SIZES)
def test_collectives_with_one_tensor_in_and_one_out(size: int, backend: str) -> None:
    def body(member: Member) -> Any:
        world = join_world(member, backend)
        own, whole = torch.tensor([world.rank, 7]), torch.arange(2 * size) + 100 * world.rank
        results: list[Any] = []

        def run(call: Any, output: torch.Tensor, *arguments: Any, **options: Any) -> None:
            call(output, *arguments, **options)
            again = torch.full_like(output, -1)
            work = call(again, *arguments, **options, async_op=True)
            work.wait()
            assert torch.equal(output, again)
            results.append(output.tolist())

        run(world.all_gather_single, torch.empty(2 * size, dtype=torch.long), own)
        run(world.reduce_scatter_single, torch.empty(2, dtype=torch.long), whole)
        run(world.all_to_all_single, torch.empty(2 * size, dtype=torch.long), whole)
        run(world.scatter_single, torch.empty(1, 2, dtype=torch.long), whole if world.rank == 0 else None, src=0)
        output = torch.zeros(size, 2, dtype=torch.long) if world.rank == 0 else None
        world.gather_single(output, own, dst=0)
        results.append(output.tolist() if output is not None else None)
        if size > 1:
            counts = [1] * (size - 1) + [size + 1]
            uneven = torch.empty(counts[world.rank] * size, dtype=torch.long)
            world.all_to_all_single(uneven, whole, [counts[world.rank]] * size, counts)
            results.append(uneven.tolist())
        return results

    for rank, results in enumerate(on_ranks(body, size)):
        everyone = [x for r in range(size) for x in (r, 7)]
        assert results[0] == everyone
        assert results[1] == [sum(100 * r + 2 * rank + i for r in range(size)) for i in (0, 1)]
        assert results[2] == [100 * r + 2 * rank + i for r in range(size) for i in (0, 1)]
        assert results[3] == [[2 * rank, 2 * rank + 1]]
        assert results[4] == ([[r, 7] for r in range(size)] if rank == 0 else None)
        if size > 1:
            part = range(rank, rank + 1) if rank < size - 1 else range(size - 1, 2 * size)
            assert results[5] == [100 * r + i for r in range(size) for i in part]


@pytest.mark.parametrize("size", [2, 3])
def test_a_batch_of_messages_goes_round_in_any_order(size: int) -> None:
    def body(member: Member) -> list[Any]:
        world = join_world(member)
        ring = world.subgroup(reversed(range(size)))
        assert ring is not None
        right, left = (ring.rank + 1) % size, (ring.rank - 1) % size
        received = [torch.empty(1, dtype=torch.long), torch.empty(3, dtype=torch.long)]
        messages = [
            (dist.irecv, received[0], left),
            (dist.irecv, received[1], left, 5),
            (dist.isend, torch.full((3,), ring.rank), right, 5),
            (dist.isend, torch.tensor([10 + ring.rank]), right),
        ]
        for work in ring.batch_isend_irecv(messages[:: -1 if world.rank else 1]):
            work.wait()
        assert ring.batch_isend_irecv([]) == []
        return [ring.rank, *(tensor.tolist() for tensor in received)]

    for rank, first, second in on_ranks(body, size):
        left = (rank - 1) % size
        assert (first, second) == ([10 + left], [left] * 3)


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_groups_are_divided_again_by_their_members_alone(size: int, backend: str) -> None:
    def body(member: Member) -> Any:
        world = join_world(member, backend)
        seen = []
        parts = world.split(color=world.rank % 2, key=-world.rank)
        assert parts is not None
        for _ in range(2):  # the second has the members of the first, and is another group
            # Only the even ranks divide theirs, so the ranks have made different numbers of groups from here on.
            part = parts.split(color=None if parts.rank == 0 else 0) if world.rank % 2 == 0 else parts
            if part is not None:
                assert part.sum(1) == part.size
                seen.append(list(part.ranks))
                own = part.subgroup([part.size - 1])
                assert (own is not None) == (part.rank == part.size - 1)
                if own is not None:
                    assert own.all_gather_object(world.rank) == [world.rank]
        everyone = world.subgroup(range(size))
        assert everyone is not None
        with pytest.raises(RankError, match=f"rank {parts.size} is not in the group"):
            parts.subgroup([parts.size])
        return seen, everyone.sum(world.rank)

    for rank, (seen, total) in enumerate(on_ranks(body, size)):
        alike = [r for r in reversed(range(size)) if r % 2 == rank % 2]
        expected = alike if rank % 2 else alike[1:]
        assert seen == ([expected] * 2 if rank in expected else [])
        assert total == sum(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_rank_0_goes_first(size: int) -> None:
    def body(member: Member) -> list[bool]:
        world = join_world(member)
        seen = []
        for number in range(3):
            file = member.folder / f"made-{number}"
            with world.main_first():
                seen.append(file.exists())
                if world.rank == 0:
                    file.touch()
        return seen

    assert on_ranks(body, size) == [[rank > 0] * 3 for rank in range(size)]


def test_the_others_learn_that_rank_0_has_failed_in_its_turn() -> None:
    def body(member: Member) -> str:
        world = join_world(member)
        try:
            with world.main_first():
                assert world.rank == 0, "the others do not run the block"
                raise ValueError("no such file")
        except (ValueError, PeerFailed) as error:
            assert world.sum(1) == 3
            return f"{type(error).__name__}: {error}"
        return ""

    told = values(run_ranks(body, 3))
    assert told[0] == "ValueError: no such file"
    assert told[1] == told[2] == "PeerFailed: rank 0 of the group failed in main_first(): ValueError: no such file"


@every_rank(2, joins=False)
def test_groups_wait_as_long_as_their_world(member: Member) -> None:
    """The timeout of ``phalanx.init(timeout_s=...)`` holds for its parts too."""
    world = join_world(member)
    for group in (world, world.subgroup([0, 1]), world.split(0)):
        assert group is not None
        part = group.subgroup([0, 1])
        assert part is not None
        for each in (group, part):
            engine: Any = each.process_group._get_backend(torch.device("cpu"))
            assert engine.options._timeout.total_seconds() == 60


@every_rank()
def test_methods_of_a_group_work_in_compiled_functions(member: Member) -> None:
    world = join_world(member)

    def around(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + 1
        print(end="")  # a graph ends here
        world.all_reduce(y)
        world.broadcast(y, src=0)
        world.all_reduce(y, async_op=True).wait()
        world.barrier()
        return y * 3

    plain = around(torch.arange(4.0) + member.rank)
    compiled = torch.compile(around, backend="eager")(torch.arange(4.0) + member.rank)
    assert compiled.tolist() == plain.tolist()
