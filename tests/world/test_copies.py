"""Gather, scatter and all-to-all: every byte at its place, for every dtype that torch has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.world.test_communicator import bits, connect, draw

SIZES = [2, 3, 5, 8]
COUNTS = (0, 1, 17, 1000, 30001)


@pytest.mark.parametrize("chunk_bytes", [512, 65536])
@pytest.mark.parametrize("size", SIZES)
def test_gather_and_scatter(size: int, chunk_bytes: int) -> None:
    def body(place: Member) -> list[str]:
        communicator = connect(place, chunk_bytes)
        wrong = []
        for root in range(place.size):
            for count in COUNTS:
                mine = draw(place.rank, count, torch.float32, root)
                everyone = [draw(rank, count, torch.float32, root) for rank in range(place.size)]
                outputs = [torch.zeros(count) for _ in range(place.size)] if place.rank == root else None
                communicator.gather(outputs, mine, root)
                if outputs is not None and [bits(o) for o in outputs] != [bits(e) for e in everyone]:
                    wrong.append(f"gather to {root} x {count}")
                output = torch.zeros(count)
                communicator.scatter(output, everyone if place.rank == root else None, root)
                if bits(output) != bits(mine):
                    wrong.append(f"scatter from {root} x {count}")
        communicator.close()
        return wrong

    assert on_ranks(body, size) == [[]] * size


@pytest.mark.parametrize("chunk_bytes", [512, 65536])
@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_with_a_size_for_every_pair(size: int, chunk_bytes: int) -> None:
    def body(place: Member) -> list[str]:
        communicator = connect(place, chunk_bytes)
        wrong = []
        for scale in (0, 1, 40, 3000):
            # Some pairs exchange nothing, one exchanges much more than the others.
            def count(source: int, to: int, scale: int = scale) -> int:
                return scale * ((3 * source + 5 * to) % 4) + (10000 if scale and (source, to) == (0, 1) else 0)

            inputs = [draw(100 * place.rank + to, count(place.rank, to), torch.int64) for to in range(place.size)]
            outputs = [torch.zeros(count(source, place.rank), dtype=torch.int64) for source in range(place.size)]
            communicator.all_to_all(outputs, inputs)
            for source, output in enumerate(outputs):
                if not torch.equal(output, draw(100 * source + place.rank, len(output), torch.int64)):
                    wrong.append(f"from {source}, scale {scale}")
        communicator.close()
        return wrong

    assert on_ranks(body, size) == [[]] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_single_tensor_forms_with_even_and_uneven_splits(size: int) -> None:
    def body(place: Member) -> bool:
        place.join()
        rank, n = place.rank, place.size
        source = torch.arange(n * 2 * 3).view(n * 2, 3) + 1000 * rank
        output = torch.zeros_like(source)
        dist.all_to_all_single(output, source)
        assert torch.equal(
            output,
            torch.cat([(torch.arange(n * 6).view(n * 2, 3) + 1000 * r)[2 * rank : 2 * rank + 2] for r in range(n)]),
        )
        # Rank s sends s + t + 1 rows to rank t.
        send, receive = [rank + t + 1 for t in range(n)], [s + rank + 1 for s in range(n)]
        source = torch.full((sum(send), 2), float(rank))
        output = torch.zeros(sum(receive), 2)
        dist.all_to_all_single(output, source, receive, send)
        assert output[:, 0].tolist() == [float(s) for s in range(n) for _ in range(s + rank + 1)]
        with pytest.raises(ValueError, match="do not add up"):
            dist.all_to_all_single(output, source, receive, [*send[:-1], send[-1] + 1])
        part = torch.zeros(2)
        dist.reduce_scatter_single(part, torch.arange(2.0 * n))
        assert part.tolist() == [n * (2.0 * rank), n * (2.0 * rank + 1)]
        dist.barrier()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


def test_every_dtype_of_torch_is_copied() -> None:
    everything = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    dtypes = [d for d in sorted(everything, key=str) if not any(part in str(d) for part in ("bits", "x2", ".q"))]

    def body(place: Member) -> list[str]:
        place.join()
        wrong = []
        for dtype in dtypes:
            try:
                zeros = torch.zeros(64, dtype=torch.uint8)
                mine = (zeros + place.rank + 1).view(dtype)
            except RuntimeError:
                continue  # types below a byte have no plain storage
            if mine.dtype.is_complex or dtype == torch.bool:
                mine = torch.zeros(4, dtype=dtype)
            dist.broadcast(mine, src=1)
            outputs = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(outputs, mine)
            if any(bits(output) != bits(mine) for output in outputs):
                wrong.append(str(dtype))
        dist.destroy_process_group()
        return wrong

    assert on_ranks(body, 2) == [[], []]


def test_lists_that_cannot_be_right_are_refused_before_anything_moves() -> None:
    def body(place: Member) -> bool:
        place.join()
        x = torch.ones(4)
        with pytest.raises(ValueError, match="list has 1 tensors, but the group has 2 ranks"):
            dist.all_gather([x], x)
        with pytest.raises(ValueError, match="entry 1 of the list"):
            dist.all_gather([x.clone(), torch.ones(3)], x)
        with pytest.raises(ValueError, match="is not 2 times"):
            dist.all_gather_single(torch.ones(7), x)
        with pytest.raises(ValueError, match="is not 2 times"):
            dist.reduce_scatter_single(torch.ones(4), torch.ones(9))
        dist.barrier()  # the group is whole
        dist.destroy_process_group()
        return True

    assert on_ranks(body, 2) == [True, True]
