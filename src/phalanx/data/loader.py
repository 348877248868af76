"""A ``DataLoader`` over one rank's share of a dataset, which resumes where it stood."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from phalanx.data.sampler import ShardedBatchSampler, hashed_seed
from phalanx.data.stream import Located, ShardedStream
from phalanx.errors import ArgumentError
from phalanx.wrong_arguments import explained

__all__ = ["ShardedLoader", "sharded_loader"]


class ShardedLoader(DataLoader[Any]):
    """One rank's batches, pass after pass; :func:`sharded_loader` makes it.

    Each pass is the next epoch. It counts from its first batch on: a pass that is broken off is not repeated, unless
    its state is loaded.
    """

    _workers_seed: int | None = None  # None if there are no workers, or the caller gave a generator

    @property
    def _share(self) -> ShardedBatchSampler | ShardedStream:
        share: Any = self.dataset if self.batch_sampler is None else self.batch_sampler
        return share  # type: ignore[no-any-return]

    @property
    def epoch(self) -> int:
        """The number of the next pass, from 0."""
        return self._share.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass epoch ``epoch``, from its beginning."""
        self._begin_at(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the training loop is: which batches it has been given, not which ones workers have prepared.

        It is the same on every rank. Taken inside the loop over the loader, it counts the batch that the loop has just
        been given as done. Taken after a loop that was broken off, it has the rest of that pass. Taken after a whole
        pass, it is the beginning of the next.
        """
        if not self.in_order:
            raise ArgumentError("a loader with in_order=False cannot say which batches are done; leave that option out")
        epoch, items = self._share.position or (self._share.epoch, self._share.start)
        return {"epoch": epoch, "items": items, **self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken: the next pass has the batches that were left of its pass.

        The number of ranks and ``batch_size`` may differ. The items that are left are then shared out anew: each is
        still seen exactly once, and if ranks x batch_size is the same, so are the global batches.

        Raises:
            ArgumentError: the dataset's length, the seed, or ``shuffle`` differ, so the order would be another one; or
                fewer items are left than there are ranks.
        """
        was = {name: state.get(name) for name in self._order()}
        if was != self._order():
            raise ArgumentError(
                f"the state is that of a loader with {_in_words(was)}, but this one has {_in_words(self._order())}, so "
                f"its epochs have another order. Make the loader as it was, or begin an epoch with set_epoch()"
            )
        self._begin_at(state["epoch"], state["items"])

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        share = self._share
        epoch, start = share.epoch, share.start
        if self._workers_seed is not None:
            self.generator.manual_seed(hashed_seed(self._workers_seed, epoch, start))
        drawn = torch.get_rng_state()
        batches: Iterator[Any] = super().__iter__()
        if start:
            # torch's loader draws a number whenever a pass begins, and this pass drew it when it began.
            torch.set_rng_state(drawn)
        located = batches
        if isinstance(share, ShardedBatchSampler):
            located = zip(share.ends(start), batches, strict=True)
        elif self.num_workers:
            share.begin()  # the workers have copies of the share, and count for themselves
        for items, batch in located:
            share.position = (epoch, items)
            yield batch
        share.position = None

    def _begin_at(self, epoch: int, items: int) -> None:
        self._share.set_epoch(epoch, items)
        # Workers that live on hold a copy of a stream, which would count on from its own last pass.
        self._iterator = None

    def _order(self) -> dict[str, Any]:
        """All that the order of an epoch follows from, except for the epoch."""
        share = self._share
        if isinstance(share, ShardedStream):
            return {"length": None, "shuffle": False, "seed": None}
        return {"length": share.length, "shuffle": share.shuffle, "seed": share.seed if share.shuffle else None}


def sharded_loader(
    dataset: Any,
    batch_size: int,
    *,
    rank: int,
    world_size: int,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> ShardedLoader:
    """Make the loader of one rank. All ranks together see every item exactly once per pass.

    Make the same number of passes over it on every rank: each pass over a shuffled loader is the next epoch, and ranks
    in different epochs shuffle differently. To resume, save :meth:`ShardedLoader.state_dict` and load it.

    Every rank makes equally many steps, and batches differ by one item at most. Only a dataset with fewer items than
    ranks leaves ranks without a batch.

    Args:
        dataset: has a length and items by index; the same on every rank. Or an ``IterableDataset`` that yields the same
            items in the same order on every rank and in every worker: each of them reads all of it and keeps its part.
            A dataset that shares itself out, by ``get_worker_info()`` or by rank, belongs in torch's ``DataLoader``.
        batch_size: items per rank and step.
        rank, world_size: the rank that gets the share, and the number of shares.
        shuffle, seed, drop_last: see :class:`~phalanx.data.sampler.ShardedBatchSampler`. A stream is not shuffled.
        options: passed to ``DataLoader`` (``num_workers``, ``collate_fn``, ``pin_memory``, …). Random numbers that
            workers draw (Python's, numpy's, torch's) follow from seed, epoch, rank and worker, unless a ``generator``
            is given.

    Raises:
        ArgumentError: the dataset has no length or no items by index and is not an ``IterableDataset``; an option that
            the sharding decides (``sampler``, ``batch_sampler``) was given; a number is out of range, or a stream was
            to be shuffled.
    """
    if taken := {"sampler", "batch_sampler"} & options.keys():
        raise ArgumentError(f"{', '.join(sorted(taken))}: the sharded loader brings its own; use torch's DataLoader")
    own_seed = bool(options.get("num_workers")) and options.get("generator") is None
    if own_seed:
        options["generator"] = torch.Generator()
    share: ShardedBatchSampler | ShardedStream
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ArgumentError(f"{type(dataset).__name__} is a stream and cannot be shuffled here; shuffle inside it")
        share = ShardedStream(dataset, batch_size, rank=rank, world_size=world_size, drop_last=drop_last)
        options["collate_fn"] = Located(options.get("collate_fn") or default_collate)
        loader = explained(partial(ShardedLoader, share, batch_size=None))(**options)
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        share = ShardedBatchSampler(
            len(dataset),
            batch_size,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        loader = explained(partial(ShardedLoader, dataset, batch_sampler=share))(**options)
    else:
        raise ArgumentError(
            f"{type(dataset).__name__} has no length, or no items by index. Give a dataset with both, such as the "
            f".dataset of a DataLoader, or an IterableDataset"
        )
    loader._workers_seed = hashed_seed(seed, rank) if own_seed else None
    return loader


def _in_words(order: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in order.items())
