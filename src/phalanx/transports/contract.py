"""The contract between the process groups of ``c10d/`` and a transport.

A communicator moves contiguous CPU tensors between the ranks of one group. ``c10d/collectives.py`` unpacks torch's
options and lists, and ``c10d/progress.py`` keeps the order of operations. A new transport is a class that implements
the abstract methods here; the others have defaults that are made of them. In which order it
adds it says by a trait, which the suite of the contract (``tests/world/contract.py``) reads.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

import torch

from phalanx.diagnosis import recorder
from phalanx.diagnosis.call_site import call_site, dtype_name
from phalanx.errors import ClosedError
from phalanx.transports.operands import even_pieces, pieces

__all__ = ["COLLECTIVES", "GLANCE_S", "SENT", "Communicator", "Message", "message_text", "with_site"]

# The collectives that ranks distinguish when they compare their calls, each with the argument that is its root. Forms
# with one tensor for all ranks (all_gather_single, ...) count as those with lists, so ranks may mix them.
COLLECTIVES = {
    "all_reduce": "",
    "reduce": "dst",
    "reduce_scatter": "",
    "broadcast": "src",
    "all_gather": "",
    "gather": "dst",
    "scatter": "src",
    "all_to_all": "",
    "barrier": "",
}

GLANCE_S = 0.001  # how long a test of a message waits for a thread that tests it too


class Message(ABC):
    """A send or receive under way. It holds its tensor until it is done, and keeps its outcome.

    Each transport has a subclass, which implements :meth:`_poll` and :meth:`_await`; both call :meth:`_settle` when the
    message is done.

    ======================  ======================  ===========================  ================================
    field                   writer                  readers                      guard
    ======================  ======================  ===========================  ================================
    ``_tensor``             ``_settle``, once       who asks the transport       ``_lock``
    ``_error``, ``source``  ``_settle``, once       any thread, once settled     ``_lock``; none once settled
    ``_settled``            ``_settle``, last       any thread                   none
    ``_forks``              its maker               any thread, before the lock  none: a child may not take the lock
    ======================  ======================  ===========================  ================================

    Args:
        tensor: what is sent, or received into.
        verb: ``send to`` or ``recv from``.
        peer: the other rank; None for any.

    Attributes:
        done: True if it completed inside the call that started it. False says nothing: ask :meth:`test`.
        source: the group rank that a received message came from; only once it is done.
    """

    done = False
    source = -1

    def __init__(self, tensor: torch.Tensor, verb: str, peer: int | None) -> None:
        self._lock = threading.Lock()
        self._forks = _forks
        self._tensor: torch.Tensor | None = tensor
        self._verb, self._peer = verb, peer
        self._error: Exception | None = None
        self._settled = False
        self._record = 0

    def test(self, watch: bool = True) -> bool:
        """Return whether it is done, after moving along what can be moved; it raises if it failed, the same each time.

        Args:
            watch: break the group if the peer is gone or the timeout has passed. Otherwise the first ``wait`` does.
        """
        self._refuse_in_child()
        # A thread that has the lock either tests too, which takes microseconds, or waits, which takes long.
        if not self._settled and self._lock.acquire(timeout=GLANCE_S):
            try:
                if not self._settled:
                    self._poll(watch)
            finally:
                self._lock.release()
        return self._outcome()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is done: True; or until ``timeout_s`` has passed: False, and it goes on.

        Without ``timeout_s`` the group's own timeout applies, and passing it breaks the group (CollectiveTimeout). All
        threads that wait get the same outcome.
        """
        if not self._settled:
            self._refuse_in_child()
            self._await(timeout_s)
        return self._outcome()

    def expect(self) -> None:
        """Start the group's timeout for this message: somebody holds its future, and so waits without :meth:`wait`."""
        self._refuse_in_child()
        with self._lock:
            if not self._settled:
                self._expect()

    def _refuse_in_child(self) -> None:
        if self._forks != _forks and not self._settled:
            raise ClosedError.of_parent("this message", os.getpid())

    @abstractmethod
    def _poll(self, watch: bool) -> None:
        """Settle it if it is done now; see :meth:`test`. Called with the lock."""

    @abstractmethod
    def _await(self, timeout_s: float | None) -> None:
        """Return when it is settled, or the time has passed; see :meth:`wait`. Called without the lock."""

    def _expect(self) -> None:  # noqa: B027 - where the timeout counts from the start, there is nothing to do
        """See :meth:`expect`. Called with the lock."""

    def _settle(self, error: Exception | None, source: int = -1) -> None:
        """Record the outcome and drop the tensor. Called once, with the lock."""
        self._error, self.source, self._tensor = error, source, None
        self._settled = True  # last: see above
        if self._record:
            recorder.end(self._record, error is not None)

    def recorded_as(self, record: int) -> None:
        """Have the flight recorder know when it is done. Called once, by the thread that started it."""
        self._record = record  # first: a thread that settles it now may miss it, and then finds it settled here
        if self._settled:
            recorder.end(record, self._error is not None)

    def _outcome(self) -> bool:
        if not self._settled:
            return False
        if self._error is not None:
            raise self._error
        return True

    def _text(self) -> str:
        """``send to rank 3, float32[4]``. Called with the lock, before it is settled."""
        return message_text(self._verb, "" if self._peer is None else str(self._name_of(self._peer)), self._tensor)

    def _name_of(self, peer: int) -> int:
        """Return what errors call a peer, where the transport counts ranks otherwise than the group."""
        return peer


def message_text(verb: str, peer: str, tensor: torch.Tensor | None) -> str:
    """A message in words: ``send to rank 3, float32[4]``; an empty ``peer`` is any, and no tensor one not known."""
    shape = "" if tensor is None else f", {dtype_name(tensor.dtype)}{list(tensor.shape)}"
    return f"{verb} {f'rank {peer}' if peer else 'any rank'}{shape}"


