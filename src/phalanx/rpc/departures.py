"""Workers that have left, or are lost: who is told of it when this process has noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from phalanx.rpc.handlers import Handlers
from phalanx.rpc.members import Departure, Member, Members
from phalanx.words import tell

__all__ = ["Departures"]


class Departures:
    """Those that one agent notices. Safe to use from several threads.

    Args:
        members: who there is.
        handlers: the threads on which others are told, because that may take long.
    """

    def __init__(self, members: Members, handlers: Handlers) -> None:
        self._members, self._handlers = members, handlers
        self._watchers: list[Callable[[Member, str], None]] = []

    def watch(self, callback: Callable[[Member, str], None]) -> Callable[[], None]:
        """Have ``callback`` called with each worker and ``left`` or ``lost``.

        Returns:
            Ends that.
        """
        self._watchers.append(callback)

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._watchers.remove(callback)

        return forget

    def ended(self, peer: Member, departure: Departure) -> None:
        """The last link to a worker has ended."""
        self._members.note_gone(peer, departure)
        self._handlers.run(self._tell_watchers, peer, departure)
        # Beside that, because a store whose host is cut off takes long to fail.
        self._handlers.run(self._tell_store, peer, departure)

    def found(self, peer: Member) -> None:
        """Nobody listens at a worker's address."""
        self._handlers.run(self._tell_of, peer, Departure(False, "nothing listens at its address any more"))

    def _tell_of(self, peer: Member, departure: Departure) -> None:
        self._tell_store(peer, departure)
        self._tell_watchers(peer, self._members.gone(peer) or departure)  # it may have left, and said so there

    def _tell_store(self, peer: Member, departure: Departure) -> None:
        if not departure.left:  # else it has said so itself
            with contextlib.suppress(Exception):  # the store may be gone as well
                self._members.leave(peer, departure)

    def _tell_watchers(self, peer: Member, departure: Departure) -> None:
        how = "left" if departure.left else "lost"
        for watcher in list(self._watchers):
            try:
                watcher(peer, how)
            except Exception as error:
                tell(f"warning: what watches the workers failed for {peer}: {error!r}")
