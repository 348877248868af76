"""A call's arguments: checks before any other rank learns of it, and copies of tensors that no transport can take.

A transport reads and writes memory. It cannot take a tensor with gaps, or inputs and outputs that share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import ArgumentError, DeviceMismatch, RankError, UnsupportedTensor
from phalanx.transports.contract import Communicator
from phalanx.transports.operands import same_size

__all__ = [
    "SUM",
    "Checks",
    "as_it_is",
    "as_real",
    "dense",
    "in_place",
    "moving",
]

SUM = dist.ReduceOp.SUM.value
_SUMS = (SUM, dist.ReduceOp.AVG.value)
_PREMUL_SUM = dist.ReduceOp.PREMUL_SUM.value
_STRIDED = torch.strided
_OP_NAMES = {op.value: name for name, op in dist.ReduceOp.RedOpType.__members__.items()}


class Checks:
    """The checks of one process group. Each raises before any other rank learns of the call.

    ArgumentError: a list, size, dtype or operation does not fit. DeviceMismatch: a tensor is on another device.
    UnsupportedTensor: its elements do not lie one by one in memory. RankError: the group has no such rank.

    Args:
        name: the backend's name, for the errors.
        communicator: the group's transport.
    """

    def __init__(self, name: str, communicator: Communicator) -> None:
        self._name, self._communicator = name, communicator
        self._rank, self._size = communicator.rank, communicator.size

    def can_be_written(self, call: str, tensor: torch.Tensor) -> None:
        """Refuse to receive into a tensor of which several elements are at one place in memory."""
        if tensor.is_contiguous() or all(tensor.stride(i) or tensor.size(i) < 2 for i in range(tensor.dim())):
            return
        raise UnsupportedTensor(
            f"{call} cannot write to a tensor of which several elements are at one place in memory, as after expand(); "
            f"rank {self._rank} gave one of shape {list(tensor.shape)} and stride {list(tensor.stride())}. Give "
            f"torch.empty_like(), and copy from it"
        )

    def on_cpu(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse tensors whose elements do not lie one by one in the memory of this process."""
        for tensor in tensors:
            if tensor.is_cpu and tensor.layout is _STRIDED and not (tensor.is_quantized or tensor.is_nested):
                continue
            if not tensor.is_cpu:
                raise DeviceMismatch(
                    f"backend {self._name!r} moves CPU tensors; rank {self._rank} gave one on {tensor.device}. Move it "
                    f"with .cpu(), or use the device's own backend"
                )
            kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
            raise UnsupportedTensor(
                f"backend {self._name!r} takes strided tensors, and sparse COO ones in all_reduce; rank {self._rank} "
                f"gave one of {tensor.dtype} that is {kind}. Move its parts, or call .to_dense(), for a nested one "
                f".to_padded_tensor(0.0), for a quantized one .dequantize()"
            )

    def one(self, name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The list, if it holds one tensor: c10d's lists are for several devices of one rank."""
        if len(tensors) != 1:
            raise ArgumentError(f"{name}: takes one tensor per rank on the CPU; got {len(tensors)}")
        return tensors

    def one_per_rank(self, name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
        """Check a list with one tensor per rank, in one pass, because every call of a list form pays for it."""
        dtype, count, fits = like.dtype, like.numel(), len(tensors) == self._size
        for tensor in tensors:
            if not tensor.is_cpu or tensor.layout is not _STRIDED:
                self.on_cpu(tensors)
            fits &= tensor.dtype == dtype and tensor.numel() == count
        if not fits:
            same_size(name, tensors, like, self._size)

    def multiple(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Check a tensor that holds one part for each rank."""
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self._size:
            raise ArgumentError(
                f"{name}: {whole.dtype}{list(whole.shape)} is not {self._size} times (one for each rank) "
                f"{part.dtype}{list(part.shape)}"
            )

    def exchange(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Check the two lists of an all_to_all."""
        self.on_cpu([*outputs, *inputs])
        for name, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self._size:
                raise ArgumentError(f"all_to_all: {len(tensors)} {name} tensors, but the group has {self._size} ranks")
            for tensor in tensors:
                if tensor.dtype != outputs[0].dtype:
                    raise ArgumentError("all_to_all: the tensors differ in dtype")
        self.own_part("all_to_all", [t.numel() for t in inputs], [t.numel() for t in outputs])

    def own_part(self, name: str, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Check that this rank expects from itself what it sends itself, given the elements for and from each rank."""
        if sent[self._rank] != expected[self._rank]:
            raise ArgumentError(f"{name}: what this rank sends itself is not what it expects from itself")

    def peer(self, rank: Any) -> Any:
        """Check the other rank of a message, or the root of a collective, and return it; None stands for any rank."""
        if rank is not None and not 0 <= rank < self._size:
            raise RankError.not_in_group(rank, self._size)
        return rank

    def reduction(self, name: str, tensors: Sequence[torch.Tensor], reduce_op: Any) -> tuple[int, float | None]:
        """The operation's number, and the factor of a pre-multiplied sum; the transport is given real numbers."""
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


# -- copies in the place of tensors ----------------------------------------------------------------


def as_it_is(tensor: torch.Tensor) -> bool:
    """Return whether the bytes in the tensor's memory are its elements, in order.

    They are not if the tensor has gaps, or is a view that torch negates or conjugates when it reads it.
    """
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers: a communicator sums no complex ones. The tensor must be as it is in memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def dense(tensor: torch.Tensor, factor: float | None = None) -> torch.Tensor:
    """The tensor itself if a communicator can take it as it is, else a copy; without its gradient history.

    Args:
        tensor: strided, on the CPU.
        factor: by which it is multiplied, in a copy.
    """
    if not as_it_is(tensor) or tensor.requires_grad:
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor if factor is None else tensor * factor


def in_place(tensor: torch.Tensor, body: Callable[[torch.Tensor], None]) -> None:
    """Run ``body`` on the tensor, or on a contiguous stand-in that is copied back."""
    if as_it_is(tensor):
        body(tensor)
        return
    stand_in = dense(tensor)
    body(stand_in)
    tensor.detach().copy_(stand_in)


def moving(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    body: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
    own: int | None,
    factor: float | None = None,
) -> Callable[[], None]:
    """A function that runs ``body`` on outputs and inputs, or on copies in the place of those that it cannot take.

    A communicator reads and writes memory, and knows no gradients.

    Args:
        outputs: to be filled. Those with gaps have a stand-in that is copied back.
        inputs: to be read. All of them are copied if ``body`` could overwrite one before it has read it.
        body: the collective.
        own: the part of the larger side that may be the same memory as the smaller side; None if none may.
        factor: by which the inputs are multiplied first, in copies.
    """
    if factor is None and all(map(as_it_is, (*outputs, *inputs))) and _are_apart(outputs, inputs, own):
        return partial(body, outputs, inputs)

    def move() -> None:
        given = [dense(tensor, factor) for tensor in inputs]
        buffers = [output if as_it_is(output) else torch.empty(output.shape, dtype=output.dtype) for output in outputs]
        body(buffers, given if _are_apart(buffers, given, own) else [tensor.clone() for tensor in given])
        for output, buffer in zip(outputs, buffers, strict=True):
            if buffer is not output:
                output.detach().copy_(buffer)

    return move


def _are_apart(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor], own: int | None) -> bool:
    """Return whether the tensors of one list may be written while those of the other are read; all are contiguous.

    One of them may have one tensor for all ranks. ``own`` is the part of the larger side that may be the same memory as
    the smaller side; None if none may.
    """
    one, few = (ones, others) if len(ones) == 1 else (others, ones)
    if len(one) == 1:  # the usual case, in fewer steps
        start, end = one[0].data_ptr(), one[0].data_ptr() + one[0].nbytes
        if all(end <= tensor.data_ptr() or tensor.data_ptr() + tensor.nbytes <= start for tensor in few):
            return True
    same = None  # where the smaller side may begin within the larger one
    if own is not None:
        if len(others) == 1 and (len(ones) > 1 or others[0].nbytes < ones[0].nbytes):
            ones, others = others, ones
        place = others[0].data_ptr() + own * ones[0].nbytes if len(others) == 1 else others[own].data_ptr()
        same = place if ones[0].data_ptr() == place else None
    spans = [(at := tensor.data_ptr(), at + tensor.nbytes, 0) for tensor in ones]
    spans += [(at := tensor.data_ptr(), at + tensor.nbytes, 1) for tensor in others]
    spans.sort()
    ends = [0, 0]  # where the tensors so far end, of each list
    for start, end, which in spans:
        if start < ends[1 - which] and start < end:
            if start != same:
                return False
            same = None
        ends[which] = max(ends[which], end)
    return True
