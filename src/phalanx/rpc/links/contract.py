"""Messages, and the contract between a worker (``rpc/worker.py``) and its link to another process.

A message is a request, the answer to one, or a notice that nobody answers. It has a head, which ``codec.py`` makes, and
the memory of tensors beside it, so that a link can hand that on without a copy.

There are two kinds of link beside that to oneself: shared memory between processes of one host, and a proven TCP
connection. A link belongs to exactly two processes, in their present incarnations; when one of them ends, the link
ends, and another is made for the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_uint64
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from phalanx.errors import EncodingError
from phalanx.words import format_gib

if TYPE_CHECKING:
    from phalanx.rpc.peer import Peer

__all__ = [
    "Buffer",
    "Kind",
    "Link",
    "LinkEnded",
    "Message",
    "OwnLink",
    "Receiver",
    "SentToMany",
    "decode_service",
    "encode_service",
]

# Memory of a tensor or of another large object: C-contiguous, of bytes. A received one may be written to, and it stays
# valid as long as the object does.
Buffer = memoryview


class SentToMany(list[Buffer]):
    """The buffers of messages to several workers, which are the same but for their numbers.

    A link may make one copy of such a message that all receivers read. It is given up with
    :meth:`close`, when the last message has been sent; receivers keep what they have.

    Attributes:
        handle: names the copy; 0 if there is none. Its maker writes it here, because what a function returns could be
            lost: a signal's handler may raise as soon as it has returned.
        give_up: gives the copy up, and writes 0 there; None before there is one.
    """

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        super().__init__(buffers)
        self.handle = c_uint64()
        self.give_up: Callable[[c_uint64], None] | None = None

    def close(self) -> None:
        """Give the copy up."""
        if self.give_up is not None:
            self.give_up(self.handle)


class Kind(IntEnum):
    """Purpose of a message."""

    REQUEST = 1  # run something and answer
    ANSWER = 2  # what it returned
    FAILURE = 3  # what it raised
    NOTICE = 4  # like a request, without an answer: a cancellation, a receipt, the end of a stream


@dataclass(slots=True)
class Message:
    """One message.

    Attributes:
        kind: what it is for.
        call: the number of the request, unique among those of the process that made it; an answer has its request's.
        service: the name of what is asked for (``Worker.serve``); empty in an answer.
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
        """Number of bytes of the message, without what a link adds."""
        nbytes = len(self.head)
        for buffer in self.buffers:
            nbytes += buffer.nbytes
        return nbytes


class Receiver(Protocol):
    """The side of the worker: a link calls these from threads of its own."""

    def deliver(self, link: Link, message: Message, *, may_block: bool) -> None:
        """A message has come.

        Args:
            link: where it came from.
            message: the message. Its memory belongs to this worker from now on.
            may_block: whether another thread takes over the receiving if this call takes long. Then this worker may run
                what the message asks for on this thread; otherwise the call returns soon.
        """

    def ended(self, link: Link, why: str, *, left: bool = False) -> None:
        """The other process is gone, or the way to it. The link calls this once, after the last message.

        Args:
            link: the link.
            why: how that was noticed, for people: ``its process has ended``, ``the connection was reset``.
            left: the other process has said that it leaves.
        """


class Link(ABC):
    """A link to one other process.

    Messages of up to ``SMALL_BYTES`` may overtake larger ones on their way. Among the small ones, and among the
    large ones, the order is kept, and each arrives once. All methods may be called from any thread.
    """

    SMALL_BYTES = 64 * 1024
    LONGEST_HEAD = (1 << 32) - 1  # bytes
    MOST_BUFFERS = (1 << 32) - 1

    name: str  # for people: ``shared memory``, ``tcp``
    peer: Peer | None = None  # at the other end, from when this worker knows the link to its end
    silent_s = 0.0  # for how long its host has not acknowledged what was sent

    @abstractmethod
    def send(self, message: Message, timeout_s: float) -> None:
        """Send a message. When this returns, its memory may be changed.

        It waits while the other process is slow and as much is under way as the link holds (back-pressure).

        Raises:
            LinkEnded: the link has ended.
            TimeoutError: the other process has not made room in ``timeout_s`` seconds. The message will not arrive.
            EncodingError: the other process would refuse it; nothing of it was sent.
        """

    def check(self, message: Message) -> None:
        """Refuse what the other process would, before anything of it is sent; for messages that are not the usual ones.

        Raises:
            EncodingError: its head is too long, or it has too many buffers.
        """
        if len(message.head) > self.LONGEST_HEAD:
            raise EncodingError(
                f"a value cannot be sent by {self.name}: without its tensors it has {format_gib(len(message.head))}, "
                f"and at most {format_gib(self.LONGEST_HEAD)} are possible. Send numbers as tensors or numpy arrays, "
                f"which travel beside the rest, or the value in several calls"
            )
        if len(message.buffers) > self.MOST_BUFFERS:
            raise EncodingError(
                f"a value with {len(message.buffers)} tensors cannot be sent by {self.name}: at most "
                f"{self.MOST_BUFFERS} are possible. Stack small tensors, or send the value in several calls"
            )

    @abstractmethod
    def close(self) -> None:
        """End the link. What was sent before arrives; the other side is told at once."""

    def wait(self, done: Callable[[], bool], call: int, timeout_s: float) -> None:  # noqa: B027 - a default
        """Receive on this thread, in place of the link's own, until the answer to one call has been delivered.

        This only makes a waiting caller quicker: the default does nothing, and the caller then sleeps.

        Args:
            done: whether the answer has been delivered.
            call: the number of the call.
            timeout_s: how long to do so at most. It may return before.
        """


class LinkEnded(Exception):
    """The other process is gone, or the way to it. Its text says how that was noticed."""


class OwnLink(Link):
    """Messages to oneself. They are encoded as others are, so that a call has the same meaning wherever it runs.

    Args:
        receiver: takes what is sent.
    """

    name = "itself"

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._closed = False

    def send(self, message: Message, timeout_s: float) -> None:
        """See :class:`Link`."""
        if self._closed:
            raise LinkEnded("this process has closed it")
        copies = [memoryview(bytearray(buffer)) for buffer in message.buffers]
        copy = Message(message.kind, message.call, message.service, bytes(message.head), copies)
        self._receiver.deliver(self, copy, may_block=False)

    def close(self) -> None:
        """See :class:`Link`."""
        if not self._closed:
            self._closed = True
            self._receiver.ended(self, "this process has closed it")


@lru_cache(4096)
def encode_service(service: str) -> bytes:
    """Encode the name of a service."""
    return service.encode()


@lru_cache(4096)
def decode_service(name: bytes) -> str:
    """Decode the name of a service."""
    return name.decode()
