"""Sharing a dataset among ranks so that no item is dropped and none is seen twice.

torch's ``DistributedSampler`` pads each rank to the same length by repeating items, so 10 items on 4 ranks are
evaluated as 12, and it repeats one order in every epoch unless ``set_epoch`` is called. Here the order is cut
into global batches, and then each of them is divided among the ranks. So the global batch of a step depends only on its
size, not on the number of ranks that share it, and every pass over the sampler is the next epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.utils.data import Sampler

from phalanx.errors import ArgumentError


def hashed_seed(*numbers: int) -> int:
    """A seed that follows from several numbers.

    They are hashed together, because with the sum of seed and epoch the second epoch of seed 0 would be the first of
    seed 1, and torch's CPU generator uses only 32 bits of its seed, too few to hold both side by side.
    """
    text = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


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

    Attributes:
        epoch: the number of the next pass, from 0.
        start: how many items the next pass leaves out at its beginning (:meth:`set_epoch`).
        position: the epoch and the items done, from the first batch that a loader hands out to the end of the pass.

    Raises:
        ArgumentError: a number is out of range, or ``drop_last`` would leave nothing.
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
        if not range(batch_size) or length < 0 or not 0 <= rank < world_size:
            raise ArgumentError(
                f"batch_size must be at least 1 and rank in the world; got batch_size={batch_size}, "
                f"length={length}, rank={rank}, world_size={world_size}"
            )
        if drop_last and length < batch_size * world_size:
            raise ArgumentError(
                f"drop_last=True leaves nothing: the dataset has {length} items, one global batch "
                f"{batch_size} x {world_size} ranks = {batch_size * world_size}. Use a smaller batch_size"
            )
        self.length = length
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = bool(shuffle)
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0
        self.position: tuple[int, int] | None = None

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Make the next pass epoch ``epoch``. Only needed to resume, because each pass counts on by itself.

        Args:
            epoch: the number of the pass; its order follows from it.
            start: how many items of the epoch's order, counted over all ranks, the pass leaves out at its beginning.

        Raises:
            ArgumentError: the items that are left are fewer than the ranks, so not every rank could take a step.
        """
        left = self.length - start
        if start and 0 < left < self.world_size and not self.drop_last:
            raise ArgumentError.too_few_left(left, epoch, self.world_size)
        self.epoch, self.start, self.position = epoch, start, None

    def __len__(self) -> int:
        return len(self.ends(0))

    def __iter__(self) -> Iterator[list[int]]:
        # A pass counts when its first batch is taken, not when the iterator is made, because torch's loader makes two
        # iterators for one pass if it has workers. So the order of a pass that is broken off is not used again.
        epoch, start, self.epoch, self.start = self.epoch, self.start, self.epoch + 1, 0
        order = self._order(epoch)
        for _, first, last in self._parts(start):
            if first < last:
                yield order[first:last]

    def ends(self, start: int) -> list[int]:
        """Count the items of the epoch, over all ranks, done after each batch of a pass that begins at ``start``."""
        return [end for end, first, last in self._parts(start) if first < last]

    def _parts(self, start: int) -> Iterator[tuple[int, int, int]]:
        for begin, end in self._bounds(start):
            items = end - begin
            first = begin + items * self.rank // self.world_size
            yield end, first, begin + items * (self.rank + 1) // self.world_size

    def _bounds(self, start: int) -> list[tuple[int, int]]:
        """Return where each global batch begins and ends in the order, from the item ``start`` on."""
        global_batch = self.batch_size * self.world_size
        full, rest = divmod(max(self.length - start, 0), global_batch)
        ends = [start + (i + 1) * global_batch for i in range(full)]
        if rest and not self.drop_last:
            if rest < self.world_size and ends:
                ends[-1] = self.length
            else:
                ends.append(self.length)
        return list(pairwise([start, *ends]))

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(hashed_seed(self.seed, epoch))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order
