"""Every reduction of every dtype against a plain computation in rank order, whatever the sizes of a tuning file."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank
from tests.world.contract import FLOATS, draw
from tests.world.random_programs import reduced
from torch._C._distributed_c10d import PrefixStore

from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.tuning import Tuning

TIMEOUT = timedelta(seconds=60)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
INTEGERS = (*SIGNED, *UNSIGNED, torch.uint8, torch.bool)
EDGES = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-39, 5e-324, 65504.0, 3e38, 1.0, -1.0)
# Bytes of a chunk, and of what is small.
TUNINGS = [(1024, 0), (256 * 1024, 16 * 1024)]
MORE_TUNINGS = [(64, 0), (4096, 4096), (65536, 100), (1 << 20, 1 << 20)]

COMBINE: dict[str, Callable[[int, int], int]] = {
    "SUM": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MIN": min,
    "MAX": max,
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}


def share(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives. Among floats are NaNs, infinities, subnormals and zeros of both signs."""
    if dtype == torch.bool:
        return draw(rank, count, torch.int64) % 3 > 0
    if dtype in UNSIGNED:  # which know few operations in torch: drawn as signed
        return draw(rank, count, torch.int64).to(UNSIGNED[dtype]).view(dtype)
    tensor, chance = draw(rank, count, dtype), random.Random(rank)
    if dtype.is_floating_point:
        for index in range(0, count, 7):
            tensor[index] = chance.choice(EDGES)
    return tensor


def integers(name: str, shares: list[torch.Tensor]) -> list[int]:
    """By Python's own integers, wrapped to the width of the dtype at the end: sums and products wrap alike."""
    dtype = shares[0].dtype
    results, width = [], 8 * dtype.itemsize
    for column in zip(*(map(int, each.tolist()) for each in shares), strict=True):
        value = column[0]
        for other in column[1:]:
            value = COMBINE[name](value, other)
        value = int(bool(value)) if dtype == torch.bool else value & ((1 << width) - 1)
        results.append(value - (1 << width) if dtype in SIGNED and value >> (width - 1) else value)
    return results


def floats(name: str, shares: list[torch.Tensor]) -> torch.Tensor:
    """In rank order. A minimum or maximum stays what it is unless the next one is less or more, which no NaN is."""
    if name not in ("MIN", "MAX"):
        return reduced(shares, name)
    result = shares[0]
    for other in shares[1:]:
        result = torch.where(other < result if name == "MIN" else other > result, other, result)
    return result


def seen(tensor: torch.Tensor) -> object:
    """The bits of floats, with every NaN as one and the same, and zeros without their sign; else the numbers."""
    if not tensor.dtype.is_floating_point:
        return list(map(int, tensor.tolist()))
    alike = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor) + 0.0
    return alike.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("tunings", [TUNINGS, pytest.param(MORE_TUNINGS, marks=pytest.mark.long)])
@every_rank(joins=False)
def test_every_reduction_is_the_one_in_rank_order(member: Member, tunings: list[tuple[int, int]]) -> None:
    rank, size, store, wrong = member.rank, member.size, member.store(), []
    groups = {
        sizes: SharedMemoryCommunicator(
            PrefixStore(str(sizes), store), rank, size, TIMEOUT, Tuning(*sizes, stream_bytes=3000)
        )
        for sizes in tunings
    }
    for dtype in (*FLOATS, *INTEGERS):
        for name in OPS if dtype in FLOATS else (*OPS, *BITWISE):
            op = getattr(dist.ReduceOp, name).value
            for count in (0, 5, 300, 1601):
                shares = [share(each, count, dtype) for each in range(size)]
                expected: object = None
                for sizes, group in groups.items():
                    if name == "AVG" and dtype in INTEGERS:
                        assert not group.can_reduce(dtype, op)
                        continue
                    if expected is None:
                        expected = seen(floats(name, shares)) if dtype in FLOATS else integers(name, shares)
                    what = f"{name} {dtype} x {count}, chunks of {sizes[0]}"
                    # Not at the beginning of a cache line, nor of a vector.
                    tensor = torch.cat([share(0, 1, dtype), shares[rank]])[1:]
                    rooted, output = tensor.clone(), torch.empty(count, dtype=dtype)
                    # Block r of every rank is what it gives elsewhere, so rank r's result is the same.
                    group.reduce_scatter(output, [tensor.clone() for _ in range(size)], op)
                    group.all_reduce(tensor, op)
                    group.reduce(rooted, count % size, op)
                    for kind, result in (("all_reduce", tensor), ("reduce_scatter", output), ("reduce", rooted)):
                        given_back = kind == "reduce" and rank != count % size
                        if seen(result) != (seen(shares[rank]) if given_back else expected):
                            wrong.append(f"{kind} {what}")
    for group in groups.values():
        group.close()
    assert not wrong, wrong
