"""Mistakes that torch lets pass in a script's data: items that are counted twice, and every epoch in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import join_world
from torch.utils.data import DistributedSampler

SIZES = [2, 3, 4, 5]
ITEMS = 10


def wrong(item: int) -> bool:
    """Of which items the model of these tests is mistaken: three of the ten, the last one among them."""
    return item in (0, 4, 9)


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_ten_items_are_evaluated_once_each_whatever_the_number_of_ranks(
    size: int, batch_size: int, backend: str
) -> None:
    """torch's sampler repeats the first items until all ranks have equally many: on four ranks it counts twelve."""
    labels = torch.arange(ITEMS) % 2
    predicted = torch.tensor([int(label) ^ wrong(item) for item, label in enumerate(labels.tolist())])
    dataset = torch.utils.data.TensorDataset(torch.arange(ITEMS), predicted, labels)

    def body(member: Member) -> Any:
        world = join_world(member, backend)
        seen, right, own = [], 0, 0
        for items, outputs, targets in world.loader(dataset, batch_size):
            own += len(items)
            items, outputs, targets = world.gather_for_metrics((items, outputs, targets))
            seen += items.tolist()
            right += int((outputs == targets).sum())
        return seen, right, own, world.sum(own)

    for rank, (seen, right, own, counted) in enumerate(on_ranks(body, size)):
        assert seen == [*range(ITEMS)], rank
        assert (right, len(seen), counted) == (7, 10, 10)
        assert own <= -(-ITEMS // size) + batch_size


def test_torchs_own_sampler_counts_twelve() -> None:
    """The mistake that is kept from happening; if torch should mend it, the sentence above is to be changed."""
    dataset = torch.utils.data.TensorDataset(torch.arange(ITEMS))
    shares: list[DistributedSampler[Any]] = [
        DistributedSampler(dataset, num_replicas=4, rank=rank, shuffle=False) for rank in range(4)
    ]
    assert sum(len(list(share)) for share in shares) == 12


@pytest.mark.parametrize("size", SIZES)
def test_every_epoch_has_another_order_without_a_call(size: int) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(40))

    def body(member: Member) -> list[list[int]]:
        world = join_world(member)
        loader = world.loader(dataset, 2, shuffle=True, seed=3)
        epochs = []
        for _ in range(4):
            order: list[int] = []
            for (items,) in loader:
                order += world.gather_for_metrics(items).tolist()
            epochs.append(order)
        return epochs

    first, *others = on_ranks(body, size)
    assert all(other == first for other in others)  # all ranks go through the same order
    assert all(sorted(order) == [*range(40)] for order in first)
    assert len({tuple(order) for order in first}) == 4
    assert [*range(40)] not in first
    assert on_ranks(body, size)[0] == first  # and so does another run
