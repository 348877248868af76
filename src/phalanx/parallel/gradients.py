"""How DDP hands gradients to an exchange: bucket by bucket during backward, or all at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.parallel.exchange import Exchange, Narrow, narrowed
from phalanx.parallel.flat import FlatTensors

__all__ = ["WholeGradient", "narrow_hook"]


def narrow_hook(name: str) -> Callable[..., Any]:
    """A hook that sends gradients as ``bf16`` or ``fp16``. torch's own refuses bfloat16 on the CPU; this one sends it.

    Each bucket travels while backward computes the next.
    """
    dtype = Narrow.DTYPES[name]

    # This has no annotations, because torch compares those of a hook with its classes, and they are strings here.
    def hook(process_group, bucket):  # type: ignore[no-untyped-def]
        gradients = bucket.buffer()
        real = torch.view_as_real(gradients) if gradients.is_complex() else gradients
        share = narrowed(real, process_group.size(), dtype)
        work = dist.all_reduce(share, group=process_group, async_op=True)

        def give(future):  # type: ignore[no-untyped-def]
            real.copy_(future.value()[0])
            return gradients

        return work.get_future().then(give)

    return hook


class WholeGradient:
    """A hook that waits for the last bucket of a backward pass, and then exchanges all gradients in one piece.

    Some exchanges take several collectives one after the other, and keep something for each parameter. If each bucket
    began its next collective when its last one was done, ranks could begin them in different orders; and what is kept
    would be in other places once DDP divides the parameters into other buckets, as it does after the first step. Here
    the order is that of the parameters, always.

    Args:
        parameters: those whose gradients DDP exchanges.
        exchange: takes their mean over the ranks.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], exchange: Exchange) -> None:
        self.exchange = exchange
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._flat = FlatTensors(parameters)
        # The buckets of the backward pass under way: their parameters' numbers, gradients, and what DDP waits for.
        self._held: list[tuple[list[int], list[torch.Tensor], torch.Tensor, torch.futures.Future[Any]]] = []

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
        numbers = [self._numbers[id(parameter)] for parameter in bucket.parameters()]
        gradients = bucket.gradients()
        for number, gradient in zip(numbers, gradients, strict=True):
            self._flat.part(number).copy_(gradient)
        self._held.append((numbers, gradients, buffer, future))
        if bucket.is_last():
            held, self._held = self._held, []
            self.exchange.mean_(self._flat.flats, self._flat.shapes)
            for numbers, gradients, buffer, done in held:
                for number, gradient in zip(numbers, gradients, strict=True):
                    gradient.copy_(self._flat.part(number))
                done.set_result(buffer)
        return future
