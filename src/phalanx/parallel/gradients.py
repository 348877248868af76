"""Hand gradients of DDP to an exchange: bucket by bucket during backward, or all at its end, as flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.parallel.exchange import Exchange, Narrow, narrowed

__all__ = ["FlatTensors", "WholeGradient", "narrow_hook"]


def narrow_hook(name: str) -> Callable[..., Any]:
    """A hook that sends gradients as ``bf16`` or ``fp16``. torch's own refuses bfloat16 on the CPU; this one sends it.

    Each bucket travels while backward computes the next.
    """
    dtype = Narrow.DTYPES[name]

    # This has no annotations, because torch compares those of a hook with its classes, and they are strings here.
    def hook(process_group, bucket):  # type: ignore[no-untyped-def]
        gradients = bucket.buffer()
        share = narrowed(gradients, process_group.size(), dtype)
        work = dist.all_reduce(share, group=process_group, async_op=True)
        return work.get_future().then(lambda future: gradients.copy_(future.value()[0]))

    return hook


class FlatTensors:
    """Memory for copies of some tensors, in the order of the tensors, apart by dtype and device.

    Args:
        tensors: those of a model. Their shapes, dtypes and order must be the same on every rank.

    Attributes:
        flats: the copies, one tensor of one dimension for each pair of dtype and device; of complex tensors the real
            and imaginary parts in turn.
        shapes: for each of ``flats`` the shapes of the tensors in it; a complex tensor's has one more dimension, of 2.
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


class WholeGradient:
    """A hook that waits for the last bucket of a backward pass, and then exchanges all gradients in one piece.

    Some exchanges take several collectives one after the other, and keep something for each parameter. Bucket by bucket
    ranks could begin them in different orders, and what is kept would move when DDP divides the parameters into other
    buckets, as it does after the first step.

    Args:
        parameters: those whose gradients DDP exchanges.
        exchange: takes their mean over the ranks.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], exchange: Exchange) -> None:
        self.exchange = exchange
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._flat = FlatTensors(parameters)
        # The buckets of the backward pass under way: where their gradients are here and in DDP, and what it waits for.
        self._held: list[tuple[list[torch.Tensor], torch.Tensor, torch.futures.Future[Any]]] = []

    @staticmethod
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # without annotations, as in narrow_hook
        return state.collect(bucket)

    @torch.no_grad()
    def collect(self, bucket: Any) -> torch.futures.Future[Any]:
        """Take a bucket's gradients; with the last one, exchange them all."""
        buffer = bucket.buffer()
        devices: Any = None if buffer.device.type == "cpu" else [buffer.device]
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        if bucket.index() == 0:
            self._held = []  # of a pass that was given up
        # Not bucket.gradients(): of complex ones, whose real and imaginary parts are in the buffer, it has half.
        parts = [self._flat.elements(self._numbers[id(parameter)]) for parameter in bucket.parameters()]
        for part, gradient in zip(parts, torch.split(buffer, [part.numel() for part in parts]), strict=True):
            part.copy_(gradient)
        self._held.append((parts, buffer, future))
        if bucket.is_last():
            held, self._held = self._held, []
            self.exchange.mean_(self._flat.flats, self._flat.shapes)
            for parts, buffer, done in held:
                done.set_result(torch.cat(parts, out=buffer))
        return future
