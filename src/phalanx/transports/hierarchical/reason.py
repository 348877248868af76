"""Errors of a group over several hosts that breaks, the same on every rank.

A rank is in a collective (:class:`PresentCall`) or a message. An error there becomes a fact. The group's ranks agree
which fact was first (``membership/abort.py``), and that one becomes this rank's error (``wording.py``).
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from phalanx.diagnosis.call_site import CallSite, call_site, capture, exchange_text, running_at, shown
from phalanx.diagnosis.ends import cause_of_going
from phalanx.diagnosis.reading import with_own_wait
from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, PhalanxError
from phalanx.membership.abort import GroupAbort
from phalanx.membership.liveness import Gone
from phalanx.membership.protocol import Departed, Differs, Fact, Late, Lost, Position, Way, needs_positions
from phalanx.native.core import Status
from phalanx.system import processes
from phalanx.transports.call_check import fingerprint
from phalanx.transports.contract import with_site
from phalanx.transports.hierarchical.engine import TransferFailed
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.wording import Wording
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.explanation import MessageEnd, ends_of, text_of_call, unequal_ends

if TYPE_CHECKING:
    from phalanx.transports.hierarchical.communicator import HierarchicalCommunicator

__all__ = ["CallsDiffer", "Crossed", "PresentCall", "Reason"]

# How long to wait for what another rank has found: where a transfer has failed, and where one of this host has said so.
PATIENCE_S, PROMPT_S = 2.0, 0.5
_LONGEST_TEXT = 2000
# A process that is stopped says nothing, so those of its host do.
_STOPPED = {"T": "stopped (state T)", "t": "held by a debugger (state t)"}
_Words = tuple[Callable[..., str], tuple[Any, ...], CallSite | None, threading.Thread]  # its text, its line, who calls


class CallsDiffer(Exception):
    """The ranks' calls do not match."""


class Crossed(Exception):
    """Error for two lines that two ranks have called in different orders, if the user wants one; it says which."""


