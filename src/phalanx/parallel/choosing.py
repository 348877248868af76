"""``compress="auto"``: which exchange is the quickest between these ranks, by trying each on this job's link."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.parallel.exchange import Exchange

__all__ = ["WORTH", "Choice", "choose", "quickest"]

WORTH = 0.8  # of the time of sending gradients unchanged: what takes longer than that is not worth any rounding
ROUNDS = 3
_FIRST_ELEMENTS = 1 << 16  # 256 KB: 0.2 s at 10 Mbit/s
_MOST_ELEMENTS = 1 << 22
_ENOUGH_S = 0.15  # an exchange as long as this is measured well enough


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why; the same on every rank.

    Attributes:
        name: of the exchange.
        seconds: what each would take for the whole gradient, on the slowest rank.
        elements: how many elements that gradient has.
        measured: with how many of them it was measured.
    """

    name: str
    seconds: dict[str, float]
    elements: int
    measured: int

    def __str__(self) -> str:
        others = ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in self.seconds.items() if name != self.name)
        return (
            f'compress="auto" is {self.name!r} here: {1e3 * self.seconds[self.name]:.1f} ms for the mean of '
            f"{self.elements:,} gradients, {others} (measured with {self.measured:,} before the first step; chosen is "
            f"what takes less than {WORTH:.0%} of none's time)"
        )


def quickest(seconds: Mapping[str, float]) -> str:
    """The name with the least time, among ``none`` and those that take clearly less than it."""
    worth = [name for name in seconds if name == "none" or seconds[name] <= WORTH * seconds["none"]]
    return min(worth, key=seconds.__getitem__)


def choose(exchanges: Mapping[str, Exchange], elements: int, device: torch.device, group: dist.ProcessGroup) -> Choice:
    """Time each exchange, in turn; every rank must call it. It takes about as long as ten exchanges of 0.15 s each.

    Args:
        exchanges: by name; ``none`` is one of them.
        elements: how many gradients one exchange will have.
        device: where they are.
        group: the ranks, of which the slowest counts.
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
    by_name = dict(zip(best, agreed, strict=True))
    return Choice(quickest(by_name), by_name, elements, count)
