"""The loader: epochs count once whatever the workers, a pass goes on where its state was taken, streams are shared."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from phalanx.data.loader import ShardedLoader, sharded_loader
from phalanx.errors import ArgumentError

# Without workers; with workers of each pass's own; with workers that live on.
WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1},
    {"num_workers": 2, "prefetch_factor": 3},
    {"num_workers": 2, "persistent_workers": True},
]
ITEMS = 23


@pytest.fixture(autouse=True)
def _queues_closed() -> Iterator[None]:
    """torch ends a loader's workers at once, but the thread that fed their queue a little later."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(60)


class Stream(IterableDataset[int]):
    """The numbers up to ``length``."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def loader_of(rank: int = 0, world: int = 1, batch_size: int = 4, length: int = ITEMS, **options: Any) -> ShardedLoader:
    dataset: Dataset[Any] = TensorDataset(torch.arange(length))
    return sharded_loader(dataset, batch_size, rank=rank, world_size=world, **options)


def stream_of(rank: int = 0, world: int = 1, batch_size: int = 4, length: int = ITEMS, **options: Any) -> ShardedLoader:
    return sharded_loader(Stream(length), batch_size, rank=rank, world_size=world, **options)


def numbers(batch: Any) -> list[int]:
    found: list[int] = (batch[0] if isinstance(batch, list) else batch).tolist()
    return found


def passes(loader: ShardedLoader, count: int) -> list[list[list[int]]]:
    return [[numbers(batch) for batch in loader] for _ in range(count)]


def in_workers(*quick: int) -> pytest.MarkDecorator:
    """Some of these in ``make test``, the others in ``make long``."""
    each = [pytest.param(one, marks=[] if at in quick else [pytest.mark.long]) for at, one in enumerate(WORKERS)]
    return pytest.mark.parametrize("workers", each, ids=str)


@in_workers(3)
def test_workers_change_neither_the_epochs_nor_their_orders(workers: dict[str, Any]) -> None:
    loader = loader_of(shuffle=True, seed=3, **workers)
    expected = loader_of(shuffle=True, seed=3)
    assert passes(loader, 2) == passes(expected, 2)
    assert loader.epoch == expected.epoch == 2
    loader.batch_sampler.set_epoch(1)  # type: ignore[union-attr]
    expected.set_epoch(1)
    assert passes(loader, 1) == passes(expected, 1)


@in_workers(0, 2)
@pytest.mark.parametrize("make", [loader_of, stream_of])
def test_pass_goes_on_at_the_batch_where_its_state_was_taken(make: Any, workers: dict[str, Any]) -> None:
    options = {"shuffle": True, "seed": 5} if make is loader_of else {}
    whole = passes(make(**options), 3)
    loader = make(**options, **workers)
    states, seen = [loader.state_dict()], []
    for _ in range(2):
        for batch in loader:
            seen.append(numbers(batch))
            states.append(copy.deepcopy(loader.state_dict()))  # workers have prepared more than was handed out
    assert seen == whole[0] + whole[1]
    per_pass = len(whole[0])
    for done in (1, per_pass) if workers else (0, 1, per_pass, per_pass + 2):
        resumed = make(**options, **workers)
        resumed.load_state_dict(states[done])
        rest = [numbers(batch) for batch in resumed]
        assert rest == (whole[done // per_pass][done % per_pass :] if done != per_pass else [])
        epoch = done // per_pass + (done != per_pass)
        assert [numbers(batch) for batch in resumed] == whole[epoch]


@pytest.mark.parametrize("make", [loader_of, pytest.param(stream_of, marks=pytest.mark.long)])
def test_loader_in_use_takes_a_state_too(make: Any) -> None:
    loader = make(num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    first = [numbers(next(iterator)) for _ in range(2)]
    iterator.close()
    state = loader.state_dict()
    rest = [numbers(batch) for batch in itertools.islice(loader, 1)]
    loader.load_state_dict(state)
    assert first + [numbers(batch) for batch in loader] == passes(make(), 1)[0]
    assert rest == passes(make(), 1)[0][:1]


@pytest.mark.parametrize("make", [loader_of, stream_of])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_epoch_goes_on_at_another_world_size_without_loss_or_repeat(make: Any, before: int, after: int) -> None:
    loaders = [make(rank, before, batch_size=6 // before, length=50) for rank in range(before)]
    seen, states = [], []
    for loader in loaders:
        seen += [i for batch in itertools.islice(loader, 3) for i in numbers(batch)]
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    resumed = [make(rank, after, batch_size=6 // after, length=50) for rank in range(after)]
    for loader in resumed:
        loader.load_state_dict(states[0])
    rest = [[numbers(batch) for batch in loader] for loader in resumed]
    assert sorted(seen + [i for batches in rest for batch in batches for i in batch]) == list(range(50))
    # The global batch has as many items as before, so it has the same ones.
    assert sorted(i for batches in rest for i in batches[0]) == list(range(18, 24))
    assert len({len(batches) for batches in rest}) == 1


def test_broken_off_pass_is_repeated_only_if_its_state_is_loaded() -> None:
    whole = passes(loader_of(shuffle=True), 2)
    loader = loader_of(shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    assert [numbers(batch) for batch in loader] == whole[1]
    loader.load_state_dict(state)
    assert [numbers(batch) for batch in loader] == whole[0][1:]


def test_rest_with_fewer_items_than_ranks_is_refused() -> None:
    loader = loader_of(batch_size=10, length=12)
    next(iter(loader))
    resumed = loader_of(0, 3, batch_size=3, length=12)
    with pytest.raises(ArgumentError, match="2 items are left of epoch 0"):
        resumed.load_state_dict(
            {**loader.state_dict(), "items": 10}
        )  # as after a run whose last batch was of two items


def test_state_of_another_order_is_refused() -> None:
    state = loader_of(shuffle=True, seed=0).state_dict()
    for change in ({"seed": 1}, {"shuffle": False}, {"length": 24}):
        other = loader_of(**{"shuffle": True, "seed": 0, **change})
        with pytest.raises(ArgumentError, match="the state is that of a loader with length=23, shuffle=True, seed=0, "):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("length", "world", "workers"),
    [
        *((length, 3, 0) for length in (0, 2, 11, 12, 13, 24, 31)),
        *(pytest.param(length, world, 0, marks=pytest.mark.long) for world in (1, 2, 5) for length in (0, 2, 13, 25)),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((13, 3, 2), (11, 2, 1), (15, 1, 2))),
    ],
)
def test_stream_is_shared_out_like_a_dataset_with_a_length(length: int, world: int, workers: int) -> None:
    streams = [passes(stream_of(rank, world, 2, length, num_workers=workers), 1)[0] for rank in range(world)]
    lists = [passes(loader_of(rank, world, 2, length), 1)[0] for rank in range(world)]
    if length >= world:
        assert len({len(batches) for batches in streams}) == 1
    for step, expected in zip(itertools.zip_longest(*streams), itertools.zip_longest(*lists), strict=True):
        sizes = [len(batch or ()) for batch in step]
        assert max(sizes) - min(sizes) <= 1
        assert sorted(i for batch in step for i in batch or ()) == sorted(i for batch in expected for i in batch or ())
    dropped = [passes(stream_of(rank, world, 2, length, drop_last=True), 1)[0] for rank in range(world)]
    assert sorted(i for batches in dropped for batch in batches for i in batch) == list(
        range(length - length % (2 * world))
    )


def test_stream_that_shuffles_itself_is_told_the_epoch() -> None:
    class Shuffled(Stream):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.epoch * 10, self.epoch * 10 + 4))

    for workers in (WORKERS[0], {"num_workers": 1, "persistent_workers": True}):
        loader = sharded_loader(Shuffled(4), 2, rank=1, world_size=2, **workers)
        assert passes(loader, 2) == [[[1, 3]], [[11, 13]]]
        loader.set_epoch(5)
        assert passes(loader, 1) == [[[51, 53]]]


class Drawn(Dataset[tuple[float, float, float]]):
    """What each library draws for an item."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        assert get_worker_info() is not None
        return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_random_numbers_of_workers_follow_from_seed_epoch_rank_and_worker() -> None:
    def drawn(rank: int, epoch: int = 0, seed: int = 0) -> list[tuple[float, ...]]:
        loader = sharded_loader(Drawn(), 1, rank=rank, world_size=2, seed=seed, num_workers=2, collate_fn=tuple)
        loader.set_epoch(epoch)
        return [batch[0] for batch in loader]

    torch.manual_seed(1)
    first = drawn(0)
    torch.manual_seed(2)  # and not from the rank's own generator
    assert drawn(0) == first
    different = [*first, *drawn(1), *drawn(0, epoch=1), *drawn(0, seed=1)]
    for library in zip(*different, strict=True):
        assert len(set(library)) == 16


