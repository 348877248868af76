"""The tensors of a model as a few flat ones, one for each dtype and device, so that they travel in one piece each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["FlatTensors"]


class FlatTensors:
    """Memory for copies of some tensors, in the order of the tensors, apart by dtype and device.

    Args:
        tensors: those of a model. Their shapes, dtypes and order must be the same on every rank.

    Attributes:
        flats: the copies, one tensor of one dimension for each pair of dtype and device. Of complex tensors they have
            the real and imaginary parts in turn, so that they can be rounded like others.
        shapes: for each of ``flats`` the shapes of the tensors in it, in their order; a complex tensor's has one more
            dimension, of 2.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, tensor in enumerate(self._tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
        self.flats: list[torch.Tensor] = []
        self.shapes: list[list[torch.Size]] = []
        self._parts: dict[int, torch.Tensor] = {}
        for (dtype, device), numbers in kinds.items():
            flat = torch.zeros(sum(self._tensors[n].numel() for n in numbers), dtype=dtype, device=device)
            real = torch.view_as_real(flat).view(-1) if dtype.is_complex else flat
            begin = 0
            for number in numbers:
                shape = self._tensors[number].shape
                self._parts[number] = flat[begin : begin + shape.numel()].view(shape)
                begin += shape.numel()
            self.flats.append(real)
            shapes = (self._tensors[number].shape for number in numbers)
            self.shapes.append([torch.Size((*shape, 2)) if dtype.is_complex else shape for shape in shapes])

    def elements(self, number: int) -> torch.Tensor:
        """The memory for the copy of the tensor of that number: real, and of one dimension."""
        part = self._parts[number].view(-1)
        return torch.view_as_real(part).view(-1) if part.is_complex() else part

    @torch.no_grad()
    def take(self) -> Sequence[torch.Tensor]:
        """Copy the tensors into ``flats``, which it returns."""
        for number, tensor in enumerate(self._tensors):
            self._parts[number].copy_(tensor)
        return self.flats

    @torch.no_grad()
    def give(self) -> None:
        """Copy ``flats`` back into the tensors."""
        for number, tensor in enumerate(self._tensors):
            tensor.copy_(self._parts[number])
