"""How a group over several hosts breaks, so that every rank raises the same reason.

The rank that finds something wrong writes down why, and aborts its host's memory and its own connections. The others
learn it by the shortest way that is open: from the job's store, from a rank of another host (``lookout.py``), or from
the segment of their host (``guard.py``). The store may be on a host that cannot be reached, so each question to it has
a limit. ``departing.py`` says who deletes what stands there.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta

from torch._C._distributed_c10d import Store

from phalanx.diagnosis.ends import cause_of_going, who_left
from phalanx.diagnosis.reading import with_own_wait
from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from phalanx.membership.client import peek
from phalanx.transports.contract import Communicator
from phalanx.transports.gone import ENDED, FAILED, LEFT, Gone
from phalanx.transports.hierarchical.asking import Questions
from phalanx.transports.hierarchical.calls import Differs, EndsDiffer, History, LeftOut
from phalanx.transports.hierarchical.crossing import Crossed
from phalanx.transports.hierarchical.departing import AWAY, depart
from phalanx.transports.hierarchical.guard import Guard, Messages
from phalanx.transports.hierarchical.lane import PeerAbsent, TransferFailed, TransferLate
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.whereabouts import PATIENCE_S, PROMPT_S, Found, Note, Whereabouts
from phalanx.transports.hierarchical.wording import KNOWN_BESIDE, Fact, awaited_elsewhere, late, late_message, lost, who
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.unequal_ends import MessageEnd, ends_of, unequal_ends

__all__ = ["Reason"]

LOOK_S = 0.02
# In characters, each of which is up to 12 bytes of JSON; a lookout's message has at most 64 KiB.
_LONGEST_TEXT = 4000


class Reason:
    """Why a group broke, as its ranks share it. Every rank of the group makes one, at the same point.

    Args:
        store: the group's own part of the job's store.
        rank: this process's rank in the group.
        layout: where the ranks are.
        local: the communicator of this host's ranks.
        abort: wakes the ranks that wait for this one, and this one's waits for others; a method, kept weakly as well.
        aborted: whether a rank of this host has done so.
        timeout: for all ranks to come.
        world: the group is the world, so the store is to say which ranks have gone.

    Attributes:
        history: this rank's last collectives; set once, before :meth:`watch`.
        fails: an exception that nobody caught ends this rank's script.
        guard: this rank's watch of the others.
        questions: puts this rank's questions to the store; carries out none once this rank has departed.
    """

    history: History

    def __init__(
        self,
        store: Store,
        rank: int,
        layout: Layout,
        local: Communicator,
        abort: Callable[[], None],
        aborted: Callable[[], bool],
        timeout: timedelta,
        *,
        world: bool = False,
    ) -> None:
        self._world = world
        self._store, self._rank, self._layout, self._abort, self._aborted = store, rank, layout, abort, aborted
        self._local = local
        self.fails = False
        self._found_at_end: Fact | None = None
        self.questions = Questions()
        self.guard = Guard(
            store, layout, rank, local, abort, self._read_store, self._tell_ended, self._tell_place, timeout
        )
        self._whereabouts = Whereabouts(store, rank, layout, self.guard.pids, self.questions)

    def attend(self, messages: Messages) -> None:
        """Judge the ranks that messages wait for as well, and tell the others which message this rank is in."""
        self.guard.attend(messages)

    def watch(self) -> None:
        """Watch the ranks of other hosts from now on: everything is there that a break needs."""
        self.guard.watch()

    def begin(self) -> None:
        """This rank is in a collective from now on."""
        guard = self.guard
        guard.calls += 1
        guard.inside = True

    def end(self) -> None:
        """This rank is in no collective any more."""
        self.guard.inside = False

    def close(self) -> None:
        """This rank leaves the group."""
        self.guard.close()

    def depart(self, forget: Callable[[int], None], forget_gone: Callable[[int], None], at_exit: bool = False) -> None:
        """This rank has closed all that it had of the group. The last rank to do so deletes the group's keys.

        Nothing of this one reads or writes them from now on.

        Args:
            forget, forget_gone: see :func:`phalanx.transports.hierarchical.departing.depart`.
            at_exit: the process ends, so this waits until it is done, for a limited time.
        """
        close = self.questions.close_at_exit if at_exit else self.questions.close
        size, ended = self.guard.size, self.guard.ended_ranks
        close(lambda *goes_on: depart(self._store, self._rank, size, ended(), forget, forget_gone, *goes_on))

    def error(self, error: BaseException, call: str, timeout_s: float, of_message: bool = False) -> BaseException:
        """What this rank raises.

        Args:
            error: what it has found.
            call: what it was doing.
            timeout_s: the group's timeout.
            of_message: this was a message, not a collective.
        """
        self.guard.read_segment()
        known = self.guard.reason
        if known is None and self._aborted():
            known = self.guard.wait(PROMPT_S)  # the store is slower, if it cannot be reached
        if known is not None and known["kind"] == "lost":
            self.questions.aside(lambda: self._tell(known))
            return with_own_wait(self._raised(known, error, call, timeout_s, of_message))
        kind, before = ("message", 0) if of_message else ("call", 1)
        self._whereabouts.write(kind, self._doing(call, before))
        self.guard.has_told |= not of_message
        found = self.guard.reason or self._found(error, of_message)
        if found is not None:
            fact = self._tell(found)
        elif (written := self.questions.ask(self._written)) is not None:
            fact = self.guard.know(written)
        else:  # a consequence of what another rank has found, which tells it at once; or nobody else can
            if isinstance(error, TransferFailed):
                self.guard.failed_peer = error.peer
            self._abort()
            told = self._told()
            # A peer that is there has ended its transfers because of another rank, and guesses which at the same time
            # as this one would guess that peer. One of this host that has aborted the group knows better as well.
            peer_is_there = isinstance(error, TransferFailed) and self.guard.is_here(error.peer)
            if told is None and (peer_is_there or isinstance(error, PeerLost)):
                told = self._told()
            fact = told or self._tell(self._guessed(error))
        self._abort()
        return with_own_wait(self._raised(fact, error, call, timeout_s, of_message))

    def _raised(self, fact: Fact, error: BaseException, call: str, timeout_s: float, of_message: bool) -> BaseException:
        """What this rank raises for a reason."""
        if not isinstance(error, Exception):
            return error
        if fact["kind"] == "differs" and "ends" in fact:
            sent, received = (MessageEnd(*end) for end in self._in_full(fact)["ends"])
            return unequal_ends(sent, received)
        if fact["kind"] == "differs":
            return self._gather(call, with_later_calls=True).mismatch(fact.get("at", -1))
        if fact["kind"] == "late" and fact["what"] == "message":
            if fact["by"] == self._rank and isinstance(error, CollectiveTimeout):
                return error
            return late_message(fact, self._rank, call)
        if fact["kind"] == "late" and of_message:
            found = self._gather(call)
            theirs, places = "", dict[int, str]()
            if fact["by"] in found.calls:
                number, theirs, _ = found.calls[fact["by"]]
                places = found.behind(number)
                places.pop(self._rank, None)
            who = (self._layout, self.guard.pids, self._rank)
            return awaited_elsewhere(fact, theirs, places, found.standing, *who, call, timeout_s)
        if fact["kind"] == "late":
            found = self._gather(call)
            places = found.behind(self.guard.calls)
            return late(places, found.standing, self._layout, self.guard.pids, self._rank, call, timeout_s)
        if fact["kind"] == "failed" and fact["by"] == self._rank:
            return error
        return lost(self._with_what_is_known_beside(fact), self._layout, self.guard.pids, self._rank, call)

    def _in_full(self, fact: Fact) -> Fact:
        """A segment may have had no room for the lines of a message's ends; the store, which was told before, had."""
        if all(line for *_, line in fact["ends"]):
            return fact
        written = self.questions.ask(self._written)
        return written if written is not None and "ends" in written else fact

    def _with_what_is_known_beside(self, fact: Fact) -> Fact:
        """Another host's ranks see that a rank has ended; those beside it, and the launcher, know more and say so.

        Who has noticed it first says why the group broke, and that may be a rank of another host.
        """
        rank = fact["group_rank"]
        if fact["what"] not in ("ended", "failed"):
            return fact
        host, place = self._layout.place(rank)
        if host != self._layout.host:
            if any(name in fact for name in KNOWN_BESIDE):
                return fact
            heard = self._whereabouts.heard_of(rank)
            return {**fact, "what": "ended", **heard} if heard else fact
        if fact["what"] == "failed" or not isinstance(self._local, SharedMemoryCommunicator):
            return fact
        known = self._local.ended(place, self.guard.pids[rank])
        self._whereabouts.tell_beside(rank, known)
        return {**fact, **known}

    def about_to_fail(self, error: BaseException) -> None:
        """An exception is about to end this rank's script: if that is for a rank that has left, it is the reason."""
        left = who_left(error, self)
        if left is None and isinstance(self._local, SharedMemoryCommunicator):
            left = self._local.who_left(error)
        if left is not None and self.guard.reason is None:
            self._found_at_end = self.guard.know({**self._fact("lost", "", left[0]), "what": "left"})

    def script_fails(self, cause: str) -> None:
        """This rank's script fails: to the others it must not look as if it had left."""
        self.fails = True
        known = self.guard.reason
        if known is None or known is self._found_at_end:
            self._tell(known or {**self._fact("lost", cause, self._rank), "what": "raised"})
        if self._world:
            self.questions.say(lambda: self._write_gone(self._rank, FAILED, cause))

    def is_told(self) -> bool:
        """Whether a rank has broken the group, as far as this one can know."""
        return self.guard.reason is not None or bool(self.questions.ask(lambda: self._store.check(["broken"])))

    def told(self) -> Fact | None:
        """Why a rank has broken the group, as far as this one can know."""
        self.guard.read_segment()
        written = None if self.guard.reason is not None else self.questions.ask(self._written)
        return self.guard.reason if written is None else self.guard.know(written)

    def tell_left(self, but_for: Collection[int] = ()) -> None:
        """This rank has left in order, and answers no message any more; nothing is told of one whose script failed.

        Args:
            but_for: ranks for which messages of this one may still be on their way.
        """
        if self.fails:
            return
        key, value = f"left/{self._rank}", json.dumps([*but_for])

        def tell() -> None:
            self._store.set(key, value)
            if self._world:
                self._store.set(AWAY, "")

        # A store that is late is told as well, since others may wait for this rank when it answers again.
        self.questions.ask(tell, anyway=True)

    def pid_of(self, rank: int) -> int:
        """The process id of a rank."""
        return self.guard.pids[rank]

    def left(self, ranks: Collection[int]) -> list[int]:
        """Those of these ranks that have left, and whose messages for this one have come, as far as the store says."""

        def look() -> list[int]:
            said = {rank: peek(self._store, f"left/{rank}") for rank in ranks}
            return [rank for rank, but_for in said.items() if but_for and self._rank not in json.loads(but_for)]

        return self.questions.ask(look) or []

    def unwanting(self, ranks: Collection[int]) -> list[int]:
        """Those of these ranks that take no message any more, as they have left, or the group is broken."""
        return list(ranks) if self.is_told() else self.questions.ask(lambda: self._leaving(ranks)) or []

    def cannot_come(self, rank: int) -> bool:
        """Whether a rank of another host does nothing for this one any more: it has ended or left, or the group broke.

        One that has left its last group answers as little as one that has ended, and may still have messages for this
        rank. It writes that it leaves before it ceases to answer, so the store is asked afterwards. Any thread may ask.
        """
        silent = self.guard.is_silent_for_good(rank)
        return self.is_told() or bool(self.left([rank])) or (silent and not self.unwanting([rank]))

    def _leaving(self, ranks: Collection[int]) -> list[int]:
        return [rank for rank in ranks if self._store.check([f"left/{rank}"])]

    def gone(self, ranks: Collection[int]) -> dict[int, Gone]:
        """Those of these ranks that have gone, as far as this rank sees it, or another one or the store says it.

        A rank that leaves, or whose script fails, writes so into the store before it ends; if it dies before it could,
        it has ended. That it has ended is written by each rank that watches it, of which there is one on every other
        host, so one that dies before it has written it is not missed. ``AWAY`` is written after any of these, so that
        one question is enough while all are there. Only the world's ranks write these keys, and the keys stay as long
        as the other keys of the world. A rank that has closed the world knows nothing of it any more.
        """
        if self.guard.ended:
            return {}
        away = self.guard.away
        found = {rank: (away[rank], "") for rank in ranks if rank in away}

        def look() -> None:
            if not self._store.check([AWAY]):
                return
            for rank in self._leaving(ranks):
                found[rank] = LEFT, ""
            for rank in ranks:
                if said := peek(self._store, f"gone/{rank}"):
                    way, text = json.loads(said)
                    if way == FAILED or rank not in found:
                        found[rank] = way, text

        self.questions.ask(look)
        self.guard.read_segment()
        reason = self.guard.reason or {}
        if reason.get("what") == "raised" and reason["group_rank"] in ranks:
            found[reason["group_rank"]] = FAILED, reason["text"]
        pids = self.guard.pids
        return {rank: Gone(pids[rank], self._layout.name(rank), *found[rank]) for rank in ranks if rank in found}

    def _write_gone(self, rank: int, way: str, text: str) -> None:
        self._store.compare_set(f"gone/{rank}", "", json.dumps([way, text[:_LONGEST_TEXT]]))
        self._store.set(AWAY, "")

    def _tell_ended(self, ranks: Collection[int]) -> None:
        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the store has gone with rank 0
                for rank in ranks:
                    self._write_gone(rank, ENDED, "")

        if self._world:
            self.questions.aside(tell)

    # -- what has happened -------------------------------------------------------------------------

    def _found(self, error: BaseException, of_message: bool) -> Fact | None:
        """The reason that an error of this rank is; None if it may be a consequence of what another has found."""
        ends = error.ends if isinstance(error, EndsDiffer) else ends_of(error)
        if ends is not None:
            return {**self._fact("differs", "", -1), "at": -1, "ends": ends}
        if isinstance(error, (Differs, Crossed, CollectiveMismatch)):
            at = -1 if of_message else self.guard.calls - self.history.is_late()
            return {**self._fact("differs", "", -1), "at": at}
        if isinstance(error, LeftOut):
            return {**self._fact("lost", "", error.group_rank), "what": "left", "at": self.guard.calls}
        if isinstance(error, CollectiveTimeout) and of_message:
            # A rank of this host whose own time is over says which operation it was in, and how long it has waited.
            local = self._local
            elsewhere = isinstance(local, SharedMemoryCommunicator) and local.timed_out_elsewhere
            return None if elsewhere else self._late_message(error)
        if isinstance(error, (CollectiveTimeout, TransferLate)):
            return self._fact("late", "", -1)
        if isinstance(error, TransferFailed):
            return {**self._fact("lost", "", error.peer), "what": "left"} if isinstance(error, PeerAbsent) else None
        if isinstance(error, PeerLost):
            if self._aborted():
                return None
            if error.signal:
                # In the words that ranks of other hosts have for an end. Its own would say twice which rank was where.
                return self._with_what_is_known_beside({**self._fact("lost", "", error.group_rank), "what": "ended"})
            known = {name: getattr(error, name) for name in KNOWN_BESIDE}
            return {**self._fact("lost", self._here(error), error.group_rank), **known}
        self_named = f"rank {self._rank} of the group on {self._layout.name(self._rank)}"
        if isinstance(error, Exception):
            return self._fact("failed", f"{self_named} has failed ({cause_of_going(error)})", self._rank)
        return self._fact("interrupted", f"{self_named} was interrupted ({type(error).__name__})", self._rank)

    def _guessed(self, error: BaseException) -> Fact:
        """The reason as far as this rank can know it alone."""
        if isinstance(error, TransferFailed) and self.guard.is_here(error.peer):
            peer = who([error.peer], self._layout, self.guard.pids)
            why = "The connection is cut, or another rank gave up and did not say why in time"
            return self._fact("lost", f"a transfer to or from {peer}, which is there, failed. {why}", -1)
        if isinstance(error, TransferFailed) and error.peer >= 0:
            return {**self._fact("lost", "", error.peer), "what": "failed"}
        if isinstance(error, TransferFailed):
            return self._fact("lost", "a rank of the group gave up, and did not say why in time", -1)
        if isinstance(error, CollectiveTimeout):
            return self._late_message(error)
        return self._fact("lost", str(error), getattr(error, "group_rank", -1))

    def _late_message(self, error: CollectiveTimeout) -> Fact:
        return {**self._fact("late", self._here(error), error.group_rank), "what": "message"}

    def _here(self, error: Exception) -> str:
        return f"On {self._layout.name(self._rank)}: {error}"

    def _fact(self, kind: str, text: str, group_rank: int) -> Fact:
        return {"kind": kind, "what": "", "text": text[:_LONGEST_TEXT], "group_rank": group_rank, "by": self._rank}

    # -- how it spreads ----------------------------------------------------------------------------

    def _tell(self, fact: Fact) -> Fact:
        """Write down a reason; the one that was written first is what counts."""
        said = self.questions.say(lambda: self._store.compare_set("broken", "", json.dumps(fact)))
        return self.guard.know(json.loads(said) if said else fact)

    def _written(self) -> Fact | None:
        """The reason that stands in the store; it may have to be waited for."""
        said = peek(self._store, "broken")
        return json.loads(said) if said else None

    def _read_store(self, ranks: Collection[int]) -> None:
        def read() -> None:
            with contextlib.suppress(RuntimeError):  # it has gone with rank 0
                if (written := self._written()) is not None:
                    self.guard.know(written)
                for rank in self._leaving(ranks):
                    self.guard.know_left(rank)
            self.guard.know_store(ranks)

        self.questions.aside(read)

    def _told(self) -> Fact | None:
        """The reason that another rank has found, from whoever says it first."""
        heard = threading.Event()

        def ask() -> None:
            until = time.monotonic() + PATIENCE_S
            with contextlib.suppress(RuntimeError):
                while not heard.wait(LOOK_S) and time.monotonic() < until:
                    if (written := self._written()) is not None:
                        self.guard.know(written)
                        return

        self.questions.aside(ask)
        try:
            return self.guard.wait(PATIENCE_S)
        finally:
            heard.set()

    # -- what the ranks were doing -----------------------------------------------------------------

    def _tell_place(self, place: str, message: str) -> None:
        kind, text = ("message", message) if message else ("place", place)
        self._whereabouts.write_aside(kind, self._doing(text, 0))

    def _gather(self, own: str, *, with_later_calls: bool = False) -> Found:
        return self._whereabouts.gather(self._doing(own, 1), with_later_calls=with_later_calls)

    def _doing(self, text: str, before: int) -> Note:
        """What this rank does, or where it is, and the collective before that, or the last one (0)."""
        return self.guard.calls, text, self.history.last_but(before)
