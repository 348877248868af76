"""The error for a message whose two ends differ: a rank sends something else than the other one receives."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.diagnosis.call_site import dtype_name, shown
from phalanx.errors import CollectiveMismatch
from phalanx.transports.shm.numbers import DTYPE_NUMBERS

__all__ = ["MessageEnd", "ends_of", "unequal_ends"]

_DTYPES = {number: dtype for dtype, (_, number) in DTYPE_NUMBERS.items()}


class MessageEnd(NamedTuple):
    """What one rank gave for a message.

    Attributes:
        rank: what the group's errors call that rank.
        nbytes: of its tensor.
        dtype: the core's number for copies of it. A complex tensor travels as pairs of floats, and is named as such.
        line: of its program, as ``file:line``; empty if it is not known.
    """

    rank: int
    nbytes: int
    dtype: int
    line: str

    def text(self, verb: str, other: int | None) -> str:
        """It in words, as ``send to rank 1, float32[8] at train.py:5``, whatever the shape of these 8 elements."""
        dtype = _DTYPES.get(self.dtype)
        what = f"{self.nbytes} bytes" if dtype is None else f"{dtype_name(dtype)}[{self.nbytes // dtype.itemsize}]"
        peer = "any rank" if other is None else f"rank {other}"
        return f"{verb} {peer}, {what}" + (f" at {shown(self.line)}" if self.line else "")


def unequal_ends(sent: MessageEnd, received: MessageEnd) -> CollectiveMismatch:
    """The error, which is the same on every rank."""
    sending, receiving = sent.text("send to", received.rank), received.text("recv from", sent.rank)
    calls = {sent.rank: sending, received.rank: receiving}
    if sent.rank == received.rank:
        calls = {sent.rank: f"{sending}; {receiving}"}
    error = CollectiveMismatch.of_message_ends(
        f"  rank {sent.rank}: {sending}\n  rank {received.rank}: {receiving}", calls
    )
    error.ends = sent, received
    return error


def ends_of(error: BaseException) -> tuple[MessageEnd, MessageEnd] | None:
    """The two ends, if this is such an error."""
    ends = error.ends if isinstance(error, CollectiveMismatch) else ()
    return (MessageEnd(*ends[0]), MessageEnd(*ends[1])) if ends else None
