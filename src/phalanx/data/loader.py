"""A ``DataLoader`` over one rank's share of a dataset."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx.data.sampler import ShardedBatchSampler

__all__ = ["sharded_loader"]


def sharded_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    rank: int,
    world_size: int,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> DataLoader[Any]:
    """Make the loader of one rank. All ranks together see every item exactly once per pass.

    Make the same number of passes over it on every rank: each pass over a shuffled loader is the next epoch, and ranks
    in different epochs shuffle differently. To resume, call ``loader.batch_sampler.set_epoch(epoch)``.

    Args:
        dataset: has a length and items by index; the same on every rank.
        batch_size: items per rank and step.
        rank, world_size: the rank that gets the share, and the number of shares.
        shuffle, seed, drop_last: see :class:`~phalanx.data.sampler.ShardedBatchSampler`.
        options: passed to ``DataLoader`` (``num_workers``, ``collate_fn``, ``pin_memory``, …).

    Raises:
        TypeError: the dataset has no length (an ``IterableDataset``), or an option that the sharding decides
            (``sampler``, ``batch_sampler``) was given.
    """
    taken = {"sampler", "batch_sampler"} & options.keys()
    if taken:
        raise TypeError(f"{', '.join(sorted(taken))}: the sharded loader brings its own; use torch's DataLoader")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has no length, so it cannot be shared out by index. Let the dataset "
            f"itself yield only items i with i % world_size == rank, and use torch's DataLoader"
        )
    sampler = ShardedBatchSampler(
        len(dataset),
        batch_size,
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
    return DataLoader(dataset, batch_sampler=sampler, **options)
