"""The engine that carries a group's collectives between hosts: messages of the core in a mailbox of their own.

It has connections of its own, so that no collective waits behind a message of the program. What is sent is raw bytes,
in the order of the calls with one tag. With the tag :data:`FRAMES` a receive may have room for more than what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from datetime import timedelta

import torch

from phalanx.errors import BackendError
from phalanx.membership.abort import GroupAbort
from phalanx.native.core import SENT, End, Status
from phalanx.transports.hierarchical.connections import RemoteMail
from phalanx.transports.hierarchical.layout import Layout

__all__ = ["FRAMES", "Engine", "Transfer", "TransferFailed"]

FRAMES = 0  # the tag of the leaders' frames
_RAW, _EXACT = 0, 1  # dtypes: of bytes that may be fewer than there is room for, and of others


class TransferFailed(Exception):
    """A transfer has failed, or the engine was aborted here.

    Attributes:
        peer: the rank at the other end; -1 if it is not known.
        status: the core's: ``OVERDUE`` if nothing was moved within the group's timeout, ``PEER_LEFT`` if the peer has
            left the group in order, ``DIFFERS`` if it has sent what is not expected, else ``CUT``.
    """

    def __init__(self, peer: int, status: int = Status.CUT) -> None:
        super().__init__(f"a transfer has failed (status {status})")
        self.peer, self.status = peer, status


class Transfer:
    """A send or receive under way. It keeps its tensor alive.

    Args:
        engine: that carries it.
        handle: of the core's message; 0 if it was done when it was called.
        tensor, peer: what is moved, and the rank at the other end.
    """

    __slots__ = ("_engine", "_handle", "peer", "tensor")

    def __init__(self, engine: Engine, handle: int, tensor: torch.Tensor, peer: int) -> None:
        self._engine, self._handle, self.tensor, self.peer = engine, handle, tensor, peer

    def wait(self) -> None:
        """Return when it is done, or raise :class:`TransferFailed`."""
        handle, self._handle = self._handle, 0
        if handle:
            self._engine.finish(handle, self.peer)


class Engine(RemoteMail):
    """Transfers between the ranks of a group that are on different hosts. One thread at a time makes them.

    A tensor may not change until its transfer is done. After an error the group is broken.
    """

    _spin = 0  # where ranks share cores, yielding took up to twenty times as long as sleeping on the connection

    def __init__(self, layout: Layout, group: GroupAbort, timeout: timedelta) -> None:
        super().__init__("collectives", layout, group, timeout)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Begin to send a contiguous tensor."""
        with self.mailbox as comm:
            if peer in self.undialled:
                self.dial(peer)
            return self._begun(self._core.phx_send(*self._message(comm, tensor, peer, tag)), tensor, peer)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Begin to receive into a contiguous tensor."""
        with self.mailbox as comm:
            return self._begun(self._core.phx_recv(*self._message(comm, tensor, peer, tag)), tensor, peer)

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Return when all of them are done, or raise :class:`TransferFailed`."""
        for each in transfers:
            each.wait()

    def finish(self, handle: int, peer: int) -> None:
        """Return when a message of the core is done, and give it back; see :meth:`Transfer.wait`."""
        with self.mailbox as comm:
            status = Status.UNMET if comm else Status.UNDER_WAY
            while status == Status.UNMET:
                status = self._core.phx_message_wait(comm, handle, 0)
                if status == Status.UNMET:
                    self.look_for(peer)
            if comm:
                self._core.phx_message_free(comm, handle)
        if status != Status.OK:
            self.mailbox.signals.raise_pending()
            raise TransferFailed(peer, status)

    def _message(self, comm: int, tensor: torch.Tensor, peer: int, tag: int) -> tuple[object, ...]:
        if not comm:
            raise TransferFailed(peer)
        return comm, tensor.data_ptr(), byref(End(tensor.nbytes, _EXACT if tag else _RAW, 0)), peer, tag

    def _begun(self, handle: int | None, tensor: torch.Tensor, peer: int) -> Transfer:
        if not handle:
            raise BackendError("there is no memory for a message between hosts")
        return Transfer(self, 0 if handle == SENT else handle, tensor, peer)
