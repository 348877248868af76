"""A rank's input and output, from its keeper's side: pipes on which the keeper never blocks."""

from __future__ import annotations

import os

from phalanx.launch.relay.channel import ERR, OUT
from phalanx.launch.relay.feed import Feed

__all__ = ["Streams"]

_BLOCK = 1 << 16
# How much an ended rank may have left in a pipe (its size is at most this); more than that comes from another process.
LARGEST_REMAINDER = 1 << 20
_MOST_REMEMBERED = 1 << 14


class Streams:
    """The three standard streams of one rank.

    Args:
        fed: whether its input is handed on from the launcher's; otherwise it is empty.

    Attributes:
        rank_input, rank_out, rank_err: the rank's own ends.
        outputs: the keeper's ends of the two outputs that are still open, with the kind of their frames.
        feed: the keeper's end of the input.
        last_errors: the last bytes of its standard error.
    """

    def __init__(self, *, fed: bool) -> None:
        out_read, self.rank_out = os.pipe()
        err_read, self.rank_err = os.pipe()
        self.outputs = {out_read: OUT, err_read: ERR}
        if fed:
            self.rank_input, fed_by = os.pipe()
            self.feed = Feed(fed_by)
        else:
            self.rank_input = os.open(os.devnull, os.O_RDONLY)
            self.feed = Feed()
        self.last_errors = b""

    def own_ends(self) -> list[int]:
        """The keeper's ends that are open."""
        return [*self.outputs, *([self.feed.descriptor] if self.feed.descriptor >= 0 else [])]

    def keep_own_ends(self) -> None:
        """In the keeper, after the fork: close the rank's ends, so that they end with the rank."""
        for descriptor in (self.rank_input, self.rank_out, self.rank_err):
            os.close(descriptor)
        for descriptor in self.own_ends():
            os.set_blocking(descriptor, False)

    def keep_rank_ends(self) -> None:
        """In the rank: take the input; the two outputs are taken with everything else that makes a rank."""
        os.dup2(self.rank_input, 0)
        for descriptor in (self.rank_input, *self.own_ends()):
            os.close(descriptor)

    def read(self, descriptor: int) -> tuple[bytes, bytes]:
        """One block of an output, with its kind; an empty one if there is nothing now, or never will be."""
        kind = self.outputs[descriptor]
        try:
            data = os.read(descriptor, _BLOCK)
        except BlockingIOError:
            return kind, b""
        if not data:
            del self.outputs[descriptor]
            os.close(descriptor)
        elif kind == ERR:
            self.last_errors = (self.last_errors + data)[-_MOST_REMEMBERED:]
        return kind, data

    def drain(self) -> list[tuple[bytes, bytes]]:
        """The blocks that an ended rank has left in its outputs, each with its kind; closes the outputs."""
        left = []
        for descriptor in list(self.outputs):
            taken = 0
            while descriptor in self.outputs and taken < LARGEST_REMAINDER:
                kind, data = self.read(descriptor)
                if not data:
                    break
                taken += len(data)
                left.append((kind, data))
            if descriptor in self.outputs:
                del self.outputs[descriptor]
                os.close(descriptor)
        self.feed.close()
        return left
