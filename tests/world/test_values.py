"""What a group does with values and objects, parts of groups, messages in batches, tensors in one piece, and turns."""

from __future__ import annotations

import collections
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo  # before the ranks are forked: it takes each of them seconds
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank, join_world
from torch.distributed.distributed_c10d import _coalescing_manager

from phalanx.c10d.torch_versions import function
from phalanx.errors import ArgumentError, PeerFailed, RankError

BACKENDS = ["phalanx", "gloo"]
Pair = collections.namedtuple("Pair", "left right")


@every_rank(backend=BACKENDS)
def test_values_are_reduced_into_new_ones_of_the_same_form(member: Member) -> None:
    world = join_world(member)
    rank = world.rank
    tensor = torch.tensor([[rank, 1], [2, -rank]])
    # The same keys, in another order on each rank; a total that is not a fraction yet on rank 0.
    loss, zero = rank + 0.5, rank * 0.5 or 0
    entries = [("loss", loss), ("seen", 10 * rank), ("deep", [tensor, (rank, -rank)]), ("zero", zero)]
    value: dict[str, Any] = dict(entries[rank:] + entries[:rank])
    results = [world.sum(value), world.mean(value), world.max(value), world.min(value)]
    assert [list(result) for result in results] == [list(value)] * 4
    assert value["deep"][0] is tensor
    assert tensor.tolist() == [[rank, 1], [2, -rank]]
    assert [(one["loss"], one["seen"], one["zero"]) for one in results] == [
        (4.5, 30, 1.5),
        (1.5, 10, 0.5),
        (2.5, 20, 1),
        (0.5, 0, 0),
    ]
    assert [[one["deep"][0].tolist(), one["deep"][1]] for one in results] == [
        [[[3, 3], [6, -3]], (3, -3)],
        [[[1, 1], [2, -1]], (1, -1)],
        [[[2, 1], [2, 0]], (2, 0)],
        [[[0, 1], [2, -2]], (0, -2)],
    ]
    assert [type(result["seen"]) for result in results] == [int, float, int, int]
    pair = world.sum(Pair(rank, torch.tensor(rank == 0)))
    assert isinstance(pair, Pair)
    assert (pair.left, pair.right.item()) == (3, 1)
    assert world.mean(torch.tensor([rank])).item() == 1.0
    assert world.sum(2**53 if rank == 0 else 0) == 2**53
    assert world.max({}) == {}


@every_rank()
def test_values_of_different_forms_are_refused_on_every_rank(member: Member) -> None:
    world = join_world(member)
    cases: list[tuple[Any, str]] = [
        ({"loss": 1.0} if world.rank else {"lost": 1.0}, "rank 0: ['lost'] number\nrank 1: ['loss'] number"),
        (torch.ones(2 + world.rank), "torch.float32 [2]"),
        ([1, 2] if world.rank else [1], "rank 0: nothing more\nrank 1: [1] number"),
    ]
    for value, told in cases:
        with pytest.raises(ArgumentError) as caught:
            world.mean(value)
        assert told in str(caught.value)
    with pytest.raises(ArgumentError, match=r"sum takes numbers, tensors, .* got a str at \['name'\]"):
        world.sum({"name": "x"})
    with pytest.raises(ArgumentError, match="gather_for_metrics: the ranks gave different values"):
        world.gather_for_metrics(torch.ones(2, 1 + world.rank))
    assert world.sum(1) == member.size


@every_rank()
def test_metrics_are_gathered_once_in_the_order_of_the_dataset(member: Member) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(11), torch.arange(11) % 2 == 0)
    world = join_world(member)
    found: list[Any] = []
    for items, even in world.loader(dataset, 2):
        joined = world.gather_for_metrics({"items": items, "even": even, "rank": world.rank, "n": len(items)})
        assert joined["rank"].tolist() == list(range(member.size))
        assert joined["n"].sum() == len(joined["items"])
        found += zip(joined["items"].tolist(), joined["even"].tolist(), strict=True)
    assert found == [(item, item % 2 == 0) for item in range(11)]
    # Ranks without rows take part, and memory that is not in order is fine.
    few = world.gather_for_metrics(torch.arange(6.0).view(2, 3).T[: 3 * (world.rank == 0)])
    assert few.tolist() == [[0, 3], [1, 4], [2, 5]]


@every_rank()
def test_objects_are_returned(member: Member) -> None:
    world = join_world(member)
    last, own = member.size - 1, {"rank": world.rank}
    every = [{"rank": rank} for rank in range(member.size)]
    assert world.gather_object(own, dst=last) == (every if world.rank == last else None)
    filled: list[Any] = [None] * member.size
    assert world.all_gather_object(filled, own) is filled
    assert filled == world.all_gather_object(own) == every
    with pytest.raises(RankError):
        world.broadcast_object(1, src=member.size)
    given = [f"for {rank}" for rank in range(member.size)] if world.rank == last else None
    assert world.scatter_object(given, src=last) == f"for {world.rank}"
    assert world.broadcast_object(own, src=last) == {"rank": last}
    with pytest.raises(ArgumentError, match=f"must give {member.size} objects, one for each rank; got 5"):
        world.scatter_object([1] * 5, src=world.rank)


