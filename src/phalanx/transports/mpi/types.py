"""torch's dtypes, operations and memory in MPI's terms.

MPI has no 16-bit floats that every library knows. They are reduced as float32: one rounding, at the end, as in the
shared-memory transport, for twice the bytes. A custom MPI operation on 16 bits would round at every step, in an order
that depends on the library. bool is reduced as bytes of 0 and 1, where "or" is a maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import ArgumentError
from phalanx.transports.reductions import reducible

__all__ = ["HALVES", "Types", "span"]

HALVES = frozenset((torch.float16, torch.bfloat16))
_NAMES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.float16: "FLOAT",
    torch.bfloat16: "FLOAT",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.bool: "UINT8_T",
}
_OPS = {
    "SUM": "SUM",
    "AVG": "SUM",  # and a division
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
_BOOL_OPS = _OPS | {"SUM": "MAX", "PRODUCT": "MIN"}
_LARGEST = 2**31 - 1  # the largest count that a call of MPI 3 takes


class Types:
    """MPI's handles, looked up once."""

    def __init__(self, mpi: Any) -> None:
        self._address = mpi.buffer.fromaddress
        self._byte, self._word = mpi.BYTE, mpi.UINT64_T
        self._items = {1: mpi.BYTE, 2: mpi.UINT16_T, 4: mpi.UINT32_T, 8: mpi.UINT64_T, 16: mpi.C_DOUBLE_COMPLEX}
        self.reductions: dict[tuple[torch.dtype, int], tuple[Any, Any]] = {}
        for dtype, name in _NAMES.items():
            for torch_name, mpi_name in (_BOOL_OPS if dtype == torch.bool else _OPS).items():
                op = getattr(dist.ReduceOp, torch_name).value
                if reducible(dtype, op):
                    self.reductions[dtype, op] = getattr(mpi, name), getattr(mpi, mpi_name)

    def numbers(self, tensor: torch.Tensor, kind: Any) -> list[Any]:
        """A contiguous tensor as what mpi4py takes, without a copy."""
        return [self._address(tensor.data_ptr(), tensor.nbytes), tensor.numel(), kind]

    def memory(self, address: int, nbytes: int, parts: int = 1) -> list[Any]:
        """Memory to be copied, of ``parts`` equal parts, of which each is sent or received.

        Raises:
            ArgumentError: more than some MPI libraries can count.
        """
        count, kind = nbytes // parts, self._byte
        if count > _LARGEST:
            if count % 8 or count // 8 > _LARGEST:
                raise ArgumentError(
                    f"{count} bytes in one call are more than MPI libraries count; send the tensor in parts"
                )
            count, kind = count // 8, self._word
        return [self._address(address, nbytes), count, kind]

    def tensor(self, tensor: torch.Tensor) -> list[Any]:
        """A contiguous tensor's memory."""
        return self.memory(tensor.data_ptr(), tensor.nbytes)

    def items(self, itemsize: int) -> Any:
        """MPI's type for one element of that many bytes, where elements are only copied."""
        return self._items[itemsize]


def span(tensors: Sequence[torch.Tensor]) -> int | None:
    """Where the tensors begin, if they are contiguous, in order and without gaps; else None."""
    first = at = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at:
            return None
        at += tensor.nbytes
    return first
