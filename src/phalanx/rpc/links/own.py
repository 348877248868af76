"""The way from a worker to itself."""

from __future__ import annotations

from phalanx.rpc.links.contract import Link, LinkEnded, Receiver
from phalanx.rpc.message import Message

__all__ = ["OwnLink"]


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
