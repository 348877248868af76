"""Presence of workers: ``rpc.workers``, ``rpc.describe``, and ``rpc.watch``.

A watch has a link to each worker that it watches, so it learns at once of one that is lost. Of those that come it
learns from the store, which it asks one small question every ``LOOK_S`` seconds; who watches nobody asks nothing.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from phalanx.rpc import session
from phalanx.rpc.members import Member
from phalanx.rpc.worker import Worker
from phalanx.system.threads import TimedQueue, start
from phalanx.topology.table import format_table
from phalanx.words import format_count, tell
from phalanx.wrong_arguments import require

__all__ = ["Watch", "describe", "watch", "workers"]

LOOK_S = 0.25  # the pause between two looks
Callback = Callable[[Member, str], None]


def workers() -> list[Member]:
    """Return all workers that are there, by rank and name, this one among them; those that are no rank at the end.

    It asks the job's store, which costs about as much as an empty call. A worker that was killed is left out as soon as
    somebody has noticed; ``rpc.watch`` notices by itself.

    Raises:
        ClosedError: this process is not a worker.
    """
    return session.worker().directory.all()


def describe() -> str:
    """Return the workers as a table: name, rank, host, pid, and address. One process is enough to call it.

    ``World.describe`` has the ranks only. Here are also the workers that are no rank, such as a parameter server that
    was started by itself.

    Raises:
        ClosedError: this process is not a worker.
    """
    me = session.worker().me
    lines = [
        {
            "worker": f"{member.name} (this one)" if member.incarnation == me.incarnation else member.name,
            "rank": "none" if member.rank < 0 else str(member.rank),
            "host": member.host,
            "pid": str(member.pid),
            "address": f"{member.address}:{member.port}",
        }
        for member in workers()
    ]
    return format_table(lines, title=format_count(len(lines), "worker"), text_columns=("worker", "host", "address"))


class Watch:
    """A watch that was begun by :func:`watch`."""

    def __init__(self, worker: Worker, callback: Callback, to: str | int | Member | None) -> None:
        self._worker, self._callback, self._to = worker, callback, to
        self._there: dict[int, Member] = {}
        self._over: set[int] = set()  # incarnations whose end has been told, and those that are not watched
        self._changes: TimedQueue[tuple[Member, str] | None] = TimedQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="phalanx-rpc-watch", daemon=True)
        self._forget = worker.on_change(lambda member, event: self._changes.put((member, event)))
        self._forget_end = worker.on_close(self.stop)
        try:
            start(self._thread)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Call the callback no more. When this returns, it is not running, unless it is the one that calls this."""
        self._stopped = True
        self._forget()
        self._forget_end()
        self._changes.put(None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopped:
            try:
                change = self._changes.get(due - time.monotonic())
            except queue.Empty:
                with contextlib.suppress(Exception):  # the store is gone, or this worker ends
                    self._look()
                due = time.monotonic() + LOOK_S
                continue
            if change is not None:
                self._note_end(*change)

    def _look(self) -> None:
        for member in self._worker.directory.all():
            if member.incarnation in self._there or member.incarnation in self._over:
                continue
            if not self._is_watched(member):
                self._over.add(member.incarnation)
            elif not self._stopped:
                self._there[member.incarnation] = member
                self._tell(member, "came")
        for member in list(self._there.values()):
            if self._stopped:
                return
            if (departure := self._worker.reach(member, session.REACH_S)) is not None:
                self._note_end(member, "left" if departure.left else "lost")

    def _is_watched(self, member: Member) -> bool:
        to = self._to
        if isinstance(to, Member):
            return member.incarnation == to.incarnation
        if to is None:
            return member != self._worker.me
        return to == (member.name if isinstance(to, str) else member.rank)

    def _note_end(self, member: Member, event: str) -> None:
        if member.incarnation in self._over or not self._is_watched(member):
            return
        if self._there.pop(member.incarnation, None) is None:
            self._tell(member, "came")  # it was there for less time than passes between two looks
        self._over.add(member.incarnation)
        self._tell(member, event)

    def _tell(self, member: Member, event: str) -> None:
        if self._stopped:
            return
        try:
            self._callback(member, event)
        except Exception as error:
            tell(f"warning: the callback of rpc.watch() failed for {member}, which {event}: {error!r}")


def watch(callback: Callback, to: str | int | Member | None = None) -> Watch:
    """Have a function called when workers come and go, until ``stop()`` of what this returns, or ``rpc.shutdown()``.

    Args:
        callback: is called with a :class:`Member` and ``came``, ``left`` (it called ``rpc.shutdown()``) or ``lost`` (it
            died, or its host did, or the way to it was cut), on a thread of this watch, one call at a time. A worker
            that is there already is told as ``came`` at the beginning. Each incarnation comes once, and goes once.
        to: a worker's name or rank, also of those that come later; or a ``Member``, which is that incarnation only; all
            other workers if None.

    Returns:
        The watch; ``stop()`` ends it.

    Raises:
        ArgumentError: ``callback`` cannot be called.
        BackendError: the system gives this process no more threads.
    """
    require(watch, callback, to)
    return Watch(session.worker(), callback, to)
