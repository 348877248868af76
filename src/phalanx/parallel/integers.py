"""The mean over ranks with one byte an element on the wire, or less; what rounding leaves out is added next time.

Each block of ``BLOCK`` elements travels as integers, of eight bits from -127 to 127, and one float32, their scale. Sums
of such integers do not fit into eight bits, so every rank gets one piece of the others' tensors (``all_to_all``), adds
the pieces up in float32, and sends their sum to all (``all_gather``), both as integers: 2(N-1)/N bytes an element.

What is left out by either rounding is added, on its rank, to what that rank sends of the same elements next time
(error feedback: Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847). Rounding is to the nearest, not at
random, so a run that is repeated ends with the same bits.

Between hosts of several ranks, those of a host first add up unrounded. Then each of them takes a slice of that sum, its
lane, to the ranks with the same lane on the other hosts; so a host's link carries as much as with one rank on each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.parallel.exchange import Exchange

__all__ = ["BLOCK", "Integers", "Lanes", "packed", "unpacked"]

BLOCK = 256
_SMALLEST = torch.finfo(torch.float32).tiny  # below it the inverse of a scale could be infinite


@dataclass(frozen=True)
class Lanes:
    """Ranks that add up unrounded, and ranks that exchange integers."""

    everyone: dist.ProcessGroup
    inside: dist.ProcessGroup | None  # the ranks of this host; None if this rank has it for itself, or counts as a host
    across: dist.ProcessGroup | None  # those of this rank's lane, one on each host; None if it has no lane
    hosts: int
    count: int  # of the lanes, at most as many as ranks on the smallest host
    own: int  # the number of this rank's lane; for a rank without one any

    @classmethod
    def flat(cls, group: dist.ProcessGroup) -> Lanes:
        """Every rank counts as a host."""
        return cls(group, None, group, group.size(), 1, 0)


class Integers(Exchange):
    """The exchange of integers. It keeps four bytes for each element of a lane: what is pending.

    Args:
        lanes: who exchanges integers with whom.
        bits: of an integer: 8, or 2 to 4.
    """

    name = "int8"

    def __init__(self, lanes: Lanes, bits: int = 8) -> None:
        self._lanes, self._bits = lanes, bits
        # What is pending of each flat tensor: float32, a row for each host. What is pending of the row that this rank
        # adds up comes from rounding its sum, the rest from rounding this rank's own part of the others' sums.
        self._pending: list[torch.Tensor] = []
        self._sizes: list[int] = []  # how many elements each flat tensor has
        self._loaded: list[torch.Tensor] = []  # what a checkpoint had, until the first exchange

    def mean_(self, flats: Sequence[torch.Tensor], shapes: Sequence[Sequence[torch.Size]]) -> None:
        lanes = self._lanes
        if len(self._pending) != len(flats):
            self._begin(flats)
        for flat, pending in zip(flats, self._pending, strict=True):
            shares = self._in_lanes(flat.float() / lanes.everyone.size())
            if lanes.inside is not None:
                dist.all_reduce(shares, group=lanes.inside)
            if lanes.across is not None:
                own = shares[lanes.own].clone()
                self._sum_(own, pending, lanes.across)
                shares.zero_()[lanes.own] = own
            else:
                shares.zero_()
            if lanes.inside is not None:  # of each element one rank of the host has the sum, and the others zero
                dist.all_reduce(shares, group=lanes.inside)
            flat.copy_(shares.view(-1)[: flat.numel()])

    def _sum_(self, rows: torch.Tensor, pending: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Replace the rows, a piece for each rank of the group, by their sums over its ranks."""
        mine, elements = group.rank(), rows.shape[1]
        rows += pending
        sent = packed(rows, self._bits)
        torch.sub(rows, unpacked(sent, elements, self._bits), out=pending)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        parts = unpacked(received, elements, self._bits)
        parts[mine] = rows[mine]  # of its own piece this rank knows its part unrounded
        total = parts.sum(0, keepdim=True)
        sum_sent = packed(total, self._bits)
        torch.sub(total, unpacked(sum_sent, elements, self._bits), out=pending[mine : mine + 1])
        sums = torch.empty_like(sent)
        dist.all_gather(list(sums.unbind()), sum_sent[0], group=group)
        rows.copy_(unpacked(sums, elements, self._bits))
        # After an infinity or NaN, which make their whole blocks NaN everywhere, nothing of that is to remain here.
        torch.nan_to_num_(pending, nan=0.0, posinf=0.0, neginf=0.0)

    def _in_lanes(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat tensor with zeros at its end, as lanes of rows of elements: one row for each host."""
        lanes, hosts, whole = self._lanes.count, self._lanes.hosts, 32  # the scales behind them begin at a fourth byte
        elements = math.ceil(flat.numel() / (lanes * hosts * whole)) * whole
        padded = torch.nn.functional.pad(flat, (0, lanes * hosts * elements - flat.numel()))
        return padded.view(lanes, hosts, elements)

    def _begin(self, flats: Sequence[torch.Tensor]) -> None:
        loaded = self._loaded or [torch.zeros(())] * len(flats)
        self._loaded, self._sizes = [], [flat.numel() for flat in flats]
        own, hosts = min(self._lanes.own, self._lanes.count - 1), self._lanes.hosts
        for flat, pending in zip(flats, loaded, strict=True):
            whole = torch.zeros(flat.numel(), device=flat.device) + pending.to(flat.device)
            self._pending.append(self._in_lanes(whole)[own] / hosts)

    def settle(self) -> None:
        """Add up over the ranks what is pending; each host then has an equal part of it, as after a load."""
        if not self._pending:
            return  # no exchange since the last time
        self._loaded = []
        for pending, size in zip(self._pending, self._sizes, strict=True):
            whole = pending.new_zeros(self._lanes.count, *pending.shape)
            if self._lanes.across is not None:
                whole[self._lanes.own] = pending
            dist.all_reduce(whole, group=self._lanes.everyone)
            self._loaded.append(whole.view(-1)[:size])
        self._pending = []

    def state_dict(self) -> dict[str, Any]:
        return {"pending": list(self._loaded)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending, self._loaded = [], list(state.get("pending", []))


def packed(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of float32, a multiple of 32 long, as rows of bytes: integers of so many bits, then the scale of each block.

    Of fewer bits than eight, eight integers, one from each eighth of the row, lie in as many bytes as each has bits.
    """
    largest, count = (1 << (bits - 1)) - 1, rows.shape[0]
    blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).view(count, -1, BLOCK)
    scales = blocks.abs().amax(2) / largest
    inverses = torch.where(scales >= _SMALLEST, 1 / scales, torch.zeros_like(scales))
    scales = torch.where(scales < _SMALLEST, torch.zeros_like(scales), scales)
    # Where a number is infinite or NaN, its whole block becomes NaN by its scale, whatever the integers are.
    scales = torch.where(scales.isfinite(), scales, torch.full_like(scales, math.nan))
    numbers = (blocks * inverses.unsqueeze(2)).round_().to(torch.int8)
    numbers = numbers.view(count, -1)[:, : rows.shape[1]].contiguous()
    if bits == 8:
        integers = numbers.view(torch.uint8)
    else:
        eighths = (numbers.view(count, 8, -1) + largest).to(torch.int32)
        words = torch.zeros_like(eighths[:, 0])
        for place in range(8):
            words |= eighths[:, place] << (place * bits)
        integers = words.view(torch.uint8).view(count, -1, 4)[:, :, :bits]
    return torch.cat([integers.reshape(count, -1), scales.view(torch.uint8)], dim=1)


def unpacked(rows: torch.Tensor, elements: int, bits: int) -> torch.Tensor:
    """Rows of ``elements`` float32 each, as :func:`packed` has rounded them."""
    largest, count, nbytes = (1 << (bits - 1)) - 1, rows.shape[0], elements * bits // 8
    scales = rows[:, nbytes:].contiguous().view(torch.float32)
    if bits == 8:
        numbers = rows[:, :nbytes].contiguous().view(torch.int8).to(torch.float32)
    else:
        fours = torch.nn.functional.pad(rows[:, :nbytes].reshape(count, -1, bits), (0, 4 - bits)).contiguous()
        words = fours.view(count, -1).view(torch.int32)
        eighths = torch.empty(count, 8, elements // 8, device=rows.device)
        for place in range(8):
            eighths[:, place] = (words >> (place * bits)) & ((1 << bits) - 1)
        numbers = eighths.sub_(largest).view(count, -1)
    blocks = torch.nn.functional.pad(numbers, (0, -elements % BLOCK)).view(count, -1, BLOCK)
    return (blocks * scales.unsqueeze(2)).view(count, -1)[:, :elements].contiguous()
