"""The messages of one group, which the core matches and moves (``native/csrc/messages/mail.c``).

Inside a host they go through the rings of the group's segment, and to other hosts through connections
(``transports/hierarchical/messages.py``); who starts a message, or waits for it, need not know which.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref
from typing import TYPE_CHECKING

import torch

from phalanx.diagnosis import recorder
from phalanx.errors import BackendError, ClosedError, PeerLost, PhalanxError
from phalanx.native import core
from phalanx.native.core import ANY_SOURCE, TEXT_BYTES, Breakage, End, Status, library
from phalanx.native.signals import SignalPoll
from phalanx.system.host import machine_name
from phalanx.transports.contract import GLANCE_S, SENT, Message, with_site
from phalanx.transports.operands import DTYPES

if TYPE_CHECKING:
    from phalanx.transports.hierarchical.messages import HierarchicalMessages

__all__ = ["Mailbox", "SharedMemoryMessage"]

LEAVING_S = 1.0  # how long a group that closes waits for threads that are in a call about a message
NAP_S = 0.002


class Mailbox:
    """The messages of one group, and the one way to its handle for threads that are not in a collective.

    ``with mailbox as comm`` gives any thread the handle for a call of the core; 0 once the group is closed, as it is in
    a forked child. It first appends to ``inside``, then reads ``comm``. The thread that closes the group clears
    ``comm``, and waits until nobody is inside. (A list's append and pop are atomic.)

    Args:
        comm: the core's handle of the group.
        signals: what lets Python's signal handlers run while the core waits.
        explain: the error for the broken group, given what this rank was doing.
        names: what errors call the ranks, and what a message gives as its source.

    Attributes:
        elsewhere: the ranks of other hosts; None if there are none.
    """

    elsewhere: HierarchicalMessages | None = None

    def __init__(
        self, comm: int, signals: SignalPoll, explain: Callable[[str], PhalanxError], names: Sequence[int]
    ) -> None:
        self.core = library()
        self.comm, self.signals, self.explain, self.names = comm, signals, explain, names
        self.inside: list[None] = []
        self.ended = False
        self._finished = 0  # how many messages the core had finished when this rank last rested
        self._owned = [] if not comm else [comm]  # taken out once, by the thread that closes the group
        _open.add(self)

    def __enter__(self) -> int:
        """The core's handle for a call by any thread; 0 if the group is closed. It stays good inside the ``with``."""
        self.inside.append(None)
        return self.comm

    def __exit__(self, *exception: object) -> None:
        self.inside.pop()

    def group_fails(self, cause: str) -> None:
        """Tell the other ranks that this one is about to close the group because of an exception."""
        with self as comm:
            if comm:
                self.core.phx_group_fails(comm, cause.encode()[: TEXT_BYTES - 1])

    def why_broken(self) -> Breakage:
        """Why the group is broken; its status is ``OK`` while it is not, or when it has been closed."""
        why = Breakage()
        with self as comm:
            broken = comm and self.core.phx_breakage(comm, ctypes.byref(why))
        return why if broken else Breakage()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        """Start sending; most small messages are done at once."""
        with self as comm:
            if self.ended or not comm:
                raise ClosedError.of_message()
            if self.elsewhere is not None and peer in self.elsewhere.undialled:
                self.elsewhere.dial(peer)
            handle = self.core.phx_send(comm, tensor.data_ptr(), _end(tensor), peer, tag & 0xFFFFFFFF)
            return SENT if handle == core.SENT else SharedMemoryMessage(self, handle, tensor, "send to", peer)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        """Start receiving."""
        with self as comm:
            if self.ended or not comm:
                raise ClosedError.of_message()
            source = ANY_SOURCE if peer is None else peer
            handle = self.core.phx_recv(comm, tensor.data_ptr(), _end(tensor), source, tag & 0xFFFFFFFF)
            return SharedMemoryMessage(self, handle, tensor, "recv from", peer)

    def fail(self, handle: int, tensor: torch.Tensor, verb: str, peer: int) -> None:
        """Raise the error of a message that the core has ended, and give it back."""
        SharedMemoryMessage(self, handle, tensor, verb, peer).wait()

    def rest(self) -> None:
        """Move messages along, and sleep until one may be done."""
        if self.inside:
            time.sleep(NAP_S)  # a thread that waits moves all messages; two would contend for the core
            return
        with self as comm:
            if comm and not self.ended:
                self._finished = self.core.phx_messages_rest(comm, self._finished)

    def end(self, in_order: bool = False) -> None:
        """Let no message move any more, and end every wait; ``in_order`` tells other hosts that this rank has left."""
        with self as comm:
            if comm and not self.ended:
                self.ended = True
                self.core.phx_messages_end(comm, in_order)

    def take(self) -> int:
        """The handle, for the one thread that closes the group; 0 for every other."""
        try:
            return self._owned.pop()
        except IndexError:
            return 0

    def close(self) -> bool:
        """Wait until no thread has the handle any more; the messages have been ended.

        Returns:
            False if one stays inside: a signal handler that has interrupted it destroys the group.
        """
        self.comm = 0
        patience = time.monotonic() + LEAVING_S
        while self.inside and time.monotonic() < patience:
            time.sleep(GLANCE_S)
        return not self.inside


def _end(tensor: torch.Tensor) -> object:
    """This rank's end of a message that its program starts now, as the core reads it in the call."""
    return byref(End(tensor.nbytes, DTYPES[tensor.dtype], recorder.number_here()))


_open: weakref.WeakSet[Mailbox] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for mailbox in list(_open):
        mailbox.ended, mailbox.comm, mailbox.inside, mailbox._owned = True, 0, [], []


os.register_at_fork(after_in_child=_after_fork_in_child)


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
        with mailbox as comm:
            found = mailbox.core.phx_message_test(comm, handle, watch) if comm else 0
            if found > 0:
                self._heed(comm, mailbox.core.phx_message_wait(comm, handle, 1))
            elif mailbox.ended or not comm:
                self._heed(comm, Status.UNDER_WAY)
            elif found and mailbox.elsewhere is not None:  # UNMET
                mailbox.elsewhere.look_for(self._peer, if_gone=True)

    def _await(self, timeout_s: float | None) -> None:
        if not self._lock.acquire(timeout=timeout_s or -1):
            return
        mailbox = self._mailbox
        try:
            with mailbox as comm:
                if not self._settled:
                    status = Status.UNMET if comm else Status.UNDER_WAY
                    while status == Status.UNMET:
                        status = mailbox.core.phx_message_wait(comm, self._handle, int((timeout_s or 0) * 1e9))
                        if status == Status.UNMET and mailbox.elsewhere is not None:
                            mailbox.elsewhere.look_for(self._peer)
                    self._heed(comm, status)
        finally:
            self._lock.release()
        if self._error is not None and threading.current_thread() is threading.main_thread():
            mailbox.signals.raise_pending()  # what made the poll function stop the wait

    def _expect(self) -> None:
        mailbox = self._mailbox
        with mailbox as comm:
            if comm:
                mailbox.core.phx_message_expect(comm, self._handle)
        if mailbox.elsewhere is not None:
            mailbox.elsewhere.look_for(self._peer)

    def _heed(self, comm: int, status: int) -> None:
        """Settle the message if the core's status says that it is done, or it never will be."""
        mailbox = self._mailbox
        if status == Status.UNDER_WAY:
            if mailbox.ended:
                self._finish(comm, ClosedError.of_message())
        elif status == Status.OK:
            self._finish(comm, None, mailbox.names[mailbox.core.phx_message_source(self._handle)])
        else:
            error = PhalanxError(f"{self._text()} failed, and the group with it")
            try:
                error = self._error_of(status)
            finally:  # also when a second Ctrl-C cuts the explanation short
                self._finish(comm, error)

    def _error_of(self, status: int) -> PhalanxError:
        """The error of a message that has ended by itself (a negative status), or with its group."""
        mailbox, elsewhere = self._mailbox, self._mailbox.elsewhere
        if status > 0:
            return mailbox.explain(self._text())
        if elsewhere is None:
            return self._left()
        peer, ends = self._peer, None
        if peer is None and status == Status.CUT:
            peer = mailbox.core.phx_message_source(self._handle)
        if status == Status.DIFFERS:
            sent, expected = End(), End()
            line = mailbox.core.phx_message_ends(self._handle, byref(sent), byref(expected))
            peer, ends = mailbox.core.phx_message_source(self._handle), (sent, line.decode(errors="replace"), expected)
        return elsewhere.error(status, peer, with_site(self._text()), ends)

    def _left(self) -> PeerLost:
        """The error for a message whose peer left the group in order: the other messages of the group go on."""
        waiting = with_site(self._text())
        if self._peer is None:
            return PeerLost.left_before_message(waiting)
        peer, pid = self._mailbox.names[self._peer], ctypes.c_uint32()
        with self._mailbox as comm:
            if comm:
                self._mailbox.core.phx_going(comm, self._peer, byref(pid))
        return PeerLost.left_before_message(waiting, group_rank=peer, pid=pid.value, host=machine_name())

    def _name_of(self, peer: int) -> int:
        return self._mailbox.names[peer]

    def _finish(self, comm: int, error: PhalanxError | None, source: int = -1) -> None:
        if comm:
            self._mailbox.core.phx_message_free(comm, self._handle)
        self._settle(error, source)
