"""A rank's input and output, from its keeper's side: pipes on which the keeper never blocks."""

from __future__ import annotations

import os

from phalanx.launch.relay.channel import ERR, OUT

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
        input: the keeper's end of the input; -1 when it has ended, or nobody reads it any more.
        last_errors: the last bytes of its standard error.
    """

    def __init__(self, *, fed: bool) -> None:
        out_read, self.rank_out = os.pipe()
        err_read, self.rank_err = os.pipe()
        self.outputs = {out_read: OUT, err_read: ERR}
        self.input = -1
        if fed:
            self.rank_input, self.input = os.pipe()
        else:
            self.rank_input = os.open(os.devnull, os.O_RDONLY)
        self.last_errors = b""
        self._waiting = b""

    @property
    def hungry(self) -> bool:
        """Whether something waits to be written to the input."""
        return bool(self._waiting)

    def own_ends(self) -> list[int]:
        """The keeper's ends that are open."""
        return [*self.outputs, *([self.input] if self.input >= 0 else [])]

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
        self.close_input()
        return left

    def feed(self, data: bytes = b"") -> bool:
        """Write to the input as much as it takes; return whether all has been taken, so that more is welcome."""
        if self.input < 0:
            return False
        self._waiting += data
        try:
            written = os.write(self.input, self._waiting) if self._waiting else 0
        except BlockingIOError:
            return False
        except OSError:
            written = 0
        if not written:
            # Nobody reads any more.
            self.close_input()
            return False
        self._waiting = self._waiting[written:]
        return not self._waiting

    def close_input(self) -> None:
        """The input has ended."""
        if self.input >= 0:
            os.close(self.input)
        self.input = -1
        self._waiting = b""
