"""Sharing a dataset among ranks so that no item is dropped and none is seen twice.

torch's ``DistributedSampler`` pads each rank to the same length by repeating items, so 10 items on 4 ranks are
evaluated as 12, and it repeats one order in every epoch unless ``set_epoch`` is called. Here the order is cut
into global batches, and then each of them is divided among the ranks. So the global batch of a step depends only on its
size, not on the number of ranks that share it, and every pass over the sampler is the next epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

__all__ = ["ShardedBatchSampler"]


class ShardedBatchSampler(Sampler[list[int]]):
    """Batches of indices for one rank.

    The order of an epoch (shuffled by seed and epoch, or that of the dataset) is cut into global batches of
    ``batch_size * world_size`` items, and rank r takes the r-th part of each. The last global batch may be shorter:
    every rank then takes an equal part of it, give or take one item. If it has fewer items than there are ranks, it
    is added to the batch before, so that all ranks make the same number of steps. Only a dataset with fewer items
    than ranks leaves ranks without a batch.

    Args:
        length: the number of items in the dataset.
        batch_size: items per rank and step; the last step may have one more or some less.
        rank, world_size: the rank that gets the share, and the number of shares.
        shuffle: take a new order in every epoch, the same on every rank.
        seed: the orders follow from it; give the same on every rank.
        drop_last: leave out the items that do not fill a global batch, so that all batches have one size and
            the mean of the ranks' means is the mean over the global batch.

    Raises:
        ValueError: a number is out of range, or ``drop_last`` would leave nothing.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1 or length < 0 or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size must be at least 1 and rank in the world; got batch_size={batch_size}, "
                f"length={length}, rank={rank}, world_size={world_size}"
            )
        if drop_last and length < batch_size * world_size:
            raise ValueError(
                f"drop_last=True leaves nothing: the dataset has {length} items, one global batch "
                f"{batch_size} x {world_size} ranks = {batch_size * world_size}. Use a smaller batch_size"
            )
        self.length = length
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._bounds = _global_batch_bounds(length, batch_size * world_size, world_size, drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass epoch ``epoch``. Only needed to resume, because each pass counts on by itself."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(1 for first, last in self._bounds if self._part(first, last)[0] < self._part(first, last)[1])

    def __iter__(self) -> Iterator[list[int]]:
        # The epoch is counted when a pass begins, so that the order of a pass that is broken off is not used again.
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._batches(self._order(epoch))

    def _batches(self, order: list[int]) -> Iterator[list[int]]:
        for first, last in self._bounds:
            start, stop = self._part(first, last)
            if start < stop:
                yield order[start:stop]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        # Seed and epoch are hashed together, because with their sum the second epoch of seed 0 would be the first of
        # seed 1, and torch's CPU generator uses only 32 bits of its seed, too few to hold both side by side.
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order

    def _part(self, first: int, last: int) -> tuple[int, int]:
        items = last - first
        return (
            first + items * self.rank // self.world_size,
            first + items * (self.rank + 1) // self.world_size,
        )


def _global_batch_bounds(length: int, global_batch: int, world_size: int, drop_last: bool) -> list[tuple[int, int]]:
    full, rest = divmod(length, global_batch)
    bounds = [(i * global_batch, (i + 1) * global_batch) for i in range(full)]
    if rest and not drop_last:
        if rest < world_size and bounds:
            bounds[-1] = (bounds[-1][0], length)
        else:
            bounds.append((full * global_batch, length))
    return bounds
