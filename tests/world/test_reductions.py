"""Every reduction of every dtype against a plain computation in rank order, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.support.contract import bits, draw
from tests.support.ranks import Member
from tests.support.worlds import every_rank

from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.tuning import Tuning

TIMEOUT = timedelta(seconds=60)
TUNING = Tuning(chunk_bytes=1024, stream_bytes=3000)
OPS = {name: getattr(dist.ReduceOp, name).value for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")}
BITWISE = {name: getattr(dist.ReduceOp, name).value for name in ("BAND", "BOR", "BXOR")}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
)


def given(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return draw(rank, count, torch.int64) % 3 > 0
    if dtype.is_floating_point:
        return draw(rank, count, dtype)
    # The unsigned types wider than a byte know few operations in torch: draw as signed, reinterpret.
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(dtype, dtype)
    return draw(rank, count, torch.int64).to(signed).view(dtype) if signed is not dtype else draw(rank, count, dtype)


def number(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor.tolist()]


def expected_integers(name: str, size: int, count: int, dtype: torch.dtype) -> list[int]:
    """Python's own integers, wrapped to the width of the dtype at the end (sums and products wrap alike)."""
    columns = list(zip(*(number(given(rank, count, dtype)) for rank in range(size)), strict=True))
    width = 8 * torch.empty(0, dtype=dtype).element_size()
    signed = dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    results = []
    for column in columns:
        value = column[0]
        for other in column[1:]:
            combine: dict[str, Callable[[int, int], int]] = {
                "SUM": lambda a, b: a + b,
                "PRODUCT": lambda a, b: a * b,
                "MIN": min,
                "MAX": max,
                "BAND": lambda a, b: a & b,
                "BOR": lambda a, b: a | b,
                "BXOR": lambda a, b: a ^ b,
            }
            value = combine[name](value, other)
        if dtype == torch.bool:
            value = int(bool(value))
        else:
            value &= (1 << width) - 1
            if signed and value >> (width - 1):
                value -= 1 << width
        results.append(value)
    return results


def expected_floats(name: str, size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    values = [given(rank, count, dtype).to(wide) for rank in range(size)]
    result = values[0]
    for other in values[1:]:
        if name in ("SUM", "AVG"):
            result = result + other
        elif name == "PRODUCT":
            result = result * other
        else:
            result = torch.minimum(result, other) if name == "MIN" else torch.maximum(result, other)
    return (result / size if name == "AVG" else result).to(dtype)


@every_rank(joins=False)
def test_all_reduce_reduce_and_reduce_scatter(member: Member) -> None:
    communicator = SharedMemoryCommunicator(member.store(), member.rank, member.size, TIMEOUT, TUNING)
    wrong = []
    for dtype in FLOATS + INTEGERS:
        names = OPS if dtype in FLOATS else {**OPS, **BITWISE}
        for name, op in names.items():
            if not communicator.can_reduce(dtype, op):
                if not (name == "AVG" and dtype in INTEGERS):
                    wrong.append(f"cannot {name} {dtype}")
                continue
            for count in (0, 5, 300, 1601):
                if dtype in FLOATS:
                    expected = bits(expected_floats(name, member.size, count, dtype))
                    seen = bits
                else:
                    expected = expected_integers(name, member.size, count, dtype)
                    seen = number
                tensor = given(member.rank, count, dtype)
                communicator.all_reduce(tensor, op)
                if seen(tensor) != expected:
                    wrong.append(f"all_reduce {name} {dtype} x {count}")
                root = count % member.size
                tensor = given(member.rank, count, dtype)
                communicator.reduce(tensor, root, op)
                if seen(tensor) != (expected if member.rank == root else seen(given(member.rank, count, dtype))):
                    wrong.append(f"reduce {name} {dtype} x {count}")
                # Block r of every rank is what it gave above, so rank r's result is the one above.
                output = torch.empty(count, dtype=dtype)
                communicator.reduce_scatter(output, [given(member.rank, count, dtype)] * member.size, op)
                if seen(output) != expected:
                    wrong.append(f"reduce_scatter {name} {dtype} x {count}")
    communicator.close()
    assert not wrong, wrong
