"""No item is dropped, none is seen twice, and the global batch does not depend on the number of ranks."""

from __future__ import annotations

import pytest

from phalanx.data.sampler import ShardedBatchSampler

WORLDS = (1, 3, 8)


def samplers(length: int, batch_size: int, world: int, **options: bool | int) -> list[ShardedBatchSampler]:
    return [
        ShardedBatchSampler(length, batch_size, rank=rank, world_size=world, **options)  # type: ignore[arg-type]
        for rank in range(world)
    ]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_item_comes_once_in_steps_of_about_the_same_size(world: int, shuffle: bool) -> None:
    for length in (0, 1, 3, 8, 10, 47, 48, 49, 100):
        sharded = samplers(length, 4, world, shuffle=shuffle)
        passes = [list(sampler) for sampler in sharded]
        assert sorted(index for batches in passes for batch in batches for index in batch) == list(range(length))
        assert [len(sampler) for sampler in sharded] == [len(batches) for batches in passes]
        if length < world:
            continue
        for step in zip(*passes, strict=True):
            sizes = [len(batch) for batch in step]
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= 5


def test_the_global_batch_is_the_same_for_any_number_of_ranks() -> None:
    def global_batches(world: int) -> list[list[int]]:
        sharded = samplers(100, 24 // world, world, shuffle=True, seed=9, drop_last=True)
        return [[i for batch in step for i in batch] for step in zip(*sharded, strict=True)]

    assert global_batches(1) == global_batches(2) == global_batches(3) == global_batches(4) == global_batches(8)
    assert [len(batch) for batch in global_batches(1)] == [24] * 4


def test_each_pass_has_a_new_order_and_set_epoch_returns_to_one() -> None:
    sampler = ShardedBatchSampler(50, 50, rank=0, world_size=1, shuffle=True, seed=1)
    first, second, third = (next(iter(sampler)) for _ in range(3))
    assert len({tuple(order) for order in (first, second, third)}) == 3
    sampler.set_epoch(1)
    assert next(iter(sampler)) == second
    other = ShardedBatchSampler(50, 50, rank=0, world_size=1, shuffle=True, seed=2)
    assert next(iter(other)) not in (first, second, third)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"rank": 2}, "rank=2, world_size=2"),
        ({"batch_size": 6, "drop_last": True}, "leaves nothing: the dataset has 10 items, one global batch 6 x 2"),
    ],
)
def test_impossible_shares_are_refused(options: dict[str, int], words: str) -> None:
    arguments: dict[str, int] = {"batch_size": 2, "rank": 0, "world_size": 2, **options}
    with pytest.raises(ValueError, match=words):
        ShardedBatchSampler(10, **arguments)  # type: ignore[arg-type]
