"""Operands of collectives: tensors cut into one piece per rank, dtypes, and which reductions are defined.

Dtypes and operations go by number: the core's (enum phx_dtype, enum phx_op), and torch's for operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.errors import ArgumentError

__all__ = [
    "AVG",
    "DTYPES",
    "FLOATS",
    "OP_NAMES",
    "OP_NUMBERS",
    "REDUCIBLE",
    "SUM",
    "even_pieces",
    "pieces",
    "reducible",
    "same_size",
    "split_counts",
]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REDUCIBLE = (  # in the order of the core's numbers, from 1 on
    *FLOATS,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
# The core's number of every dtype. Those that it cannot reduce have one that only distinguishes them.
_COPIED = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - {*REDUCIBLE}
DTYPES = {dtype: number for number, dtype in enumerate(REDUCIBLE, start=1)}
DTYPES |= {dtype: number for number, dtype in enumerate(sorted(_COPIED, key=str), start=32)}

# torch's ReduceOp compares and hashes slowly; its integer value is what travels inside Phalanx.
OP_NAMES = {
    getattr(dist.ReduceOp, name).value: name for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
OP_NUMBERS = {op: number for number, op in enumerate(OP_NAMES, start=1)}  # the core's
SUM: int = dist.ReduceOp.SUM.value
AVG: int = dist.ReduceOp.AVG.value
_BITWISE = frozenset(getattr(dist.ReduceOp, name).value for name in ("BAND", "BOR", "BXOR"))
_KNOWN = frozenset(REDUCIBLE)
_FLOATS = frozenset(FLOATS)


def reducible(dtype: torch.dtype, op: int) -> bool:
    """Return whether ``op``, a ``ReduceOp``'s value, suits ``dtype``: no bits of floats, no averages of integers."""
    if dtype in _FLOATS:
        return op in OP_NAMES and op not in _BITWISE
    return dtype in _KNOWN and op in OP_NAMES and op != AVG


def even_pieces(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """A contiguous tensor as ``size`` flat pieces of equal length."""
    return list(tensor.view(size, -1).unbind()) if tensor.numel() else [tensor.view(-1)] * size


def pieces(tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """A contiguous tensor as flat pieces of ``counts`` elements."""
    return list(tensor.view(-1).split(list(counts)))


def split_counts(name: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Count the elements of each rank's piece, given its rows in ``splits``. Without splits all get as many rows.

    Raises:
        ArgumentError: the splits are not one per rank, or do not add up to the rows.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ArgumentError(f"{name}: {rows} rows do not divide equally among {size} ranks; give split sizes")
        return [tensor.numel() // size] * size
    if len(splits) != size:
        raise ArgumentError(f"{name}: {len(splits)} split sizes for {size} ranks; there must be one for each")
    if sum(splits) != rows or min(splits) < 0:
        raise ArgumentError(f"{name}: the split sizes {list(splits)} do not add up to the {rows} rows of the tensor")
    row = tensor.numel() // rows if rows else 0
    return [count * row for count in splits]


def same_size(name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, size: int) -> None:
    """Check a list with one tensor per rank.

    Raises:
        ArgumentError: there are not ``size`` of them, or one differs from ``like`` in dtype or element count.
    """
    if len(tensors) != size:
        raise ArgumentError(f"{name}: the list has {len(tensors)} tensors, but the group has {size} ranks")
    dtype, count = like.dtype, like.numel()
    for index, tensor in enumerate(tensors):
        if tensor.dtype != dtype or tensor.numel() != count:
            raise ArgumentError(
                f"{name}: entry {index} of the list is {tensor.dtype}{list(tensor.shape)}, but must have as many "
                f"elements as {like.dtype}{list(like.shape)}, of the same dtype"
            )
