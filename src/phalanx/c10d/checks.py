"""The checks of a collective's arguments, made before any other rank learns of the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.c10d.stand_ins import as_it_is
from phalanx.errors import ArgumentError, DeviceMismatch, RankError, UnsupportedTensor
from phalanx.transports.contract import Communicator
from phalanx.transports.layout import same_size

__all__ = ["SUM", "Checks"]

SUM = dist.ReduceOp.SUM.value
_SUMS = (SUM, dist.ReduceOp.AVG.value)
_PREMUL_SUM = dist.ReduceOp.PREMUL_SUM.value
_STRIDED = torch.strided
_OP_NAMES = {op.value: name for name, op in dist.ReduceOp.RedOpType.__members__.items()}


class Checks:
    """The checks of one process group.

    Args:
        name: the backend's name, for the errors.
        communicator: the group's transport.
    """

    def __init__(self, name: str, communicator: Communicator) -> None:
        self._name, self._communicator = name, communicator
        self._rank, self._size = communicator.rank, communicator.size

    def can_be_written(self, call: str, tensor: torch.Tensor) -> None:
        """Refuse to receive into a tensor of which several elements are at one place in memory.

        Raises:
            UnsupportedTensor: it is such a tensor.
        """
        if tensor.is_contiguous() or all(tensor.stride(i) or tensor.size(i) < 2 for i in range(tensor.dim())):
            return
        raise UnsupportedTensor(
            f"{call} cannot write to a tensor of which several elements are at one place in memory, as after expand(); "
            f"rank {self._rank} gave one of shape {list(tensor.shape)} and stride {list(tensor.stride())}. Give "
            f"torch.empty_like(), and copy from it"
        )

    def on_cpu(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse tensors whose elements do not lie one by one in the memory of this process.

        Raises:
            DeviceMismatch: a tensor is on another device than the CPU.
            UnsupportedTensor: a tensor is sparse, compressed or quantized.
        """
        for tensor in tensors:
            if tensor.is_cpu and tensor.layout is _STRIDED and not (tensor.is_quantized or tensor.is_nested):
                continue
            if not tensor.is_cpu:
                raise DeviceMismatch(
                    f"backend {self._name!r} moves CPU tensors; rank {self._rank} gave one on {tensor.device}. Move it "
                    f"with .cpu(), or use the device's own backend"
                )
            if tensor.is_quantized:
                raise UnsupportedTensor(
                    f"backend {self._name!r} moves no quantized tensors, whose scales the other ranks would not learn; "
                    f"rank {self._rank} gave one of {tensor.dtype}. Move its .int_repr(), or call .dequantize()"
                )
            raise UnsupportedTensor(
                f"backend {self._name!r} takes strided tensors, and sparse COO ones in all_reduce; rank {self._rank} "
                f"gave one {'that is nested' if tensor.is_nested else f'of the layout {tensor.layout}'}. Move its "
                f"parts, or call .to_dense(), for a nested one .to_padded_tensor(0.0)"
            )

    def one(self, name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The list, if it holds one tensor: c10d's lists are for several devices of one rank.

        Raises:
            ArgumentError: it holds another number.
        """
        if len(tensors) != 1:
            raise ArgumentError(f"{name}: takes one tensor per rank on the CPU; got {len(tensors)}")
        return tensors

    def one_per_rank(self, name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> bool:
        """Check a list with one tensor per rank, in one pass, because every call of a list form pays for it.

        Returns:
            Whether the memory of all of them is in order, so that a communicator can take the list as it is.

        Raises:
            ArgumentError: the list is too long or short, or a tensor does not fit ``like``.
            DeviceMismatch, UnsupportedTensor: as :meth:`on_cpu`.
        """
        dtype, count, fits, contiguous = like.dtype, like.numel(), len(tensors) == self._size, True
        for tensor in tensors:
            if not tensor.is_cpu or tensor.layout is not _STRIDED:
                self.on_cpu(tensors)
            fits &= tensor.dtype == dtype and tensor.numel() == count
            contiguous &= as_it_is(tensor)
        if not fits:
            same_size(name, tensors, like, self._size)
        return contiguous

    def multiple(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Check a tensor that holds one part for each rank.

        Raises:
            ArgumentError: it is not as large as all parts together, or of another dtype.
        """
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self._size:
            raise ArgumentError(
                f"{name}: {whole.dtype}{list(whole.shape)} is not {self._size} times (one for each rank) "
                f"{part.dtype}{list(part.shape)}"
            )

    def exchange(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Check the two lists of an all_to_all.

        Raises:
            ArgumentError, DeviceMismatch: they do not have one CPU tensor of one dtype for each rank, or what this rank
                sends itself is not what it expects from itself.
        """
        self.on_cpu([*outputs, *inputs])
        for name, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self._size:
                raise ArgumentError(f"all_to_all: {len(tensors)} {name} tensors, but the group has {self._size} ranks")
            for tensor in tensors:
                if tensor.dtype != outputs[0].dtype:
                    raise ArgumentError("all_to_all: the tensors differ in dtype")
        self.own_part("all_to_all", [t.numel() for t in inputs], [t.numel() for t in outputs])

    def own_part(self, name: str, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Check what this rank sends itself, given the elements for and from each rank.

        Raises:
            ArgumentError: that is not what it expects from itself.
        """
        if sent[self._rank] != expected[self._rank]:
            raise ArgumentError(f"{name}: what this rank sends itself is not what it expects from itself")

    def peer(self, rank: Any) -> Any:
        """Check the other rank of a message, or the root of a collective, and return it; None stands for any rank.

        Raises:
            RankError: the group has no such rank.
        """
        if rank is not None and not 0 <= rank < self._size:
            raise RankError.not_in_group(rank, self._size)
        return rank

    def reduction(self, name: str, tensors: Sequence[torch.Tensor], reduce_op: Any) -> tuple[int, float | None]:
        """The operation's number, and the factor of a pre-multiplied sum; the transport is given real numbers.

        Raises:
            ArgumentError, DeviceMismatch, UnsupportedTensor: the transport cannot reduce a tensor by that operation.
        """
        op, factor = int(reduce_op.op.value), None
        if op == _PREMUL_SUM:
            op, factor = SUM, reduce_op.__getstate__()[1]
        self.on_cpu(tensors)
        for tensor in tensors:
            is_complex, dtype = tensor.is_complex(), tensor.dtype
            if not self._communicator.can_reduce(dtype.to_real(), op) or (is_complex and op not in _SUMS):
                raise ArgumentError(
                    f"{name}: {_OP_NAMES.get(op, op)} of {dtype} is not supported by backend {self._name!r}"
                )
            if factor is not None and torch.result_type(tensor, factor) != dtype:
                raise ArgumentError(
                    f"{name}: PREMUL_SUM of {dtype} with the factor {factor!r} gives "
                    f"{torch.result_type(tensor, factor)}, which the tensor cannot hold"
                )
        return op, factor
