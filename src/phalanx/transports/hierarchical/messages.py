"""Messages in a group over several hosts: the mail of the core, and the errors of those with ranks of other hosts.

The core matches and moves all messages of the group (``native/csrc/messages/``), by the group's numbers of the ranks:
through the rings of this host's segment, and to other hosts through connections (``connections.py``). Why a connection
has ended is asked here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from datetime import timedelta

from phalanx.diagnosis import recorder
from phalanx.diagnosis.reading import with_own_wait
from phalanx.errors import BackendError, CollectiveTimeout, PeerLost, PhalanxError
from phalanx.membership.abort import GroupAbort
from phalanx.native.core import End, SeenMessage, Status
from phalanx.transports.hierarchical.connections import RemoteMail
from phalanx.transports.hierarchical.engine import TransferFailed
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.reason import Reason
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.explanation import MessageEnd, unequal_ends

__all__ = ["HierarchicalMessages"]

LEAVING_S = 1.0  # how long a rank that leaves waits for connections for which it has messages


class HierarchicalMessages(RemoteMail):
    """The messages of one group. Any thread may use it.

    Args:
        layout: where the ranks are.
        local: the communicator of the ranks of this host.
        group, timeout: as for every mailbox with connections.
        reason: makes the errors of a group that is broken, or is to be.
    """

    def __init__(
        self, layout: Layout, local: SharedMemoryCommunicator, group: GroupAbort, timeout: timedelta, reason: Reason
    ) -> None:
        self._reason = reason
        super().__init__("messages", layout, group, timeout, local.mailbox)
        self.mailbox.elsewhere = self

    def dial(self, peer: int) -> None:
        """Connect to a rank that is not dialled yet in the background, as there is a message for it."""
        try:
            super().dial(peer)
        except BackendError as error:
            raise self.explain(error, f"send to rank {peer}") from None

    def error(self, status: int, peer: int | None, words: str, ends: tuple[End, str, End] | None) -> PhalanxError:
        """Make the error of a message of its status; it breaks the group, unless the peer has left in order."""
        if status == Status.OVERDUE:
            return self.explain(self._late(peer, words), words)
        if ends is not None and peer is not None:
            sent, line, own = ends
            at_sender = MessageEnd(peer, sent.nbytes, sent.dtype, line)
            here = MessageEnd(self._rank, own.nbytes, own.dtype, recorder.place_of(own.site))
            return self.explain(unequal_ends(at_sender, here), words)
        if self._group.fact is not None:  # and the peer left because of that
            return self.explain(TransferFailed(-1 if peer is None else peer), words)
        if peer is None:
            return with_own_wait(PeerLost.left_before_message(words))
        if status == Status.PEER_LEFT or self._group.has_left(peer):
            pid, host = self._group.pids[peer], self._layout.name(peer)
            return with_own_wait(PeerLost.left_before_message(words, group_rank=peer, pid=pid, host=host))
        return self.explain(TransferFailed(peer), words)

    def explain(self, found: BaseException, words: str) -> PhalanxError:
        """Make the error of a message that ends with the group, which is broken now if it was not."""
        return self._reason.call.error_of_message(self.mailbox.signals.pending or found, words)

    def _late(self, peer: int | None, words: str) -> CollectiveTimeout:
        limit_s = self._timeout_s
        if peer is None:
            message = f"{words} on rank {self._rank} of the group"
            return CollectiveTimeout.of_message(message, "any rank", limit_s, group_rank=-1, elapsed_s=limit_s)
        who, where = f"rank {peer} of the group on {self._layout.name(peer)}", f"rank {self._rank} was in {words}"
        return CollectiveTimeout.did_not_come(who, where, limit_s, group_rank=peer, elapsed_s=limit_s)

    # -- for who watches the ranks ---------------------------------------------------------------------

    def awaited(self) -> Collection[int]:
        """List the ranks of other hosts that somebody waits for a message of, or to; no answer waits for a rank."""
        return self._waiting()[0]

    def doing(self, about: Collection[int]) -> str:
        """Describe the message that this rank is in, rather one with these ranks; empty if there is none."""
        seen = self._waiting(about)[1]
        if seen is None:
            return ""
        end = MessageEnd(self._rank, seen.end.nbytes, seen.end.dtype, recorder.place_of(seen.end.site))
        return end.text("recv from" if seen.receiving else "send to", seen.peer if seen.peer < self._size else None)

    def _waiting(self, about: Collection[int] = ()) -> tuple[list[int], SeenMessage | None]:
        """The ranks of other hosts that are waited for, and one message, rather with these ranks, if there is one."""
        ranks = ctypes.create_string_buffer(bytes(2 * (rank in about) for rank in range(self._size)), self._size)
        seen, found = SeenMessage(), 0
        with self.mailbox as comm:
            if comm:
                found = self._core.phx_messages_waiting(comm, ranks, ctypes.byref(seen))
        return [rank for rank, marks in enumerate(ranks.raw) if marks & 1], seen if found else None

    # -- the end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """Let no message move any more; the other ranks hear that this one has left, after what it has sent."""
        if self.mailbox.ended:
            return
        if not self.mailbox.why_broken().status:
            self.await_dialled(LEAVING_S)
        if not self._reason.fails:
            self._group.leave()  # before the connections end: who finds none goes by what it was told
        self.stop(in_order=not self._reason.fails)

    def close(self, in_order: bool = False) -> None:
        self.end()
        super().close(in_order)

    def give_up(self) -> None:
        """:meth:`close` before the others have heard of this rank: the group could not be made."""
        super().close()
