"""The error for a message whose two ends differ: a rank sends something else than the other one receives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from phalanx.errors import CollectiveMismatch
from phalanx.transports.shm.numbers import DTYPE_NUMBERS
from phalanx.watch.call_site import shown
from phalanx.watch.calls import dtype_name

__all__ = ["MessageEnd", "ends_of", "unequal_ends"]

_DTYPES = {number: dtype for dtype, (_, number) in DTYPE_NUMBERS.items()}


class MessageEnd(NamedTuple):
    """What one rank gave for a message.

    Attributes:
        rank: what the group's errors call that rank.
        nbytes: of its tensor.
        dtype: the core's number for copies of it.
        site: the line of its program, by its number in that rank's flight recorder; 0 if it is not known.
    """

    rank: int
    nbytes: int
    dtype: int
    site: int

    def text(self, verb: str, other: int, line: str) -> str:
        """It in words, as ``send to rank 1, float32[8] at train.py:5``, whatever the shape of these 8 elements."""
        dtype = _DTYPES.get(self.dtype)
        what = f"{self.nbytes} bytes" if dtype is None else f"{dtype_name(dtype)}[{self.nbytes // dtype.itemsize}]"
        return f"{verb} rank {other}, {what}" + (f" at {shown(line)}" if line else "")


def unequal_ends(sent: MessageEnd, received: MessageEnd, lines: Mapping[tuple[int, int], str]) -> CollectiveMismatch:
    """The error, which is the same on every rank.

    Args:
        sent, received: the two ends.
        lines: by rank and ``site``, as ``file:line``; those that are not known may be missing.
    """
    sending = sent.text("send to", received.rank, lines.get((sent.rank, sent.site), ""))
    receiving = received.text("recv from", sent.rank, lines.get((received.rank, received.site), ""))
    error = CollectiveMismatch.of_message_ends(
        f"  rank {sent.rank}: {sending}\n  rank {received.rank}: {receiving}",
        {sent.rank: sending} | {received.rank: receiving},
    )
    error.ends = sent, received
    return error


def ends_of(error: BaseException) -> tuple[MessageEnd, MessageEnd] | None:
    """The two ends, if this is such an error."""
    ends = error.ends if isinstance(error, CollectiveMismatch) else ()
    return (MessageEnd(*ends[0]), MessageEnd(*ends[1])) if ends else None
