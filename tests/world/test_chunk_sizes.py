"""The sizes of a tuning file change how bytes travel, never what arrives."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.world.test_reductions import BITWISE, FLOATS, INTEGERS, OPS, given

from phalanx.transports.shm.tuning import Tuning, tuning_in_force

TUNINGS = ((64, 0), (1024, 0), (4096, 4096), (65536, 100), (256 * 1024, 16 * 1024), (1 << 20, 1 << 20))
EDGES = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-39, 5e-324, 65504.0, 3e38, 1.0, -1.0)


def awkward(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose sums depend on their order, with NaNs, infinities, subnormals and zeros of both signs among them."""
    tensor = given(rank, count, dtype)
    if dtype.is_floating_point:
        generator = random.Random(rank)
        for index in range(0, count, 7):
            tensor[index] = generator.choice(EDGES)
    return tensor


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes, with every NaN as one and the same."""
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long)])
def test_every_reduction_has_the_same_bits_whatever_the_tuning(size: int) -> None:
    def body(member: Member) -> tuple[int, list[str]]:
        seen: dict[str, bytes] = {}
        wrong = []
        for chunk_bytes, small_bytes in TUNINGS:
            with tuning_in_force(Tuning(chunk_bytes, small_bytes)):
                member.join(name=f"store-{chunk_bytes}-{small_bytes}")
            for dtype in FLOATS + INTEGERS:
                for name in [*OPS, *([] if dtype in FLOATS else BITWISE)]:
                    if name == "AVG" and dtype in INTEGERS:
                        continue
                    op = getattr(dist.ReduceOp, name)
                    for count in (1, 13, 1031):
                        # Not at the beginning of a cache line, nor of a vector.
                        tensor = torch.cat([given(0, 1, dtype), awkward(member.rank, count, dtype)])[1:]
                        rooted = tensor.clone()
                        output = torch.empty(count, dtype=dtype)
                        blocks = [tensor.clone() for _ in range(member.size)]
                        dist.reduce_scatter(output, blocks, op=op)
                        dist.reduce(rooted, dst=0, op=op)
                        dist.all_reduce(tensor, op=op)
                        results = {"all_reduce": tensor, "reduce_scatter": output}
                        if member.rank == 0:
                            results["reduce"] = rooted
                        for kind, result in results.items():
                            # All three combine in rank order, so they also agree with each other.
                            if seen.setdefault(f"{name} {dtype} x {count}", bits(result)) != bits(result):
                                wrong.append(f"{kind} {name} {dtype} x {count}, chunks of {chunk_bytes}")
            dist.destroy_process_group()
        return hash(tuple(sorted(seen.items()))), wrong

    outcomes = on_ranks(body, size)
    assert [wrong for _, wrong in outcomes] == [[]] * size
    assert len({digest for digest, _ in outcomes}) == 1  # every rank has the same bits
