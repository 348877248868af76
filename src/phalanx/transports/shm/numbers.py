"""Arguments of the core: its numbers of dtypes and operations, and the addresses of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from phalanx.transports.operands import OP_NAMES, REDUCIBLE

__all__ = ["DTYPES", "DTYPE_NUMBERS", "OP_NUMBERS", "REDUCED", "Pointers", "fill", "fill_evenly", "fill_unevenly"]

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

Pointers = ctypes.Array[ctypes.c_void_p]


def fill(pointers: Pointers, tensors: Sequence[torch.Tensor]) -> Pointers:
    """The address of each tensor."""
    for index, tensor in enumerate(tensors):
        pointers[index] = tensor.data_ptr()
    return pointers


def fill_evenly(pointers: Pointers, whole: torch.Tensor, nbytes: int) -> Pointers:
    """The addresses of a tensor's pieces of ``nbytes`` each."""
    at = whole.data_ptr()
    for index in range(len(pointers)):
        pointers[index] = at
        at += nbytes
    return pointers


def fill_unevenly(
    pointers: Pointers, sizes: ctypes.Array[ctypes.c_uint64], whole: torch.Tensor, counts: Sequence[int]
) -> Pointers:
    """The addresses and sizes of a tensor's pieces of so many elements each."""
    at, itemsize = whole.data_ptr(), whole.element_size()
    for index, count in enumerate(counts):
        pointers[index] = at
        sizes[index] = nbytes = count * itemsize
        at += nbytes
    return pointers
