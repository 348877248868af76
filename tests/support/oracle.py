"""The results that a program must give, computed plainly: every rank's part is known, so nothing is communicated.

Reductions are bit for bit those of the ranks in order, 16-bit floats being added in 32 bits and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from tests.support.programs import Program, Step

__all__ = ["FILL", "Buffer", "buffers", "reduced"]

LONGEST_BYTES = 2_100_000
OFFSETS = 4099  # a prime: the parts of the ranks begin at different places of one table
FILL = 77  # the value that memory has beforehand where a result belongs, and around it


@cache
def _table(dtype: torch.dtype, exact: bool) -> torch.Tensor:
    """Random values that every part is cut from: drawing anew for each would take longer than communicating."""
    generator = torch.Generator().manual_seed(7)
    length = LONGEST_BYTES // dtype.itemsize + OFFSETS
    if dtype == torch.bool:
        return torch.randint(0, 3, (length,), generator=generator) > 0
    if exact:
        # Products of five such are whole numbers of at most eight bits, up to a power of two: exact in every dtype.
        return torch.randint(0 if dtype == torch.uint8 else -4, 5, (length,), generator=generator).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        # Of different magnitudes, so that the order of addition shows.
        scale = 10.0 ** torch.randint(0, 3, (length,), generator=generator)
        kind = torch.complex64 if dtype.is_complex else torch.float32
        return (torch.randn(length, dtype=kind, generator=generator) * scale).to(dtype)
    return torch.randint(-(2**62), 2**62, (length,), generator=generator).to(dtype)


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The parts combined in their order."""
    dtype = parts[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(reduced([torch.view_as_real(part) for part in parts], op))
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = _COMBINE[op](total, part.to(wide))
    return (total / len(parts) if op == "AVG" else total).to(dtype)


@dataclass(frozen=True)
class Buffer:
    """A tensor of a call: what it holds before, what it must hold after, and whether the call writes it."""

    before: torch.Tensor
    after: torch.Tensor
    written: bool = True


def buffers(program: Program, index: int, rank: int, step: Step | None = None) -> list[Buffer]:
    """The tensors of a step on one rank (by its place in the group): those that are written first.

    ``step`` stands in for the program's own, for a rank that calls something else.
    """
    step = program.steps[index] if step is None else step
    n = len(program.members(step))
    ranks = range(n)

    def given(sender: int, part: int = 0, count: int = step.count) -> torch.Tensor:
        """The contribution of a rank to this step, as its part-th part."""
        offset = (((program.seed * 31 + index) * 31 + sender) * 31 + part) * 101 % OFFSETS
        return _table(step.torch_dtype, program.exact)[offset : offset + count].clone()

    def written(results: list[torch.Tensor]) -> list[Buffer]:
        return [Buffer(torch.full_like(result, FILL), result) for result in results]

    def read(parts: list[torch.Tensor]) -> list[Buffer]:
        return [Buffer(part, part, written=False) for part in parts]

    def messages(pairs: tuple[tuple[int, int], ...]) -> list[Buffer]:
        found = []
        for number, (sender, receiver) in enumerate(pairs):
            if rank in (sender, receiver):
                part = given(sender, number)
                found += read([part]) if rank == sender else written([part])
        return found

    kind, root = step.kind, step.root
    if kind == "barrier":
        return []
    if kind == "all_reduce":
        return [Buffer(given(rank), reduced([given(r) for r in ranks], step.op))]
    if kind == "reduce":
        return [Buffer(given(rank), reduced([given(r) for r in ranks], step.op) if rank == root else given(rank))]
    if kind == "broadcast":
        return [Buffer(given(rank), given(root))]
    if kind == "all_gather":
        return written([given(r) for r in ranks]) + read([given(rank)])
    if kind == "all_gather_single":
        return written([torch.cat([given(r) for r in ranks])]) + read([given(rank)])
    if kind == "gather":
        return written([given(r) for r in ranks] if rank == root else []) + read([given(rank)])
    if kind == "gather_single":
        return written([torch.cat([given(r) for r in ranks])] if rank == root else []) + read([given(rank)])
    if kind == "scatter":
        return written([given(root, rank)]) + read([given(root, r) for r in ranks] if rank == root else [])
    if kind in ("reduce_scatter", "reduce_scatter_single"):
        parts = [given(rank, r) for r in ranks]
        result = reduced([given(r, rank) for r in ranks], step.op)
        return written([result]) + read(parts if kind == "reduce_scatter" else [torch.cat(parts)])
    if kind in ("all_to_all", "all_to_all_single"):
        received = [given(r, rank, step.sent(n, r, rank)) for r in ranks]
        sent = [given(rank, r, step.sent(n, rank, r)) for r in ranks]
        if kind == "all_to_all":
            return written(received) + read(sent)
        return written([torch.cat(received)]) + read([torch.cat(sent)])
    return messages(step.pairs)
