"""Combining what hosts have computed, in the order of the hosts, with the core's kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from phalanx.errors import BackendError
from phalanx.native.core import library
from phalanx.transports.shm.numbers import DTYPE_NUMBERS, OP_NUMBERS

__all__ = ["combine", "combine_at"]


def combine(out: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
    """``out = inputs[0] op inputs[1] op …``, element by element; 16-bit floats in 32 bits, and rounded once.

    Args:
        out: contiguous, of the inputs' dtype and number of elements; it overlaps none of them.
        inputs: contiguous.
        op: the number of the ``ReduceOp``.
    """
    combine_at(out.data_ptr(), [tensor.data_ptr() for tensor in inputs], out, op)


def combine_at(out: int, inputs: Sequence[int], like: torch.Tensor, op: int) -> None:
    """:func:`combine` of memory at addresses, as much as a tensor has, and of its dtype."""
    pointers = (ctypes.c_void_p * len(inputs))(*inputs)
    dtype = DTYPE_NUMBERS[like.dtype][0]
    status = library().phx_combine(pointers, len(inputs), out, like.numel(), dtype, OP_NUMBERS[op])
    if status:
        raise BackendError(f"the core cannot combine {like.dtype} by operation {op} (status {status})")
