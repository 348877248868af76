"""Mistakes that torch lets pass in a script's data: items that are counted twice, and every epoch in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import join_world

ITEMS = 10


def wrong(item: int) -> bool:
    """Of which items the model of these tests is mistaken: three of the ten, the last one among them."""
    return item in (0, 4, 9)


@pytest.mark.parametrize(("size", "batch_size", "backend"), [(4, 1, "phalanx"), (3, 3, "phalanx"), (4, 2, "gloo")])
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


def test_every_epoch_has_another_order_without_a_call() -> None:
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

    first, *others = on_ranks(body, 3)
    assert all(other == first for other in others)  # all ranks go through the same order
    assert all(sorted(order) == [*range(40)] for order in first)
    assert len({tuple(order) for order in first}) == 4
    assert [*range(40)] not in first
    assert on_ranks(body, 3)[0] == first  # and so does another run
