"""Which processes of other hosts a rank of a group watches, and what it concludes from what it sees.

A rank watches, on every other host, the rank at its own place and those beside it. Whether a host is silent or stopped
is concluded only if all that are watched there agree. So a rank that alone is stopped is named at the group's timeout,
as on one host. Nothing is concluded while this rank waits for nobody, so a host that comes back before anybody waits
for it is missed by nobody. A rank in a collective waits for all others, one in a message for its peer.

A rank that learns why the group broke writes that into its host's segment before it aborts it. That reaches the other
ranks of the host even if the job's store does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from phalanx.diagnosis.call_site import running_at, shown
from phalanx.native.core import TEXT_BYTES
from phalanx.system.processes import has_ended, start_of
from phalanx.transports.contract import Communicator
from phalanx.transports.gone import ENDED, LEFT
from phalanx.transports.hierarchical.asking import STORE_S
from phalanx.transports.hierarchical.contact import Sign
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.lookout import Lookout, lookout
from phalanx.transports.hierarchical.watcher import Endpoint
from phalanx.transports.hierarchical.wording import Fact
from phalanx.transports.shm.communicator import SharedMemoryCommunicator

__all__ = ["Guard", "Messages", "watched_places"]

# For how long a collective goes on that a process has left unannounced: it may have done its part before.
GRACE_S = 0.75
# For how long a collective waits at least for a host that is silent or stopped. It may have been cut off before, and
# TCP takes a while to notice that it is back.
AWAITED_S = 3.5
# For how long a host may refuse connections by silence, on top of the first attempt.
UNREACHABLE_S = 1.0
# How long the rank that broke the group may take to say why, until the waits of this one are ended without that.
WORDLESS_S = 0.5


def watched_places(place: int, here: int, there: int) -> set[int]:
    """Which places of another host the rank at a place of this one watches. They watch it, too.

    Args:
        place: of the rank that watches.
        here, there: how many ranks the two hosts have.
    """
    towards = {place % there, (place + 1) % there}
    return towards | {other for other in range(there) if place in (other % here, (other + 1) % here)}


class Messages(Protocol):
    """The messages of a group, as far as its end concerns them. Any thread may ask, and no answer waits for a rank."""

    def awaited(self) -> Collection[int]:
        """The ranks of other hosts that somebody waits for a message of, or to."""
        ...

    def doing(self, about: Collection[int]) -> str:
        """The message that this rank is in, with its line, rather one with these ranks; empty if there is none."""
        ...


class Guard:
    """The watch of one rank of one group.

    Two threads use it: the one that makes the group's collectives, and the lookout's, which calls :meth:`look`,
    :meth:`told` and :meth:`says`. A third one asks the store. ``reason`` is written once, by any of these or by one
    that waits for a message, under ``_lock``; ``_known`` is set then. ``calls``, ``inside`` and ``failed_peer`` are
    written by the first thread and read by the second; so is ``unmet``, by threads that connect. ``_here``,
    ``away`` and ``_ended_away`` are written by the second and read by others; each is one reference, replaced whole.
    To ``_left`` the second and the third add, in one step of Python's, and the second looks whether a rank is in it.
    So the third does to ``_answered``, after ``_left``, and if it dies, the second waits for ``STORE_S`` instead. The
    rest belongs to the second. If that one dies, ``_here`` stays what it was, and costs one wait of ``PATIENCE_S``
    (``whereabouts.py``); so does ``away``, and who has gone is then learned from the store, into which the other
    ranks that watch write it.

    Args:
        store: a part of the job's store where nobody has met before.
        layout: where the ranks are.
        rank: this process's rank in the group.
        local: the communicator of this host's ranks.
        wake: ends this rank's waits for others; kept weakly.
        read_store: asks the job's store, without waiting for it, why the group broke, and which of these ranks have
            left, and calls :meth:`know` or :meth:`know_left`, and :meth:`know_store` at the end; kept weakly.
        tell_ended: is called with ranks that have ended and have not said that they leave, whoever waits for them; it
            must not wait; kept weakly.
        tell_place: is called with where this rank is, and with the message that it is in, if the group breaks while
            this rank is in no collective; it must not wait; kept weakly.
        timeout: for all ranks to come.

    Attributes:
        away: the ranks of other hosts that have gone, each with how, of those that this one watches.
        has_told: this rank has written down in which collective it found the group broken. As ``inside``.
        pids: the process id of each rank.
        size: the number of ranks.
        reason: why the group broke; None if it has not, or the rank that broke it has not said.
        inside: this rank is in a collective.
        calls: how many it has begun.
        failed_peer: a rank to which a transfer of the present collective, or of a message, has failed.
        unmet: the ranks that this one waits to be connected with for the first time.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        rank: int,
        local: Communicator,
        wake: Callable[[], None],
        read_store: Callable[[Collection[int]], None],
        tell_ended: Callable[[Collection[int]], None],
        tell_place: Callable[[str, str], None],
        timeout: timedelta,
    ) -> None:
        self.reason: Fact | None = None
        self.inside = False
        self.calls = 0
        self.failed_peer: int | None = None
        self.unmet: list[int] = []
        self.has_told = False
        self.away: Mapping[int, str] = {}
        self._rank, self._layout = rank, layout
        self._wake, self._tell_place = weakref.WeakMethod(wake), weakref.WeakMethod(tell_place)
        self._read_store, self._tell_ended = weakref.WeakMethod(read_store), weakref.WeakMethod(tell_ended)
        self._asked_at: dict[int, float] = {}
        self._answered: set[int] = set()
        self._local = local if isinstance(local, SharedMemoryCommunicator) else None
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._waits_ended = False
        self._ended = False
        self._wordless_since = float("inf")
        self._messages: weakref.ref[Messages] | None = None
        self._seen_call, self._seen_at = 0, 0.0
        self._awaited_at: dict[int, float] = {}
        self._left: set[int] = set()
        self._here: frozenset[int] = frozenset()
        self._ended_away: frozenset[int] = frozenset()
        self._lookout: Lookout | None = None
        with contextlib.suppress(OSError):  # without one, the engine's errors and the timeouts remain
            self._lookout = lookout()
        try:
            self.name, self._ranks = self._meet(store, timeout)
        except BaseException:
            if self._lookout is not None:
                self._lookout.release()
            raise
        self._starts = {each: start_of(self._ranks[each][0]) for each in layout.here}
        self._watched: dict[int, dict[int, Endpoint]] = {}
        for number, members in enumerate(layout.hosts):
            if number != layout.host:
                places = watched_places(layout.local, len(layout.here), len(members))
                watched = {members[place]: self._ranks[members[place]][1] for place in places}
                self._watched[number] = {each: endpoint for each, endpoint in watched.items() if endpoint is not None}
        self._rank_of = {
            endpoint.identity: each for watched in self._watched.values() for each, endpoint in watched.items()
        }

    def watch(self) -> None:
        """Begin; from now on the lookout's thread may call what this guard was given."""
        if self._lookout is not None:
            self._lookout.join(self, self._endpoints())

    def _meet(self, store: Store, timeout: timedelta) -> tuple[str, list[tuple[int, Endpoint | None]]]:
        """The group's name among lookouts, and of each rank the pid and where its lookout is."""
        own = None if self._lookout is None else self._lookout.endpoint.encode()
        store.set(f"lookout/{self._rank}", json.dumps([secrets.token_hex(8), os.getpid(), own]))
        keys = [f"lookout/{rank}" for rank in range(sum(map(len, self._layout.hosts)))]
        store.wait(keys, timeout)
        said = [json.loads(value) for value in store.multi_get(keys)]
        return said[0][0], [(pid, Endpoint.decode(text) if text else None) for _, pid, text in said]

    # -- from the thread that makes collectives ----------------------------------------------------

    @property
    def pids(self) -> list[int]:
        return [pid for pid, _ in self._ranks]

    @property
    def size(self) -> int:
        return len(self._ranks)

    def attend(self, messages: Messages) -> None:
        """Have the ranks judged that messages wait for; they are kept weakly."""
        self._messages = weakref.ref(messages)

    def read_segment(self) -> None:
        """Learn what a rank of this host has written down. Any thread may call it."""
        said = None if self._local is None else self._local.breakage()
        if said:
            self.know(json.loads(said))

    def wait(self, patience_s: float) -> Fact | None:
        """Why the group broke, once that is known."""
        if self._lookout is not None:
            self._lookout.wake()
        self._known.wait(patience_s)
        return self.reason

    def know(self, fact: Fact) -> Fact:
        """This rank has learned why the group broke; tell whom it can. Returns the reason that was known first."""
        with self._lock:
            if self.reason is not None:
                return self.reason
            self.reason = fact
            self._known.set()
        if self._lookout is not None:
            self._lookout.send(self, self._endpoints(), {"broken": fact})
        if self._local is not None:
            self._local.abort_because(_short(fact))
        return fact

    def know_left(self, rank: int) -> None:
        """A rank has left in order; any thread may say so."""
        self._left.add(rank)  # in one step of Python's

    def know_store(self, ranks: Collection[int]) -> None:
        """The store has said what it knows of ranks that are away, or has gone; any thread may say so."""
        self._answered.update(ranks)

    @property
    def ended(self) -> bool:
        """Whether this rank has left the group."""
        return self._ended

    def ended_ranks(self) -> set[int]:
        """The ranks whose processes are gone for sure, as far as this one knows. Any thread may ask."""
        reason = self.reason or {}
        named = {reason["group_rank"]} if reason.get("what") == "ended" else set()
        here = {rank for rank, start in self._starts.items() if has_ended(self._ranks[rank][0], start)}
        return named | here | self._ended_away

    def is_here(self, rank: int) -> bool:
        """Whether a rank of another host was there a moment ago; False also for one that is not watched."""
        return rank in self._here

    def is_silent_for_good(self, rank: int) -> bool:
        """Ask a rank of another host whether it has ended, or has left its last group. Any thread may ask.

        It takes a few round trips, or part of a second if nobody answers; then the answer is no.
        """
        endpoint = self._ranks[rank][1]
        return self._lookout is not None and endpoint is not None and self._lookout.has_gone(endpoint)

    def close(self) -> None:
        """The rank leaves the group."""
        if not self._ended:
            self._ended = True
            if self._lookout is not None:
                self._lookout.leave(self, {"left": self._rank})
                self._lookout.release()

    def _endpoints(self) -> list[Endpoint]:
        return [endpoint for watched in self._watched.values() for endpoint in watched.values()]

    # -- from the lookout's thread -----------------------------------------------------------------

    def told(self, sender: str, message: dict[str, Any]) -> None:
        """A rank of another host says something about the group."""
        if "left" in message and sender in self._rank_of:
            self._left.add(self._rank_of[sender])
        if "broken" in message:
            self._break(message["broken"])

    def says(self) -> dict[str, Any]:
        """Why the group broke, for a rank that watches only now."""
        return {} if self.reason is None else {"broken": self.reason}

    def look(self, now: float, sign_of: Callable[[Endpoint], tuple[Sign | None, float]]) -> None:
        """Judge what is known of the others."""
        self._notice(sign_of)
        if self._waits_ended and self.reason is not None:
            return
        said = None if self._local is None else self._local.breakage()
        known = json.loads(said) if said else self.reason
        if known is None and said is not None:  # a rank of this host has broken the group, and may say why in a moment
            self._wordless_since = min(self._wordless_since, now)
            if now - self._wordless_since >= WORDLESS_S:
                self._end_waits()
        if known is None:
            known = self._judge(now, sign_of)
        if known is not None:
            self._break(known)

    def _notice(self, sign_of: Callable[[Endpoint], tuple[Sign | None, float]]) -> None:
        """Learn who has gone, also while this rank waits for nobody: ranks that watch others may wait for them."""
        away, ended_away = {}, set()
        for watched in self._watched.values():
            for rank, endpoint in watched.items():
                sign, _ = sign_of(endpoint)
                if sign is Sign.GONE:
                    ended_away.add(rank)
                if sign is Sign.LEFT or rank in self._left:
                    away[rank] = LEFT
                elif sign is Sign.GONE:
                    away[rank] = ENDED
        ended = {rank for rank, way in away.items() if way == ENDED and self.away.get(rank) != ENDED}
        self.away, self._ended_away = away, frozenset(ended_away)
        if ended and (tell := self._tell_ended()) is not None:
            tell(ended)

    def _judge(self, now: float, sign_of: Callable[[Endpoint], tuple[Sign | None, float]]) -> Fact | None:
        waits = self._waits(now)
        signs_of = {
            host: {rank: sign_of(endpoint) for rank, endpoint in watched.items()}
            for host, watched in self._watched.items()
        }
        self._here = frozenset(
            rank for signs in signs_of.values() for rank, (sign, _) in signs.items() if sign is Sign.HERE
        )
        away = {
            rank
            for signs in signs_of.values()
            for rank, (sign, _) in signs.items()
            if (rank in waits or rank == self.failed_peer or rank in self.unmet) and sign in (Sign.GONE, Sign.LEFT)
        }
        self._ask_about(away, now)
        for host, signs in signs_of.items():
            fact = self._gone(now, signs, waits)
            there = [waits[rank] for rank in self._layout.hosts[host] if rank in waits]
            if fact is None and there:
                fact = self._silent(now, host, [*signs.values()], max(there))
            if fact is not None:
                return fact
        return None

    def _ask_about(self, away: set[int], now: float) -> None:
        """Ranks are away for which this one waits. They may have said why before they could be heard."""
        if not away <= self._asked_at.keys() and (read_store := self._read_store()) is not None:
            read_store(away - self._asked_at.keys())
            self._asked_at = dict.fromkeys(away, now) | self._asked_at

    def _has_said_nothing(self, rank: int, now: float) -> bool:
        """Whether a rank that has ended has not written that it leaves, as far as the store answers in time."""
        return rank in self._answered or now - self._asked_at.get(rank, now) >= STORE_S

    def _waits(self, now: float) -> dict[int, float]:
        """The ranks of other hosts that this one waits for, each with since when."""
        if self._seen_call != self.calls:
            self._seen_call, self._seen_at = self.calls, now
        messages = None if self._messages is None else self._messages()
        awaited = () if messages is None else messages.awaited()
        self._awaited_at = {rank: self._awaited_at.get(rank, now) for rank in awaited}
        if not self.inside:
            return self._awaited_at
        others = (rank for host in self._watched for rank in self._layout.hosts[host])
        return dict.fromkeys(others, self._seen_at) | self._awaited_at

    def _gone(self, now: float, signs: dict[int, tuple[Sign | None, float]], waits: dict[int, float]) -> Fact | None:
        for rank, (sign, since) in signs.items():
            failed = self.failed_peer == rank
            undone = failed or rank in self.unmet  # it has not done its part of the call, and will not
            unsaid = self._has_said_nothing(rank, now)  # before `left`, which the store's answer may set
            left = sign is Sign.LEFT or rank in self._left
            if (
                sign is Sign.GONE
                and not left
                and unsaid
                and (undone or (rank in waits and now - max(since, waits[rank]) >= GRACE_S))
            ):
                return self._lost("ended", rank)
            if failed and left:
                return self._lost("left", rank)
        return None

    def _silent(self, now: float, host: int, signs: list[tuple[Sign | None, float]], awaited_at: float) -> Fact | None:
        if now - awaited_at < AWAITED_S:
            return None
        there = [(sign, since) for sign, since in signs if sign not in (Sign.LEFT, Sign.GONE)]
        kinds = {sign for sign, _ in there}
        first = self._layout.hosts[host][0]
        if kinds == {Sign.STILL}:
            return self._lost("stopped", first)
        if not there or not kinds <= {Sign.SILENT, None}:
            return None
        # A process that could not be reached is silent once that has been tried for long enough.
        if any(sign is None and now - max(since, awaited_at) < UNREACHABLE_S for sign, since in there):
            return None
        return self._lost("silent", first)

    def _lost(self, what: str, rank: int) -> Fact:
        return {"kind": "lost", "what": what, "group_rank": rank, "by": self._rank}

    def _break(self, fact: Fact) -> None:
        self.know(fact)
        self._end_waits()

    def _end_waits(self) -> None:
        if self._waits_ended:
            return
        self._waits_ended = True
        fact = self.reason or {}
        messages = None if self._messages is None else self._messages()
        message = ""
        try:
            if messages is not None:
                message = messages.doing([fact.get("by", -1), fact.get("group_rank", -1)])
        finally:
            if (wake := self._wake()) is not None:
                wake()
        if not (self.inside or self.has_told) and (tell := self._tell_place()) is not None:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            tell(shown(running_at(frame)), message)


def _short(fact: Fact) -> str:
    """A reason as a segment takes it, without the end of what it says, and lines of a program, if that is too long."""
    text = json.dumps(fact)
    if len(text) >= TEXT_BYTES and "ends" in fact:
        fact = {**fact, "ends": [[*end, ""] for *end, _ in fact["ends"]]}
        text = json.dumps(fact)
    while len(text) >= TEXT_BYTES and fact["text"]:
        fact = {**fact, "text": fact["text"][: -1 - (len(text) - TEXT_BYTES) // 12]}
        text = json.dumps(fact)
    return text
