"""Sharing an ``IterableDataset`` among ranks and their loader's workers: batches like those of a dataset with a length.

Every process reads the whole stream and keeps its own items. Item i of the stream belongs to rank ``i % world_size``
and to the global batch ``i // (batch_size * world_size)``, and the workers of a rank take turns with the batches. So no
process needs to know the stream's length, and the batches do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from phalanx.errors import ArgumentError

__all__ = ["Located", "ShardedStream"]


class ShardedStream(IterableDataset[tuple[int, list[Any]]]):
    """One rank's batches of a stream, each with the number of items of the stream that are done after it.

    Args:
        dataset: yields the same items in the same order in every process. One with a ``set_epoch`` is told the epoch
            before each pass.
        batch_size, rank, world_size, drop_last: as for :class:`~phalanx.data.sampler.ShardedBatchSampler`, also at the
            end: every rank has as many batches as the others, except for a stream with fewer items than ranks.

    Attributes:
        epoch, start: the next pass, and how many items of the stream it leaves out; they are read and thrown away.
        position: as for :class:`~phalanx.data.sampler.ShardedBatchSampler`.
    """

    def __init__(
        self, dataset: IterableDataset[Any], batch_size: int, *, rank: int, world_size: int, drop_last: bool
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank, self.world_size = rank, world_size
        self.drop_last = drop_last
        self.epoch = self.start = 0
        self.position: tuple[int, int] | None = None

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Make the next pass epoch ``epoch``, without the first ``start`` items of the stream."""
        self.epoch, self.start, self.position = epoch, start, None

    def begin(self) -> tuple[int, int]:
        """Count a pass as begun; its epoch and its first item."""
        epoch, start, self.epoch, self.start = self.epoch, self.start, self.epoch + 1, 0
        return epoch, start

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        epoch, start = self.begin()  # in a worker this counts for the worker's own copy
        worker = get_worker_info()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return self._batches(epoch, start, *((worker.id, worker.num_workers) if worker else (0, 1)))

    def _batches(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[tuple[int, list[Any]]]:
        world, whole = self.world_size, self.batch_size * self.world_size
        count = 0
        current: list[Any] = []  # this rank's items of the global batch that is being read
        held: list[Any] | None = None  # a full batch, until it is known whether the stream's last items are added to it
        extra: list[Any] = []  # this rank's item among the first ones after the batch that is held
        for count, item in enumerate(islice(iter(self.dataset), start, None), 1):
            batch, place = divmod(count - 1, whole)
            if place == 0:
                held, current, extra = (current if batch and (batch - 1) % workers == worker else None), [], []
            if place % world == self.rank:
                if batch % workers == worker:
                    current.append(item)
                if held is not None and place < world:
                    extra = [item]
            if held is not None and place == world - 1:
                yield start + batch * whole, held
                held = None
        full, rest = divmod(count, whole)
        alone = rest >= world or not full  # the items after the last full batch are a batch of their own
        if rest and not full and start and rest < world and not self.drop_last:
            raise ArgumentError.too_few_left(rest, epoch, world)
        if held is not None:
            yield start + count - (rest if self.drop_last else 0), held if self.drop_last else held + extra
        elif current and (not rest or (alone and not self.drop_last)):
            yield start + count, current


class Located:
    """A ``collate_fn`` for the batches of :class:`ShardedStream`, which leaves their positions beside them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, located: tuple[int, list[Any]]) -> tuple[int, Any]:
        position, items = located
        return position, self.collate(items)