def test_rest_of_a_pass_goes_on_with_the_random_numbers_it_began_with() -> None:
    def drawn(loader: ShardedLoader, batches: int) -> list[float]:
        return [torch.rand(()).item() for _, _ in zip(range(batches), loader, strict=False)]

    torch.manual_seed(1)
    loader = loader_of()
    expected = drawn(loader, 3)
    torch.manual_seed(1)
    loader = loader_of()
    first = drawn(loader, 1)
    state, numbers = loader.state_dict(), torch.get_rng_state()
    other = loader_of()
    other.load_state_dict(state)
    torch.set_rng_state(numbers)
    assert [*first, *drawn(other, 2)] == expected


def test_loader_refuses_what_it_cannot_share() -> None:
    class NoLength(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(TypeError, match="NoLength has no length"):
        sharded_loader(NoLength(), 1, rank=0, world_size=1)
    with pytest.raises(ValueError, match="Stream is a stream and cannot be shuffled"):
        stream_of(shuffle=True)
    with pytest.raises(ArgumentError, match="in_order=False"):
        loader_of(num_workers=1, in_order=False).state_dict()
    with pytest.raises(TypeError, match="batch_sampler: the sharded loader brings its own"):
        sharded_loader(torch.utils.data.TensorDataset(torch.ones(1)), 1, rank=0, world_size=1, batch_sampler=[])
