"""What goes from one worker to another: a small head, and the memory of tensors beside it.

A message is a request, the answer to one, or a notice that nobody answers. The head is bytes that ``encoding.py``
makes; tensors never pass through pickle, and their memory travels beside the head, so that a way between two processes
can hand it on without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["Buffer", "Kind", "Message"]

# Memory of a tensor or of another large object: C-contiguous, of bytes. A received one may be written to, and it stays
# valid as long as the object does.
Buffer = memoryview


class Kind(IntEnum):
    """What a message is for."""

    REQUEST = 1  # run something and answer
    ANSWER = 2  # what it returned
    FAILURE = 3  # what it raised
    NOTICE = 4  # like a request, without an answer: a cancellation, a lease, one item of a stream


@dataclass(slots=True)
class Message:
    """One message.

    Attributes:
        kind: what it is for.
        call: the number of the request, unique among those of the process that made it; an answer has its request's.
        service: the name of what is asked for (``Agent.serve``); empty in an answer.
        head: what was pickled, or what the typed encoding wrote.
        buffers: the memory beside it.
    """

    kind: Kind
    call: int
    service: str
    head: bytes | memoryview
    buffers: Sequence[Buffer] = field(default=())

    @property
    def nbytes(self) -> int:
        """How many bytes the message has, without what a way between processes adds."""
        nbytes = len(self.head)
        for buffer in self.buffers:
            nbytes += buffer.nbytes
        return nbytes