@every_rank(backend=BACKENDS)
def test_collectives_with_one_tensor_in_and_one_out(member: Member) -> None:
    warnings.simplefilter("error", FutureWarning)  # torch has new names for some of them from 2.13 on
    world, ranks = join_world(member), range(3)
    rank = world.rank
    own, whole = torch.tensor([rank, 7]), torch.arange(6) + 100 * rank
    mine = [2 * rank, 2 * rank + 1]

    def run(call: Any, expected: list[int], *arguments: Any, **options: Any) -> None:
        output, again = torch.empty(len(expected), dtype=torch.long), torch.empty(len(expected), dtype=torch.long)
        call(output, *arguments, **options)
        call(again, *arguments, **options, async_op=True).wait()
        assert output.tolist() == again.tolist() == expected

    run(world.all_gather_single, [0, 7, 1, 7, 2, 7], own)
    run(world.reduce_scatter_single, [300 + 3 * each for each in mine], whole)
    run(world.all_to_all_single, [100 * r + each for r in ranks for each in mine], whole)
    run(world.scatter_single, mine, whole if rank == 0 else None, src=0)
    counts = [1, 1, 4]
    part = range(rank, rank + 1) if rank < 2 else range(2, 6)
    uneven = [100 * r + each for r in ranks for each in part]
    run(world.all_to_all_single, uneven, whole, [counts[rank]] * 3, counts)
    output = torch.zeros(3, 2, dtype=torch.long) if rank == 0 else None
    world.gather_single(output, own, dst=0)
    assert output is None or output.tolist() == [[0, 7], [1, 7], [2, 7]]


@every_rank()
def test_a_batch_of_messages_goes_round_in_any_order(member: Member) -> None:
    world = join_world(member)
    ring = world.subgroup(reversed(range(member.size)))
    assert ring is not None
    right, left = (ring.rank + 1) % member.size, (ring.rank - 1) % member.size
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
    assert [tensor.tolist() for tensor in received] == [[10 + left], [left] * 3]


@every_rank(5, backend=BACKENDS)
def test_groups_are_divided_again_by_their_members_alone(member: Member) -> None:
    world = join_world(member)
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
    assert seen == {0: [[2, 0]] * 2, 2: [[2, 0]] * 2, 4: []}.get(world.rank, [[3, 1]] * 2)
    everyone = world.subgroup(range(5))
    assert everyone is not None
    with pytest.raises(RankError, match=f"rank {parts.size} is not in the group"):
        parts.subgroup([parts.size])
    assert everyone.sum(world.rank) == 10


@every_rank()
def test_rank_0_goes_first(member: Member) -> None:
    """And the others learn that it has failed in its turn."""
    world = join_world(member)
    file = member.folder / "made"
    with world.main_first():
        assert file.exists() == (world.rank > 0)
        if world.rank == 0:
            file.touch()
    with pytest.raises((ValueError, PeerFailed)) as caught, world.main_first():
        assert world.rank == 0, "the others do not run the block"
        raise ValueError("no such file")
    told = f"{type(caught.value).__name__}: {caught.value}"
    failed = "PeerFailed: rank 0 of the group failed in main_first(): ValueError: no such file"
    assert told == (failed if world.rank else "ValueError: no such file")
    assert world.sum(1) == 3


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
        work = world.all_reduce(y, async_op=True)
        if work is not None:
            work.wait()
        world.barrier()
        return y * 3

    plain = around(torch.arange(4.0) + member.rank)
    compiled = torch.compile(around, backend="eager")(torch.arange(4.0) + member.rank)
    assert compiled.tolist() == plain.tolist()


@every_rank()
def test_coalesced_collectives_are_all_done(member: Member) -> None:
    """Gloo refuses them, so that nothing can be compared with it."""
    tensors = [torch.full((k,), 1.0) for k in (1, 5, 3000)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    outputs, parts = [torch.empty(6), torch.empty(12)], [torch.ones(2) * member.rank, torch.ones(4) * member.rank]
    with _coalescing_manager():
        for output, part in zip(outputs, parts, strict=True):
            function("all_gather_single")(output, part)
    assert all(bool((tensor == 3).all()) for tensor in tensors)
    assert outputs[0].tolist() == [0, 0, 1, 1, 2, 2]
    assert outputs[1].tolist() == [0] * 4 + [1] * 4 + [2] * 4
