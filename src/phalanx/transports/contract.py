"""The contract between the c10d adapter and a transport.

A communicator moves contiguous CPU tensors between the ranks of one group. It knows nothing of torch's options,
nested lists, futures or process groups: ``adapter.py`` unpacks those, keeps the order of operations and runs the
asynchronous ones on a thread of its own. A new transport is one class that implements this one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

import torch

from phalanx.transports.layout import even_pieces, pieces

__all__ = ["SENT", "Communicator", "Message"]


class Message(ABC):
    """A send or receive under way. It holds its tensor until it is done.

    Attributes:
        done: it was done when it was called; where False, :meth:`test` knows.
    """

    done = False

    @abstractmethod
    def test(self, watch: bool = True) -> bool:
        """Whether it is done, after moving along what can be moved. Takes a millisecond at most.

        Args:
            watch: also look whether it can still come; if its peer has ended, the group breaks. Else it is left to
                whoever waits for the message to find that.

        Raises:
            PhalanxError: it failed; the same each time.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is done: True; or until ``timeout_s`` has passed: False, and it goes on.

        Without a timeout the group's own holds, and passing it breaks the group (CollectiveTimeout). Any number of
        threads may wait for one message; all get the same outcome.

        Raises:
            PhalanxError: it failed; the same each time. ClosedError: the group was destroyed before it was done.
        """

    def expect(self) -> None:
        """Somebody waits for it without calling :meth:`wait`: let the group's timeout count from now on."""
        return

    @property
    @abstractmethod
    def source(self) -> int:
        """The group rank a received message came from; only once it is done."""


class _Sent(Message):
    """A send that was done when it was called."""

    done = True

    def test(self, watch: bool = True) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    @property
    def source(self) -> int:
        return -1


SENT = _Sent()


class Communicator(ABC):
    """Blocking collectives and point-to-point messages over one group.

    A collective is called by every rank of the group, in the same order and with matching arguments, by one
    thread at a time. Tensors are contiguous, on the CPU, and may hold no elements; lists have one tensor per rank.
    What is written shares no memory with what is read, but for the cases that a method names.
    A method returns when this rank's part is done: its tensors may be read and reused.

    All methods raise :class:`~phalanx.errors.CollectiveMismatch`, :class:`~phalanx.errors.PeerLost` or
    :class:`~phalanx.errors.CollectiveTimeout`; after any of them the group is out of step, and every further
    call raises the same.

    Attributes:
        rank: this process's rank within the group.
        size: the number of ranks.
        engine: whose connections carry the bytes, for people; empty for its own.
    """

    rank: int
    size: int
    engine = ""

    @abstractmethod
    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        """Whether the reductions serve this dtype and operation (``ReduceOp.SUM.value``, …)."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        """Replace ``tensor`` by the reduction over all ranks, in rank order: the same bits everywhere."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        """The same on rank ``root`` only; on the others ``tensor`` stays as it is."""

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        """Reduce every rank's ``inputs[rank]`` into ``output``, which may be ``inputs[rank]``."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Replace ``tensor`` by the one of rank ``root``."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy ``tensor`` of rank r into ``outputs[r]``; ``outputs[rank]`` may be it."""

    @abstractmethod
    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        """The same on rank ``root`` only; the others give no ``outputs``."""

    @abstractmethod
    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        """Copy ``inputs[r]`` of rank ``root``, which alone gives them, into ``output`` of rank r; the root's may be
        ``inputs[root]``.
        """

    @abstractmethod
    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs[r]`` into ``outputs[rank]`` of rank r; each pair has a size of its own."""

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """``all_gather`` into one tensor: ``tensor`` of rank r becomes its r-th part of ``size`` equal ones."""
        self.all_gather(even_pieces(output, self.size), tensor)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: int) -> None:
        """``reduce_scatter`` of the ``size`` equal parts of one tensor; ``output`` may be this rank's part."""
        self.reduce_scatter(output, even_pieces(tensor, self.size), op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
    ) -> None:
        """``all_to_all`` of the parts of one tensor into those of another; part r has ``counts[r]`` elements."""
        self.all_to_all(pieces(output, output_counts), pieces(tensor, input_counts))

    def set_timeout(self, timeout: timedelta) -> None:  # noqa: B027 - the transports that wait for nobody have none
        """Let every operation that starts from now on wait this long for the others."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        """Start sending ``tensor`` to rank ``peer``. Any thread may call it, also beside a collective."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        """Start receiving into ``tensor`` from rank ``peer``, or from anyone. Messages of two ranks with one tag
        arrive in the order they were sent.
        """

    def rest(self) -> None:
        """Move messages along, and sleep until one may be done, for less than a tenth of a second."""
        time.sleep(0.002)

    @abstractmethod
    def end_messages(self) -> None:
        """Let no message move any more, and end every wait for one, on any thread, with ClosedError."""

    @abstractmethod
    def abort(self) -> None:
        """Break the group from any thread: calls under way, here and on the other ranks, raise at once."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory and descriptors. Safe to call twice; no call may follow."""
