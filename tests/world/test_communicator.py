"""The contract every communicator keeps, at several world sizes (3 and 5 catch power-of-two mistakes).

Chunks are set small, so that a few kilobytes go through many of them. Expected values are plain sums and
copies computed here, in rank order.
"""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from torch._C._distributed_c10d import PrefixStore

from phalanx.transports.contract import Communicator
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.tuning import Tuning
from phalanx.transports.solo import SoloCommunicator

SIZES = (1, 2, 3, 4, 5, 8)
CHUNKS = (64, 4096, 256 * 1024)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
SUM = dist.ReduceOp.SUM.value
# None, one, less than a cache line, about one and many chunks, and a last chunk with a single element.
COUNTS = (0, 1, 3, 15, 64, 1023, 1024, 1025, 5000, 70001)


def connect(place: Member, chunk_bytes: int, timeout_s: float = 60) -> Communicator:
    if place.size == 1:
        return SoloCommunicator()
    timeout = timedelta(seconds=timeout_s)
    # Small enough that outputs lie on both sides of every switch.
    tuning = Tuning(chunk_bytes=chunk_bytes, stream_bytes=3000)
    return SharedMemoryCommunicator(place.store(), place.rank, place.size, timeout, tuning)


def draw(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What rank ``rank`` contributes: values whose sums need rounding, so that their order shows."""
    generator = torch.Generator().manual_seed(1000 * rank + salt)
    if dtype.is_floating_point:
        return (torch.randn(count, generator=generator) * 10.0 ** (rank % 3)).to(dtype)
    return torch.randint(-(2**30), 2**30, (count,), generator=generator).to(dtype)


def rank_order_sum(size: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The sum in rank order, 16-bit floats in 32 bits and rounded once."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = draw(0, count, dtype, salt).to(wide)
    for rank in range(1, size):
        total = total + draw(rank, count, dtype, salt).to(wide)
    return total.to(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_is_the_rank_order_sum_bit_for_bit(size: int, chunk_bytes: int) -> None:
    def body(place: Member) -> list[str]:
        communicator = connect(place, chunk_bytes)
        wrong = []
        for dtype in DTYPES:
            for count in COUNTS:
                if count * 8 > 500 * chunk_bytes:
                    continue
                tensor = draw(place.rank, count, dtype, count)
                communicator.all_reduce(tensor, SUM)
                if bits(tensor) != bits(rank_order_sum(place.size, count, dtype, count)):
                    wrong.append(f"{dtype} x {count}")
        communicator.close()
        return wrong

    assert on_ranks(body, size) == [[]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_half_precision_sums_round_like_torch_at_the_edges(size: int) -> None:
    """Subnormals, ties, overflow to infinity, infinities and NaN."""
    edges = [
        0.0,
        -0.0,
        6e-8,
        5.96e-8,
        6.1e-5,
        1.0,
        1.0009765625,
        2048.0,
        65504.0,
        3.0e38,
        float("inf"),
        float("nan"),
    ]

    def body(place: Member) -> bool:
        communicator = connect(place, 4096)
        same = True
        for dtype in (torch.float16, torch.bfloat16):
            inputs = [torch.tensor([e * (1 + r) for e in edges] * 3).to(dtype) for r in range(place.size)]
            expected = inputs[0].float()
            for other in inputs[1:]:
                expected = expected + other.float()
            tensor = inputs[place.rank].clone()
            communicator.all_reduce(tensor, SUM)
            same = same and torch.allclose(tensor, expected.to(dtype), rtol=0, atol=0, equal_nan=True)
        communicator.close()
        return same

    assert on_ranks(body, size) == [True] * size


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("size", SIZES)
def test_broadcast_copies_the_roots_bytes(size: int, chunk_bytes: int) -> None:
    def body(place: Member) -> list[str]:
        communicator = connect(place, chunk_bytes)
        wrong = []
        for root in range(place.size):
            for count in COUNTS:
                if count > 500 * chunk_bytes:
                    continue
                tensor = draw(place.rank, count, torch.float32, root).to(torch.uint8)
                communicator.broadcast(tensor, root)
                if not torch.equal(tensor, draw(root, count, torch.float32, root).to(torch.uint8)):
                    wrong.append(f"root {root} x {count}")
        communicator.close()
        return wrong

    assert on_ranks(body, size) == [[]] * size


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_collects_every_ranks_bytes(size: int, chunk_bytes: int) -> None:
    def body(place: Member) -> list[str]:
        communicator = connect(place, chunk_bytes)
        wrong = []
        for count in COUNTS:
            if count * 4 > 500 * chunk_bytes:
                continue
            outputs = [torch.full((count,), -1.0) for _ in range(place.size)]
            communicator.all_gather(outputs, draw(place.rank, count, torch.float32))
            for rank, output in enumerate(outputs):
                if bits(output) != bits(draw(rank, count, torch.float32)):
                    wrong.append(f"rank {rank} x {count}")
        communicator.close()
        return wrong

    assert on_ranks(body, size) == [[]] * size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_no_rank_leaves_a_barrier_before_the_last_has_entered(size: int) -> None:
    def body(place: Member) -> list[tuple[float, float]]:
        communicator = connect(place, 4096)
        times = []
        for turn in range(3 * place.size):
            if turn % place.size == place.rank:
                time.sleep(0.02)  # the late rank, which the others must wait for
            entered = time.monotonic()
            communicator.barrier()
            times.append((entered, time.monotonic()))
        communicator.close()
        return times

    for turn in zip(*on_ranks(body, size), strict=True):
        assert max(entered for entered, _ in turn) <= min(left for _, left in turn)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_mixed_operations_in_a_random_order_stay_in_step(size: int) -> None:
    """Thousands of operations of every kind and many sizes; slots are reused by different kinds."""

    def body(place: Member) -> str:
        plan = random.Random(7)  # the same plan on every rank
        delays = random.Random(place.rank)
        communicator = connect(place, 256)
        for turn in range(1500):
            kind = plan.choice(("all_reduce", "broadcast", "all_gather", "barrier"))
            count, root = plan.choice((0, 1, 7, 64, 200, 900, 5000)), plan.randrange(place.size)
            if delays.random() < 0.02:
                time.sleep(0.001)
            tensor = draw(place.rank, count, torch.float32, turn)
            if kind == "all_reduce":
                communicator.all_reduce(tensor, SUM)
                same = bits(tensor) == bits(rank_order_sum(place.size, count, torch.float32, turn))
            elif kind == "broadcast":
                communicator.broadcast(tensor, root)
                same = bits(tensor) == bits(draw(root, count, torch.float32, turn))
            elif kind == "all_gather":
                outputs = [torch.empty(count) for _ in range(place.size)]
                communicator.all_gather(outputs, tensor)
                expected = [draw(rank, count, torch.float32, turn) for rank in range(place.size)]
                same = [bits(output) for output in outputs] == [bits(e) for e in expected]
            else:
                communicator.barrier()
                same = True
            if not same:
                return f"turn {turn}: {kind} x {count}, root {root}"
        communicator.close()
        return ""

    assert on_ranks(body, size) == [""] * size


def test_a_hundred_communicators_leave_no_descriptor_or_mapping() -> None:
    def body(place: Member) -> tuple[int, int]:
        def held() -> tuple[int, int]:
            with open("/proc/self/maps") as maps:
                return len(os.listdir("/proc/self/fd")), sum("memfd" in line for line in maps)

        timeout = timedelta(seconds=60)
        before = held()
        for turn in range(100):
            store = PrefixStore(str(turn), place.store())
            communicator = SharedMemoryCommunicator(store, place.rank, place.size, timeout, Tuning(4096))
            communicator.barrier()
            communicator.close()
            communicator.close()
        after = held()
        return after[0] - before[0], after[1] - before[1]

    assert on_ranks(body, 2) == [(0, 0), (0, 0)]
