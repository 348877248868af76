"""Which reductions are defined. Operations go by number; dtypes stand in the order of the core's ``phx_dtype``."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["AVG", "FLOATS", "OP_NAMES", "REDUCIBLE", "SUM", "reducible"]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REDUCIBLE = (
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

# torch's ReduceOp compares and hashes slowly; its integer value is what travels inside Phalanx.
OP_NAMES = {
    getattr(dist.ReduceOp, name).value: name for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
SUM: int = dist.ReduceOp.SUM.value
AVG: int = dist.ReduceOp.AVG.value
_BITWISE = frozenset(getattr(dist.ReduceOp, name).value for name in ("BAND", "BOR", "BXOR"))
_KNOWN = frozenset(REDUCIBLE)
_FLOATS = frozenset(FLOATS)


def reducible(dtype: torch.dtype, op: int) -> bool:
    """Whether ``op`` (a ``ReduceOp``'s value) of ``dtype`` is defined: no bits of floats, no averages of integers."""
    if dtype in _FLOATS:
        return op in OP_NAMES and op not in _BITWISE
    return dtype in _KNOWN and op in OP_NAMES and op != AVG