def with_site(words: str, site: str | None = None) -> str:
    """Add the line of the program that makes a call to its words: by default this thread's; none if it is not known."""
    site = call_site() if site is None else site
    return f"{words} at {site}" if site else words


_forks = 0  # changed only in a forked child, when it has one thread


def _after_fork_in_child() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Sent(Message):
    """A send that was done when it was called."""

    done = True

    def __init__(self) -> None:
        super().__init__(torch.empty(0), "send to", None)
        self._settle(None)

    def _poll(self, watch: bool) -> None:
        """It is settled."""

    def _await(self, timeout_s: float | None) -> None:
        """It is settled."""


SENT = _Sent()


class Communicator(ABC):
    """Blocking collectives and point-to-point messages over one group.

    A collective is called by every rank of the group, in the same order and with matching arguments, by one thread at a
    time. Tensors are contiguous, on the CPU, and may hold no elements; lists have one tensor per rank. Memory that is
    written is not read in the same call, but for the cases that a method names. A method returns when this rank's
    tensors may be read and reused.

    All methods raise CollectiveMismatch, on every rank and with the calls of all, PeerLost or CollectiveTimeout; after
    any of them every further call raises the same.

    Attributes:
        rank: this process's rank within the group.
        size: the number of ranks.
        engine: what carries the bytes, as ``shared memory and TCP``; empty on one host, and over MPI.
        rank_order_sums: trait: floats are added in rank order, 16-bit ones in 32 bits and rounded once, so the bits are
            the same on every rank and in every run. Otherwise the order is the transport's own.
    """

    rank: int
    size: int
    engine = ""
    rank_order_sums = True

    # -- what every transport implements -----------------------------------------------------------

    @abstractmethod
    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        """Return whether the reductions serve this dtype and operation (``ReduceOp.SUM.value``, …)."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        """Replace ``tensor`` by the reduction over all ranks; in which order, :attr:`rank_order_sums` says."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        """``all_reduce`` on rank ``root`` only; on the others ``tensor`` stays as it is."""

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
        """``all_gather`` on rank ``root`` only; the others give no ``outputs``."""

    @abstractmethod
    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        """Copy ``inputs[r]`` of ``root``, which alone gives them, into ``output`` of rank r, which may be the same."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs[r]`` into ``outputs[rank]`` of rank r; each pair has a size of its own."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        """Start sending ``tensor`` to rank ``peer``. Any thread may call it, also beside a collective."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        """Start receiving from rank ``peer``, or from any; messages with one tag arrive as they were sent."""

    @abstractmethod
    def end_messages(self) -> None:
        """Let no message move any more, and end every wait for one, on any thread, with ClosedError."""

    def compare_rest(self, patience_s: float) -> None:  # noqa: B027 - most have nothing left to compare
        """Compare the last calls of the ranks, before the group is closed; raise what this rank has not been told.

        Called by a thread that is alone in the group. Waits at most ``patience_s`` for ranks that are behind.
        """

    def group_fails(self, error: BaseException, cause: str) -> None:  # noqa: B027 - some have nobody to tell
        """Tell the other ranks that an exception is why this one closes the group; ``cause`` is what they read."""

    def leave(self) -> list[threading.Thread]:
        """Ask the transport's own threads to end, whatever is under way: the process exits. Returns them."""
        return []

    def give_back(self) -> None:  # noqa: B027 - most transports leave nothing to the interpreter's end
        """Give back what would disturb the interpreter's end; called after :meth:`leave`, and no call follows."""

    @abstractmethod
    def abort(self, doing: str = "") -> None:
        """Break the group from any thread: calls under way, here and elsewhere, raise; ``doing`` is told to others."""

    def give_up(self, tensor: torch.Tensor, doing: str) -> None:
        """Break the group, since a message may have been begun of which nobody knows; see :meth:`abort`.

        Its owner keeps its tensor until the group is closed. A transport that may use that longer keeps it too.
        """
        self.abort(doing)

    @abstractmethod
    def close(self) -> None:
        """Give back memory and descriptors. Safe to call twice; no call may follow."""

    # -- what has a default ------------------------------------------------------------------------

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: int) -> None:
        """``reduce_scatter`` of the ``size`` equal parts of one tensor; ``output`` may be this rank's part."""
        self.reduce_scatter(output, even_pieces(tensor, self.size), op)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """``all_gather`` into one tensor: ``tensor`` of rank r becomes its r-th part of ``size`` equal ones."""
        self.all_gather(even_pieces(output, self.size), tensor)

    def gather_single(self, output: torch.Tensor | None, tensor: torch.Tensor, root: int) -> None:
        """``gather`` into one tensor, as :meth:`all_gather_single`; ranks other than ``root`` give none."""
        self.gather(None if output is None else even_pieces(output, self.size), tensor, root)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
    ) -> None:
        """``all_to_all`` of the parts of one tensor into those of another; part r has ``counts[r]`` elements."""
        self.all_to_all(pieces(output, output_counts), pieces(tensor, input_counts))

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory for tensors that :meth:`all_reduce` sums quickest. Every rank calls it, with a size of its own."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def set_timeout(self, timeout: timedelta, of_messages: timedelta | None = None) -> None:  # noqa: B027
        """Let operations that start from now on wait this long for the others; ``of_messages`` is that of messages."""

    def rest(self) -> None:
        """Move messages along, and sleep until one may be done, for less than a tenth of a second."""
        time.sleep(0.0005)  # MPI wakes nobody when a message has come
