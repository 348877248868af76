"""The core's numbers of torch's dtypes and operations."""

from __future__ import annotations

import torch

from phalanx.transports.reductions import OP_NAMES, REDUCIBLE

__all__ = ["DTYPES", "DTYPE_NUMBERS", "OP_NUMBERS", "REDUCED"]

# The dtypes that the core's kernels reduce (enum phx_dtype).
REDUCED = {dtype: number for number, dtype in enumerate(REDUCIBLE, start=1)}
# The other dtypes are only copied; their numbers distinguish them.
_COPIED = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype) and value not in REDUCED), key=str
)
DTYPES = REDUCED | {dtype: 32 + index for index, dtype in enumerate(dict.fromkeys(_COPIED))}
# Of each dtype both: the number for reductions (0: there are none), and that for copies.
DTYPE_NUMBERS = {dtype: (REDUCED.get(dtype, 0), number) for dtype, number in DTYPES.items()}
# The core numbers operations as torch's ReduceOp does in this order (enum phx_op).
OP_NUMBERS = {op: number for number, op in enumerate(OP_NAMES, start=1)}
