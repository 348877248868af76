"""The messages of one group over shared memory, through the rings of its segment (``native/csrc/p2p.c``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from phalanx.errors import BackendError, ClosedError, PhalanxError
from phalanx.native.core import ANY_SOURCE, Status, library
from phalanx.native.signals import SignalPoll
from phalanx.transports.contract import GLANCE_S, SENT, Message

__all__ = ["Mailbox", "SharedMemoryMessage"]

LEAVING_S = 1.0  # how long a group that closes waits for threads that are in a call about a message
NAP_S = 0.002


class Mailbox:
    """The messages of one group.

    Threads share it as follows. A thread appends to ``inside`` before it calls the core for a message, and only then
    reads ``comm``, once, and ``ended``; it pops its entry when it has left the core. The thread that closes the group
    does both in the other order: it sets ``ended``, clears ``comm``, and then waits until nobody is inside. So a
    thread either finds that the group is closed, or is waited for. (A list's append and pop are atomic.)

    Args:
        comm: the core's handle of the group.
        signals: what lets Python's signal handlers run while the core waits.
        explain: the error for the broken group, given what this rank was doing.
    """

    def __init__(self, comm: int, signals: SignalPoll, explain: Callable[[str], PhalanxError]) -> None:
        self.core = library()
        self.comm, self.signals, self.explain = comm, signals, explain
        self.inside: list[None] = []
        self.ended = False
        self._finished = 0  # how many messages the core had finished when this rank last rested

    def send(self, tensor: torch.Tensor, dtype: int, peer: int, tag: int) -> Message:
        """Start sending; most small messages are done at once. ``dtype`` is the core's number."""
        inside = self.inside
        inside.append(None)
        try:
            comm = self.comm
            if self.ended or not comm:
                raise ClosedError.of_message()
            what = (comm, tensor.data_ptr(), tensor.nbytes, dtype, peer, tag & 0xFFFFFFFF)
            if self.core.phx_send_now(*what):
                return SENT
            return SharedMemoryMessage(self, self.core.phx_send(*what), tensor, "send to", peer)
        finally:
            inside.pop()

    def recv(self, tensor: torch.Tensor, dtype: int, peer: int | None, tag: int) -> Message:
        """Start receiving."""
        inside = self.inside
        inside.append(None)
        try:
            comm = self.comm
            if self.ended or not comm:
                raise ClosedError.of_message()
            source = ANY_SOURCE if peer is None else peer
            handle = self.core.phx_recv(comm, tensor.data_ptr(), tensor.nbytes, dtype, source, tag & 0xFFFFFFFF)
            return SharedMemoryMessage(self, handle, tensor, "recv from", peer)
        finally:
            inside.pop()

    def rest(self) -> None:
        """Move messages along, and sleep until one may be done."""
        inside = self.inside
        if inside:
            time.sleep(NAP_S)  # a thread that waits moves all messages; two would contend for the core
            return
        inside.append(None)
        try:
            comm = self.comm
            if comm and not self.ended:
                self._finished = self.core.phx_messages_rest(comm, self._finished)
        finally:
            inside.pop()

    def end(self) -> None:
        """Let no message move any more, and end every wait for one."""
        if not self.ended:
            self.ended = True
            self.core.phx_messages_end(self.comm)

    def close(self) -> bool:
        """End the messages and wait until no thread is in the core for one.

        Returns:
            False if one stays inside: it waits for a message, and a signal handler that has interrupted it destroys the
            group, so it cannot come back before this returns.
        """
        self.end()
        self.comm = 0
        patience = time.monotonic() + LEAVING_S
        while self.inside and time.monotonic() < patience:
            time.sleep(GLANCE_S)
        return not self.inside


class SharedMemoryMessage(Message):
    """A message of the core, by its handle, which is read and given back under the message's lock."""

    def __init__(self, mailbox: Mailbox, handle: int | None, tensor: torch.Tensor, verb: str, peer: int | None) -> None:
        if not handle:
            raise BackendError(
                f"the core refused a message ({verb} rank {peer}): there is no memory for it, or its tensor has no "
                "memory of its own, such as a wrapper around others: give those instead"
            )
        super().__init__(tensor, verb, peer)
        self._mailbox = mailbox
        self._handle = handle

    def _poll(self, watch: bool) -> None:
        mailbox, handle = self._mailbox, self._handle
        mailbox.inside.append(None)
        try:
            comm = mailbox.comm
            if not comm:
                self._heed(comm, Status.UNDER_WAY)
            elif mailbox.core.phx_message_test(comm, handle, watch):
                self._heed(comm, mailbox.core.phx_message_wait(comm, handle, 1))
            elif mailbox.ended:
                self._heed(comm, Status.UNDER_WAY)
        finally:
            mailbox.inside.pop()

    def _await(self, timeout_s: float | None) -> None:
        if not self._lock.acquire(timeout=timeout_s or -1):
            return
        mailbox = self._mailbox
        mailbox.inside.append(None)
        try:
            if not self._settled:
                comm, status = mailbox.comm, Status.UNDER_WAY
                if comm:
                    status = mailbox.core.phx_message_wait(comm, self._handle, int((timeout_s or 0) * 1e9))
                self._heed(comm, status)
        finally:
            mailbox.inside.pop()
            self._lock.release()
        if self._error is not None and threading.current_thread() is threading.main_thread():
            mailbox.signals.raise_pending()  # what made the poll function stop the wait

    def _expect(self) -> None:
        mailbox = self._mailbox
        mailbox.inside.append(None)
        try:
            comm = mailbox.comm
            if comm:
                mailbox.core.phx_message_expect(comm, self._handle)
        finally:
            mailbox.inside.pop()

    def _heed(self, comm: int, status: int) -> None:
        """Settle the message if the core's status says that it is done, or it never will be."""
        mailbox = self._mailbox
        if status == Status.UNDER_WAY:
            if mailbox.ended:
                self._finish(comm, ClosedError.of_message())
        elif status:
            error = PhalanxError(f"{self._text()} failed, and the group with it")
            try:
                error = mailbox.explain(self._text())
            finally:  # also when a second Ctrl-C cuts the explanation short
                self._finish(comm, error)
        else:
            self._finish(comm, None, mailbox.core.phx_message_source(self._handle))

    def _finish(self, comm: int, error: PhalanxError | None, source: int = -1) -> None:
        if comm:
            self._mailbox.core.phx_message_free(comm, self._handle)
        self._settle(error, source)
