"""The contract of an engine: what carries bytes between ranks of different hosts.

A lane joins one rank of each host. The communicator cuts what has to travel into one slice for each lane, so that the
lanes of a host share its link; an engine only moves contiguous bytes between two ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch

__all__ = ["SHORT_BYTES", "Engine", "PeerAbsent", "Transfer", "TransferFailed", "TransferLate"]

# Up to so many bytes a transfer comes in one piece, or very few: a wait for it begins and ends at once, and nobody has
# to help it along meanwhile.
SHORT_BYTES = 40 * 1024


class TransferFailed(Exception):
    """The rank at the other end of a transfer is gone, or the way to it; or the engine was aborted here.

    Attributes:
        peer: that rank.
    """

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class TransferLate(TransferFailed):
    """The rank at the other end has not come within the group's timeout."""


class PeerAbsent(TransferFailed):
    """The rank at the other end has left the group in order, and takes no part in anything any more."""


class Transfer(ABC):
    """A send or receive under way. It keeps its tensor alive."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it is done.

        Raises:
            TransferFailed, TransferLate: it is not.
        """

    def finish(self) -> None:
        """Return when it is done, where a transfer from the same rank is done that was sent later, and on the same way.

        The engine has been told where both go before they were sent, so the last byte of this one has come already.

        Raises:
            TransferFailed, TransferLate: it is not done.
        """
        self.wait()

    def wait_with(self, others: Sequence[Transfer], meanwhile: Callable[[], None] | None = None) -> None:
        """Return when it and other transfers of the same engine are done, which may be quicker than one by one.

        Args:
            others: those.
            meanwhile: is called once, on this thread, while they are under way.
        """
        if meanwhile is not None:
            meanwhile()
        self.wait()
        for other in others:
            other.wait()


class Contacts(Protocol):
    """See :meth:`phalanx.transports.hierarchical.reason.Reason.meet`."""

    def meet(self, peer: int, timeout_s: Callable[[], float], over: Callable[[], bool]) -> None:
        """Return when a rank has come as well, to connect with this one; or raise what says why it does not."""
        ...


class Engine(ABC):
    """Moves bytes between the ranks of one group.

    Attributes:
        name: the library, for people.
        first_contact: how it learns whether a rank comes with which it has never talked; None if nobody knows. Set
            once, before any rank of the group uses the engine for it.
    """

    name: str
    first_contact: Contacts | None = None

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Start to send a contiguous tensor to a rank. It may not change until the transfer is done.

        It may wait for the peer to connect. So that no circle of ranks waits for each other, each rank uses its peers
        for the first time in one order that all ranks share.

        Raises:
            TransferFailed: the ranks cannot be connected.
        """

    def send_kept(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """The same for a short tensor that its owner keeps until the peer has read it, as what it sends later shows."""
        return self.send(tensor, peer, tag)

    def outlive(self, transfers: Sequence[Transfer]) -> None:  # noqa: B027 - others have been waited for
        """Keep sends that :meth:`send_kept` has begun until they are on the wire, since their owner ends."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Start to receive into a contiguous tensor from a rank, in the order in which that rank sends with this tag.

        What is sent may be shorter than the tensor, and must not be longer. It may wait and fail as :meth:`send` does.
        """

    def recv_standing(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """The same for a message that may come long from now, or never: nothing looks for it until it is waited for."""
        return self.recv(tensor, peer, tag)

    @abstractmethod
    def set_timeout(self, timeout: timedelta) -> None:
        """How long a transfer that is waited for from now on may take."""

    @abstractmethod
    def abort(self) -> None:
        """End all transfers, here and at the peers, with an error."""

    @abstractmethod
    def close(self) -> None:
        """Give back connections and threads."""

    def give_back(self) -> None:  # noqa: B027 - most engines leave nothing to the interpreter's end
        """Give back what would disturb the interpreter's end, where the group has not been closed; no call follows."""