class Reason:
    """One rank's side.

    ===========================  ========================  ====================  ====================
    field                        writer                    readers               guard
    ===========================  ========================  ====================  ====================
    ``_awaited_since``           membership's thread       the same
    ``fails``                    who ends the script       any thread            one reference
    ===========================  ========================  ====================  ====================

    Args:
        group: what this rank knows of the group.
        layout: where the ranks are.
        local: the communicator of this host's ranks.
        timeout: of the group at first.
        communicator: of the group, which is kept weakly.

    Attributes:
        call: the collective that this rank is in, or was in last.
        fails: an exception that nobody caught ends this rank's script.
    """

    def __init__(
        self,
        group: GroupAbort,
        layout: Layout,
        local: SharedMemoryCommunicator,
        timeout: timedelta,
        communicator: HierarchicalCommunicator,
    ) -> None:
        self._group, self._layout, self._rank, self._size = group, layout, group.rank, len(group.ranks)
        self._registrar = group.ranks.index(0) if 0 in group.ranks else -1  # the rank in whose process it is
        self._local = local
        self._communicator = weakref.ref(communicator)
        self.call = PresentCall(self, timeout, self._local)
        self.fails = False
        self._awaited_since: dict[int, float] = {}
        self._said: Position | None = None  # where this rank found the group broken, if it says so

    # -- what is known of other ranks, from any thread ---------------------------------------------

    def gone(self, ranks: Collection[int]) -> dict[int, Gone]:
        """Those of these ranks that have gone from the job, or left this group."""
        found = {}
        for rank in ranks:
            if (known := self._group.lost(rank)) is not None:
                found[rank] = Gone(self._group.pids[rank], self._layout.name(rank), known.way, known.text)
        return found

    # -- how this rank goes ------------------------------------------------------------------------

    def script_fails(self, error: BaseException, cause: str) -> None:
        """This rank's script fails: to the others it must not look as if it had left."""
        self.fails = True
        fact = Lost(self._rank, Way.FAILED, self._rank, cause[:_LONGEST_TEXT])
        self._group.publish(fact, departs=True)

    # -- what it raises ----------------------------------------------------------------------------

    def error(self, error: BaseException, call: str, timeout_s: float, of_message: bool = False) -> BaseException:
        """Return what this rank raises, given what it has found, and in which collective or message it was."""
        fact = self._group.wait(PROMPT_S) if self._aborted() else self._group.fact
        found = fact or self._found(error, of_message)
        if found is not None and needs_positions(found):
            self._said = self._position("message" if of_message else "call", call)
            self._group.membership.send(self._said)
        if fact is None:
            fact = self._consequence_of(error) if found is None else self._group.publish(found)
        return with_own_wait(self._raised(fact, error, call, timeout_s, of_message))

    def _consequence_of(self, error: BaseException) -> Fact:
        """The reason of an error that may be a consequence of what another rank has found, which tells it at once."""
        peer = error.peer if isinstance(error, TransferFailed) else -1
        self._abort()
        fact = self._group.wait(PATIENCE_S, lambda: peer >= 0 and self._group.lost(peer) is not None)
        return fact or self._group.publish((self._group.lost(peer) if peer >= 0 else None) or self._guessed(error))

    def _found(self, error: BaseException, of_message: bool) -> Fact | None:
        """The reason that an error of this rank is; None if it may be a consequence of what another has found."""
        own = self._rank
        ends, status = ends_of(error), error.status if isinstance(error, TransferFailed) else Status.OK
        if ends is not None:
            return Differs(by=own, ends=tuple(tuple(end) for end in ends))  # type: ignore[misc]
        if isinstance(error, (CallsDiffer, Crossed, CollectiveMismatch)) or status == Status.DIFFERS:
            return Differs(by=own, at=-1 if of_message else self.call.count - self.call.is_late())
        if isinstance(error, CollectiveTimeout) and of_message:
            # A rank of this host whose own time is over says which operation it was in, and how long it has waited.
            is_elsewhere = self._local.timed_out_elsewhere
            return None if is_elsewhere else self._late_message(error)
        if isinstance(error, CollectiveTimeout) or status == Status.OVERDUE:
            return Late(by=own)
        if isinstance(error, TransferFailed):
            return Lost(own, Way.LEFT, error.peer) if status == Status.PEER_LEFT else None
        if isinstance(error, PeerLost):
            gone = None if self._aborted() else self._how_gone(error.group_rank)
            if gone is not None:
                return self._group.fact_of(gone, error.group_rank)
            return None if self._aborted() else self._guessed(error)
        if isinstance(error, Exception):
            return Lost(own, Way.FAILED, own, text=cause_of_going(error)[:_LONGEST_TEXT])
        return Lost(own, Way.INTERRUPTED, own, type(error).__name__)

    def _guessed(self, error: BaseException) -> Fact:
        """The reason as far as this rank can know it alone."""
        if isinstance(error, CollectiveTimeout):
            return self._late_message(error)
        # A peer that is there has given up because of another rank.
        if self._registrar >= 0 and (gone := self._group.lost(self._registrar)) is not None:
            return gone
        if isinstance(error, TransferFailed):
            return Lost(self._rank, Way.UNKNOWN, error.peer)
        return Lost(self._rank, Way.UNKNOWN, getattr(error, "group_rank", -1), self._here(error))

    def _late_message(self, error: CollectiveTimeout) -> Late:
        return Late(by=self._rank, rank=error.group_rank, text=self._here(error))

    def _here(self, error: BaseException) -> str:
        return f"On {self._layout.name(self._rank)}: {error}"[:_LONGEST_TEXT]

    def _raised(self, fact: Fact, error: BaseException, call: str, timeout_s: float, of_message: bool) -> BaseException:
        """Return what this rank raises for a reason."""
        words = Wording(self._layout, self._group.pids, self._rank, call)
        if not isinstance(error, Exception):
            return error
        if isinstance(fact, Lost):
            is_own = fact.by == fact.rank == self._rank and not isinstance(error, TransferFailed)
            return error if is_own else words.lost(fact)
        if isinstance(fact, Late) and fact.text:
            is_own = fact.by == self._rank and isinstance(error, CollectiveTimeout)
            return error if is_own else words.late_message(fact)
        if isinstance(fact, Differs) and fact.ends:
            return unequal_ends(*(MessageEnd(*end) for end in fact.ends))
        told = self._group.positions()
        if told is None and isinstance(fact, Differs) and isinstance(error, CollectiveMismatch):
            return error  # of the ranks of this host
        words = replace(words, positions=self._positions(told, call, of_message))
        return words.mismatch(fact.at) if isinstance(fact, Differs) else words.late(fact.by, timeout_s)

    # -- where ranks are ---------------------------------------------------------------------------

    def _positions(self, told: Sequence[Position] | None, call: str, of_message: bool) -> Mapping[int, Position]:
        """Return where the ranks are, as the registrar has told, or else as far as this rank knows."""
        if told is None:  # the registrar is stopped or held, or cannot be reached: of the others nothing is known
            others = [rank for rank in range(self._size) if rank != self._registrar]
            stopped = self._stopped_here().items()
            told = [Position(rank=rank, kind="call", number=self.call.count) for rank in others]
            told += [Position(rank=rank, kind="stopped", text=state) for rank, state in stopped]
        found = {each.rank: each for each in told}
        if not found.get(self._rank, Position(rank=-1)).text:
            found[self._rank] = self._position("message" if of_message else "call", call)
        return found

    def _position(self, kind: str, text: str) -> Position:
        before = self.call.last_but(1 if kind == "call" else 0)
        return Position(self._rank, kind, self.call.count, text, before, self._group.name)

    def position(self, fact: Fact) -> Position:
        stopped = self._stopped_here()
        communicator, about = self._communicator(), [fact.by, getattr(fact, "rank", -1)]
        if self._said is not None:
            own = self._said
        elif self.call.inside:
            own = self._position("call", self.call.text())
        elif communicator is not None and (message := communicator.messages.doing(about)):
            own = self._position("message", message)
        else:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            own = self._position("place", shown(running_at(frame)))
        return msgspec.structs.replace(own, stopped=stopped)

    def _stopped_here(self) -> dict[int, str]:
        states = {rank: processes.state_of(self._group.pids[rank]) for rank in self._layout.here if rank != self._rank}
        return {rank: _STOPPED[state] for rank, state in states.items() if state in _STOPPED}

    # -- for the membership ------------------------------------------------------------------------

    def awaited(self) -> Mapping[int, float]:
        now, communicator = time.monotonic(), self._communicator()
        awaited = () if communicator is None else communicator.messages.awaited()
        self._awaited_since = {rank: self._awaited_since.get(rank, now) for rank in awaited}
        if not self.call.inside:
            return self._awaited_since
        others = (rank for rank in range(self._size) if rank != self._rank)
        return dict.fromkeys(others, self.call.since) | self._awaited_since

    def end_waits(self, fact: Fact) -> None:
        self._abort(self.call.text() or "an operation")  # else the ranks of this host wait for what it was

    def _aborted(self) -> bool:
        """Return whether a rank of this host has woken the others."""
        return self._local.aborted

    def _abort(self, doing: str = "") -> None:
        if (communicator := self._communicator()) is not None:
            communicator.abort(doing)

    def _how_gone(self, rank: int) -> Departed | None:
        """Return how a rank of this host has gone from it; None if it has not, or nothing is known."""
        host, place = self._layout.place(rank) if rank >= 0 else (-1, 0)
        if host != self._layout.host or (gone := self._local.gone([place]).get(place)) is None:
            return None
        known: dict[str, Any] = {"text": gone.text}
        if gone.way == Way.ENDED:
            ended = self._local.ended(place, self._group.pids[rank])
            known = {name: ended[name] for name in Departed.__struct_fields__ if name in ended and name != "rank"}
            known["text"] = ended["how"]
        return Departed(rank=self._group.ranks[rank], way=gone.way, **known)


