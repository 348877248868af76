"""Why messages between hosts end without being done, and the errors that say so."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from phalanx.diagnosis.ends import note_left
from phalanx.diagnosis.reading import with_own_wait
from phalanx.errors import BackendError, CollectiveTimeout, PeerLost, PhalanxError
from phalanx.system.threads import wait_awake
from phalanx.transports.hierarchical.gloo_engine import TransferFailed, TransferLate
from phalanx.transports.hierarchical.layout import Layout

__all__ = ["BreaksGroup", "BrokenThere", "Ends", "NoThread", "PeerLeft"]

TOLD_S = 3.0  # how long to wait for the reason why the group is broken, which another rank is about to tell
ASK_S = 0.05


class BrokenThere(TransferFailed):
    """Another rank has found the group broken."""


class NoThread(TransferFailed):
    """This rank can start no thread that brings the messages of a peer."""


class BreaksGroup(Exception):
    """What ends a message is an error of the whole group."""

    def __init__(self, error: PhalanxError) -> None:
        super().__init__(str(error))
        self.error = error


class PeerLeft(Exception):
    """A rank has left the group in order."""

    def __init__(self, peer: int) -> None:
        super().__init__()
        self.peer = peer


class Ends:
    """The errors of the messages of one group. Any thread may ask.

    Args:
        layout: where the ranks are.
        rank: this process's rank in the group.
        break_group: the error for a group that is broken, or is to be, given what was found and what this rank was
            doing.
        broken: whether a rank has told why the group is broken.
        left: which of some ranks have told that they left in order.
        timeout_s: how long a message may take.
        pid_of: the process id of a rank.
        maker: in whose name errors about ranks that left are noted.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        break_group: Callable[[BaseException, str], PhalanxError],
        broken: Callable[[], bool],
        left: Callable[[Collection[int]], Collection[int]],
        timeout_s: Callable[[], float],
        pid_of: Callable[[int], int],
        maker: object,
    ) -> None:
        self._pid_of, self._maker = pid_of, maker
        self._layout, self._rank, self._left, self._timeout_s = layout, rank, left, timeout_s
        self.break_group, self.broken = break_group, broken

    def error(self, found: Exception, waiting: str) -> PhalanxError:
        """The error of a message, given why it ended and what it is in words, with its line."""
        if isinstance(found, NoThread):
            return self.break_group(BackendError(str(found)), waiting)
        if isinstance(found, TransferFailed) and not isinstance(found, BrokenThere) and self._left([found.peer]):
            found = PeerLeft(found.peer)
        if isinstance(found, PeerLeft) and self.broken():  # before it left, perhaps by that rank
            found = BrokenThere(found.peer, "the group is broken")
        if isinstance(found, PeerLeft):
            host = self._layout.name(found.peer)
            lost = PeerLost.left_before_message(waiting, group_rank=found.peer, pid=self._pid_of(found.peer), host=host)
            error = with_own_wait(lost)
            note_left(error, self._maker, found.peer)
            return error
        if isinstance(found, TransferLate):  # Gloo's own patience, with which it connects two ranks
            return self.break_group(self.late(found.peer, waiting, self._timeout_s()), waiting)
        if isinstance(found, BreaksGroup):
            return self.break_group(found.error, waiting)
        if isinstance(found, BrokenThere):
            wait_awake(self._is_told, TOLD_S)
        return self.break_group(found, waiting)

    def late(self, peer: int | None, waiting: str, timeout_s: float) -> CollectiveTimeout:
        """The error of a message whose time is over."""
        if peer is None:
            message = f"{waiting} on rank {self._rank} of the group"
            return CollectiveTimeout.of_message(message, "any rank", timeout_s, group_rank=-1, elapsed_s=timeout_s)
        return CollectiveTimeout.did_not_come(
            f"rank {peer} of the group on {self._layout.name(peer)}",
            f"rank {self._rank} was in {waiting}",
            timeout_s,
            group_rank=peer,
            elapsed_s=timeout_s,
        )

    def _is_told(self, slice_s: float) -> bool:
        """Whether another rank has told why the group is broken; False after a moment."""
        if self.broken():
            return True
        time.sleep(min(slice_s, ASK_S))
        return False
