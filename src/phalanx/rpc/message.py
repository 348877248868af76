"""What goes from one worker to another: a small head, and the memory of tensors beside it.

A message is a request, the answer to one, or a notice that nobody answers. The head is bytes that ``encoding.py``
makes; tensors never pass through pickle, and their memory travels beside the head, so that a way between two processes
can hand it on without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import c_uint64
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["Buffer", "Kind", "Message", "SentToMany"]

# Memory of a tensor or of another large object: C-contiguous, of bytes. A received one may be written to, and it stays
# valid as long as the object does.
Buffer = memoryview


class SentToMany(list[Buffer]):
    """The buffers of messages to several workers, which are the same but for their numbers.

    A way between processes may make one copy of such a message that all receivers read. It is given up with
    :meth:`close`, when the last message has been sent; receivers keep what they have.
    """

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        super().__init__(buffers)
        self._copies: dict[object, tuple[c_uint64, Callable[[c_uint64], None]]] = {}

    def copy_of(self, owner: object, make: Callable[[c_uint64], None], give_up: Callable[[c_uint64], None]) -> int:
        """The handle of ``owner``'s copy; 0 if none can be made.

        Args:
            owner: who can lend the copy.
            make: makes it if there is none, and writes its handle, which is 0 before. What it returned could be lost: a
                signal's handler may raise as soon as it has returned.
            give_up: gives it up, and writes 0 into the handle. May be called again.
        """
        if owner not in self._copies:
            handle = c_uint64()
            self._copies[owner] = handle, give_up
            make(handle)
        return self._copies[owner][0].value

    def close(self) -> None:
        """Give the copies up."""
        for handle, give_up in self._copies.values():
            give_up(handle)
        self._copies.clear()


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