class PresentCall:
    """The collective that this rank is in, for errors. Used in a ``with``: what is raised there breaks the group.

    One thread at a time makes calls, and writes this; membership's thread reads each field in one step of Python's. The
    call before is kept as well: a rank that need not wait for those of its host may learn late that their calls differ.

    Attributes:
        timeout_s: how long the group waits.
        count: how many collectives this rank has begun.
        inside, since: it is in one, and has begun it then.
    """

    def __init__(self, reason: Reason, timeout: timedelta, local: SharedMemoryCommunicator) -> None:
        self._reason, self._local = reason, local
        self.timeout_s = timeout.total_seconds()
        self._present: _Words | None = None
        self._before: _Words | None = None
        self._number = 0  # of the present call, equal for equal calls
        self._error: BaseException | None = None
        self._has_told = False  # a message has raised why the group is broken
        self.count, self.inside, self.since = 0, False, 0.0

    def named(
        self, name: str, tensor: torch.Tensor | None, op: int | None = None, root: int | None = None
    ) -> PresentCall:
        """The call of a collective."""
        dtype, shape = (None, ()) if tensor is None else (tensor.dtype, tensor.shape)
        self._number = fingerprint(name, tensor, -1 if op is None else op, -1 if root is None else root)
        return self._next(text_of_call, (name, dtype, shape, op, root))

    def exchanging(self, dtype: torch.dtype, given: Sequence[int], expected: Sequence[int]) -> PresentCall:
        """The call of an all_to_all, by the bytes of its parts."""
        self._number = _fingerprint_of_exchange(dtype)
        return self._next(_exchange_text, (dtype, given, expected))

    def _next(self, make: Callable[..., str], arguments: tuple[Any, ...]) -> PresentCall:
        self._before, self._present = self._present, (make, arguments, capture(3), threading.current_thread())
        return self

    def text(self) -> str:
        """The call, with its line, and which lines this rank's host has found crossed."""
        return self._with(self._local.crossed)

    def _with(self, crossed: str) -> str:
        text = _in_words(self._present)
        return f"{text} ({crossed})" if crossed else text

    def last_but(self, calls: int) -> str:
        """The last call, or the last but one, with its line; empty if there was none."""
        return _in_words(self._before if calls else self._present)

    def is_late(self) -> bool:
        """Return whether the calls that are found to differ are those before this one."""
        return self._local.differs_late and self._before is not None

    def error_of_message(self, error: BaseException, message: str) -> PhalanxError:
        """Return what a message raises, given what was found, and the message; any thread may call it."""
        self._has_told = True
        found = self._reason.error(error, message, self.timeout_s, of_message=True)
        return found if isinstance(found, PhalanxError) else PeerLost(str(found))

    def compare_last(self, patience_s: float) -> None:
        """Compare the last calls of the ranks of this host; the leaders have compared theirs before a call is done."""
        if self._error is None and not self._has_told:
            try:
                self._local.compare_rest(patience_s)
            except PhalanxError as error:
                self.__exit__(type(error), error, None)

    def __enter__(self) -> int:
        """Begin it; return its number."""
        if self._error is not None:
            raise self._error
        self._local.begin_parts(self._number)
        self.count += 1
        self.since = time.monotonic()
        self.inside = True
        return self._number

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or error is self._error:
            self.inside = False
            return
        text = self._with(str(error)) if isinstance(error, Crossed) else self.text()
        self._error = self._reason.error(error, text, self.timeout_s)
        self.inside = False
        if self._error is not error:
            # An error among the ranks of this host names their part of the call, such as the reduce in an all_reduce.
            inner = isinstance(error, (Crossed, CallsDiffer, TransferFailed, PhalanxError))
            raise self._error from (None if inner else error)


@cache
def _fingerprint_of_exchange(dtype: torch.dtype) -> int:
    return fingerprint("all_to_all", torch.empty(0, dtype=dtype), -1, -1)


def _exchange_text(dtype: torch.dtype, *nbytes: Sequence[int]) -> str:
    return exchange_text(dtype, *([each // dtype.itemsize for each in parts] for parts in nbytes))


def _in_words(call: _Words | None) -> str:
    if call is None:
        return ""
    make, arguments, place, thread = call
    return with_site(make(*arguments), call_site(place, thread))
