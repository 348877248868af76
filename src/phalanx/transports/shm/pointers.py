"""Where the tensors of a call lie, as the core takes them: an address and a size for each rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

__all__ = ["Pointers", "fill", "fill_evenly", "fill_unevenly"]

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
