"""What the ranks of a group were doing when it broke: each writes it into the job's store, and reads it of the others.

A rank writes under ``call/R`` or ``message/R`` what it was doing, and under ``place/R`` where it is if it was doing
neither; each is written once, by rank R. ``stands/R`` is written by the ranks of R's host if R cannot write, and
``how/R`` by those that see how R has ended; all write the same. The launcher of a job on several hosts says that too,
in another way (``diagnosis/ends.py``).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from phalanx.diagnosis.call_site import listed
from phalanx.diagnosis.ends import ended_elsewhere
from phalanx.errors import CollectiveMismatch
from phalanx.membership.client import peek
from phalanx.system import processes
from phalanx.transports.hierarchical.asking import Questions
from phalanx.transports.hierarchical.layout import Layout

__all__ = ["NOTED", "PATIENCE_S", "PROMPT_S", "Found", "Note", "Whereabouts"]

# How long to wait for what others say. A rank in a call is woken by the break, and writes at once.
PATIENCE_S = 2.0
# The same for the ranks of a host, which share memory.
PROMPT_S = 0.3
_LOOK_S = 0.01
# How long a rank that knows who has ended waits for those beside that one to say how. They may all be gone.
BESIDE_S = 0.25
# The same where the launcher says it, of every rank but those of a host that is lost.
BY_LAUNCHER_S = 0.75
NOTED = "noted"  # the key that is there once a rank has written down what it does, or that another one stands

# A process that is stopped writes nothing, so those of its host do; others see its state in no other way.
_STANDS = {"T": "stopped (state T)", "t": "held by a debugger (state t)"}

# Of a rank: how many collectives it has begun; what it does, or where it is; the collective before that.
Note = tuple[int, str, str]


@dataclass(frozen=True)
class Found:
    """What is known of the ranks of a group.

    Attributes:
        size: how many ranks the group has.
        calls: of the ranks that are in a collective or a message.
        places: of those that are elsewhere.
        standing: of those that say nothing because they are stopped, in words.
    """

    size: int
    calls: Mapping[int, Note]
    places: Mapping[int, Note]
    standing: Mapping[int, str]

    def mismatch(self, at: int) -> CollectiveMismatch:
        """The error for calls that differ, with the ranks' calls.

        Args:
            at: which of its calls differs, by the count of the rank that has found it. A rank that need not wait for
                others may be one further by then. -1 if it is a message.
        """
        calls = {rank: call for rank, (number, _, call) in self.places.items() if number == at and call}
        calls |= {
            rank: before if number == at + 1 and at > 0 and before else call
            for rank, (number, call, before) in self.calls.items()
        }
        elsewhere = {rank: f"in no collective, at {place}" for rank, (_, place, _) in self.places.items() if place}
        return CollectiveMismatch.of_calls(listed(elsewhere | calls, range(self.size)), calls)

    def behind(self, count: int) -> dict[int, str]:
        """The ranks that have begun fewer collectives than this, each with where it is, as far as that is known."""
        missing = {}
        for rank in range(self.size):
            if rank in self.places:
                number, place, _ = self.places[rank]
                if number < count:
                    missing[rank] = f"at {place}" if place else "in no collective"
            elif rank not in self.calls:
                missing[rank] = self.standing.get(rank, "")
            elif self.calls[rank][0] < count:
                missing[rank] = f"in {self.calls[rank][1]}"
        return missing


class Whereabouts:
    """One rank's side of it. Any thread may use it.

    Args:
        store: the group's own part of the job's store.
        rank: this process's rank in the group.
        layout: where the ranks are.
        pids: their process ids.
        questions: limits how long the store is waited for.
    """

    def __init__(self, store: Store, rank: int, layout: Layout, pids: Sequence[int], questions: Questions) -> None:
        self._store, self._rank, self._layout, self._pids, self._questions = store, rank, layout, pids, questions
        self._size = len(pids)

    def write(self, kind: str, note: Note) -> None:
        """Write down what this rank does, for the others, if the store can be reached.

        Args:
            kind: ``call``, ``message`` or ``place``.
            note: what it does, or where it is.
        """
        self._questions.say(lambda: self._set(kind, note))

    def write_aside(self, kind: str, note: Note) -> None:
        """:meth:`write`, without waiting for the store."""
        self._questions.aside(lambda: self._set(kind, note))

    def _set(self, kind: str, note: Note) -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone with rank 0
            self._store.set(NOTED, "")
            self._store.set(f"{kind}/{self._rank}", json.dumps(note))

    def tell_beside(self, rank: int, known: Mapping[str, object]) -> None:
        """Write down what the ranks beside one that has ended know of it, for those of other hosts; without waiting."""
        self._questions.aside(lambda: self._set_how(rank, json.dumps(known)))

    def _set_how(self, rank: int, known: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone with rank 0
            self._store.set(f"how/{rank}", known)

    def heard_of(self, rank: int) -> dict[str, Any]:
        """What the ranks beside one that has ended on another host, or the launcher, say of it.

        Returns:
            ``how`` it has ended and what it did last, as ``ended_elsewhere`` has it; empty if
            nobody who could know says so in time.
        """
        host, name, pid = self._layout.place(rank)[0], self._layout.name(rank), self._pids[rank]
        said = ended_elsewhere(name, pid)
        has_others = len(self._layout.hosts[host]) > 1
        if said or (said is None and not has_others):
            return said or {}
        heard, over, by_others = threading.Event(), threading.Event(), dict[str, Any]()

        def read() -> None:
            with contextlib.suppress(RuntimeError):  # the store has gone with rank 0
                while not over.is_set():
                    if known := peek(self._store, f"how/{rank}"):
                        by_others.update(json.loads(known))
                        heard.set()
                        return
                    over.wait(_LOOK_S)

        if has_others:
            self._questions.aside(read)
        until = time.monotonic() + (BESIDE_S if said is None else BY_LAUNCHER_S)
        while not heard.wait(_LOOK_S) and not said and time.monotonic() < until:
            said = ended_elsewhere(name, pid)
        over.set()
        return dict(by_others) if heard.is_set() else said or {}

    def gather(self, own: Note, *, with_later_calls: bool) -> Found:
        """What is known of the ranks, in ``PATIENCE_S`` at most.

        Args:
            own: what this rank does.
            with_later_calls: a rank that was elsewhere, and has come to a call since then, counts as in that call.
        """
        calls, places, standing = {self._rank: own}, dict[int, Note](), dict[int, str]()

        def look() -> None:
            began = time.monotonic()
            self._write_who_stands()
            while time.monotonic() < began + PATIENCE_S:
                for rank in set(range(self._size)) - calls.keys():
                    # A rank that is woken from a message of its own host has said its place before it says which.
                    for kind in ("message", "place", "call"):
                        wanted = kind == "message" or rank not in places or (with_later_calls and kind == "call")
                        if wanted and (said := peek(self._store, f"{kind}/{rank}")):
                            number, text, before = json.loads(said)
                            (places if kind == "place" else calls)[rank] = number, text, before
                            break
                    else:
                        if stands := peek(self._store, f"stands/{rank}"):
                            standing[rank] = stands.decode()
                known = calls.keys() | places.keys() | standing.keys()
                patience_s = PROMPT_S if len(known) == self._size else PATIENCE_S
                if len(calls) == self._size or time.monotonic() > began + patience_s:
                    return
                time.sleep(_LOOK_S)

        self._questions.ask(look, PATIENCE_S, anyway=True)
        found, elsewhere = dict(calls), dict(places)  # it may go on
        elsewhere = {rank: place for rank, place in elsewhere.items() if rank not in found}
        return Found(self._size, found, elsewhere, dict(standing))

    def _write_who_stands(self) -> None:
        for rank in self._layout.here:
            state = processes.state_of(self._pids[rank]) if rank != self._rank else ""
            if state in _STANDS:
                self._store.set(NOTED, "")
                self._store.set(f"stands/{rank}", _STANDS[state])
