"""Means of flat tensors over ranks: unchanged, in a narrower dtype, or in whichever way is the quickest here.

Exchanges of fewer bits are in modules of their own: ``integers.py``, ``low_rank.py``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

__all__ = ["Exchange", "Narrow", "Unchanged", "choose", "narrowed", "quickest"]

# Half of what float16 can hold, so that no sum of shares leaves its range, in whatever order it is rounded.
FP16_LIMIT = 32768.0


class Exchange(ABC):
    """One way to take the mean over the ranks of a group."""

    name = "none"  # what ``compress=`` calls it

    @abstractmethod
    def mean_(self, flats: Sequence[torch.Tensor], shapes: Sequence[Sequence[torch.Size]]) -> None:
        """Replace tensors by their means over all ranks, in place. Every rank must call it; it blocks.

        Args:
            flats: real tensors of one dimension, alike on every rank. Each result has the same bits on every rank.
            shapes: for each of ``flats`` the shapes of the tensors that it consists of.
        """

    def settle(self) -> None:  # noqa: B027 - most ways keep nothing between two exchanges
        """Make what is kept from one exchange to the next the same on all ranks, for a checkpoint. All must call it."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from one exchange to the next, after :meth:`settle`: the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - see settle()
        """Go on from a :meth:`state_dict`, also with another number of ranks; an empty one begins anew."""


class Unchanged(Exchange):
    """The mean by an ``all_reduce`` of the tensors as they are."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def mean_(self, flats: Sequence[torch.Tensor], shapes: Sequence[Sequence[torch.Size]]) -> None:
        for flat in flats:
            if flat.dtype == torch.float16:  # its sum could leave the range that its mean is in
                dist.all_reduce(flat.div_(self._group.size()), group=self._group)
            else:
                dist.all_reduce(flat, group=self._group)
                flat.div_(self._group.size())


class Narrow(Exchange):
    """The mean by an ``all_reduce`` of each rank's share, rounded to ``bf16`` or ``fp16``; two bytes an element."""

    DTYPES: ClassVar = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._group, self.name = group, name

    def mean_(self, flats: Sequence[torch.Tensor], shapes: Sequence[Sequence[torch.Size]]) -> None:
        for flat in flats:
            share = narrowed(flat, self._group.size(), self.DTYPES[self.name])
            dist.all_reduce(share, group=self._group)
            flat.copy_(share)


def narrowed(tensor: torch.Tensor, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's share of a mean over ``ranks``, in ``dtype`` if that is narrower than the tensor's own.

    It is divided before it is rounded, because the sum could leave float16's range. What is itself beyond half of that
    range becomes its end; infinities stay, because a gradient scaler looks for them.
    """
    if tensor.element_size() <= dtype.itemsize:
        return tensor.div(ranks)
    if dtype == torch.float16:
        tensor = torch.where(tensor.isinf(), tensor, tensor.clamp(-FP16_LIMIT, FP16_LIMIT))
    return tensor.div(ranks).to(dtype)


# -- compress="auto": each way is tried on this job's link -----------------------------------------

WORTH = 0.8  # of the time of sending gradients unchanged: what takes longer than that is not worth any rounding
ROUNDS = 3
_FIRST_ELEMENTS = 1 << 16  # 256 KB: 0.2 s at 10 Mbit/s
_MOST_ELEMENTS = 1 << 22
_ENOUGH_S = 0.15  # an exchange as long as this is measured well enough


def quickest(seconds: Mapping[str, float]) -> str:
    """The name with the least time, among ``none`` and those that take clearly less than it."""
    worth = [name for name in seconds if name == "none" or seconds[name] <= WORTH * seconds["none"]]
    return min(worth, key=seconds.__getitem__)


def choose(
    exchanges: Mapping[str, Exchange], elements: int, device: torch.device, group: dist.ProcessGroup
) -> tuple[str, str]:
    """Time each exchange of so many gradients in turn, for about 1.5 s; every rank must call it, the slowest counts.

    Returns:
        The name of the quickest, and why it is that in a sentence; the same on every rank.
    """

    def timed(name: str, count: int) -> float:
        values = torch.linspace(-1, 1, count, device=device)
        dist.barrier(group)
        began = time.perf_counter()
        exchanges[name].mean_([values], [[values.shape]])
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - began

    def of_slowest(times: list[float]) -> list[float]:
        slowest = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        return [float(seconds) for seconds in slowest.tolist()]

    count = min(elements, _FIRST_ELEMENTS)
    timed("none", count)  # connections are made by the first call
    first = of_slowest([timed("none", count)])[0]
    count = max(count, min(elements, _MOST_ELEMENTS, int(count * _ENOUGH_S / max(first, 1e-6))))
    best = dict.fromkeys(exchanges, float("inf"))
    for round_number in range(ROUNDS + 1):
        for name in exchanges:
            seconds = timed(name, count)
            if round_number:  # in the first one memory is touched for the first time
                best[name] = min(best[name], seconds)
    agreed = [seconds * elements / count for seconds in of_slowest(list(best.values()))]
    seconds_of = dict(zip(best, agreed, strict=True))
    chosen = quickest(seconds_of)
    others = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in seconds_of.items() if name != chosen)
    return chosen, (
        f'compress="auto" is {chosen!r} here: {1e3 * seconds_of[chosen]:.1f} ms for the mean of '
        f"{elements:,} gradients, {others} (measured with {count:,} before the first step; chosen is "
        f"what takes less than {WORTH:.0%} of none's time)"
    )
