"""One seat for each rank of a world that is being made: a process that takes another's, or counts other ranks, is told.

For stores that are not Phalanx's own, which let anybody write (torchrun's, one that a script opens, a file). Two
processes of one rank both find their keys there, and processes with different world sizes find none of each other's, so
without seats either is known only when the meeting is late.

Whoever comes takes the seat of its rank, even if another has it: the newcomer cannot know whether that one is alive,
above all not on another host. The earlier one can, by being the one that looks. So it is the earlier one that finds
out (ten times a second while it waits), writes a note into the seat, and raises. The newcomer waits for that a little
before it goes on, reads the note, and raises as well. A holder that has been killed never writes a note, and the
newcomer has the seat: at once if it sees that the process has gone, and after a second if it cannot see that. What
remains is an earlier process that is slow, or stopped, for longer than that. It finds out later, perhaps only when both
have met the others. And if the meeting is late for the newcomer, its error names the earlier one, which may be dead.

A world size is told alike, under a key that all sizes have in common. It has nobody's seat, but a spokesman: the first
that looks, or the first that finds another size there as it looks for the first time. Whoever finds another size at a
later look knows that this has come after itself. It waits half a second before it raises, and looks more often
meanwhile, because that process may be about to go, or this one: programs try a smaller world when a larger one has not
come about. One that looks for the first time when all the others have met is not told.

Who writes, who reads, and when the writer dies. All keys are in a part of the store that has no world size in its name.
Each holds claims as JSON, the holder's first; nothing at all if the holder has left before the ranks had met.

- ``<rank>``: written as a process comes (by comparing and setting, so it knows whom it replaces); read by it as long as
  it waits. It is deleted by the holder once all have come to the meeting, so before any can be through and make the
  next world. If it is missing, another process of this rank has met the others. A holder that fails empties it.
  If a holder dies, its claim stays until the next process of that rank comes.
- ``size``: written by spokesmen, read by all that wait. A spokesman deletes it when all have come, and empties it if
  the meeting fails. If it dies before, the claim stays until one with another size looks for the first time.
- a note is a list of more than one claim in either key. It is written by one of the claimants, and emptied by the first
  of the list, for whom it is meant, as it raises. If that one dies before, it stays as a dead holder's claim does. The
  writer waits for up to a second until the note has been read, because its own process may have the store.

If a spokesman deletes or empties what another one has written meanwhile, nothing is lost: that one writes it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from phalanx.errors import InitializationError
from phalanx.store.peek import peek
from phalanx.system.foreign_values import checked, read_json
from phalanx.system.host import this_host
from phalanx.system.processes import has_ended, own_sight, start_of

__all__ = ["Seat"]

_ANSWER_S = 1.0  # how long a newcomer waits for the one whose seat it takes
_ANSWER_S_PER_RANK = 0.005  # in a large world ranks look less often
_GRACE_S = 0.5
_READING_S = 1.0
_PAUSE_S = 0.02
_SIZE = "size"


@dataclass(frozen=True)
class _Claim:
    """What a process says of itself: its place, what it is, and a number that no other claim has."""

    rank: int
    size: int
    pid: int
    start: int
    sight: str
    host: str
    thread: str
    number: str

    @property
    def name(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def has_left(self) -> bool:
        """Whether this process sees that nobody makes this claim any more."""
        if not self.sight or self.sight != own_sight():
            return False
        if self.pid == os.getpid():
            return self.number not in _made_here
        return has_ended(self.pid, self.start)


# The numbers of the claims that threads of this process make now. Each adds and removes its own, in one step of
# Python's; a forked child's has another pid.
_made_here: set[str] = set()


class Seat:
    """This process's seat in one meeting of the world's ranks.

    Args:
        store: the part of the job's store that all meetings of this world have in common, whatever their size.
        rank, size: this process's place in the world.

    Attributes:
        error: the error that was raised because two claims do not go together; None if there was none.
    """

    error: InitializationError | None = None

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._key = str(rank)
        pid, thread = os.getpid(), threading.current_thread().name
        number = secrets.token_hex(8)
        self._own = _Claim(rank, size, pid, start_of(pid), own_sight(), this_host().name, thread, number)
        self._text = _encoded([self._own])
        self._before: list[_Claim] = []  # who had the seat, and may be alive
        self._has_looked = False  # for other sizes
        self._is_spokesman = False
        self._other: _Claim | None = None  # of another size, which has come after this one
        self._other_since_s = 0.0
        self._is_over = False

    @property
    def is_in_question(self) -> bool:
        """Whether a process with another world size has come, which is soon to be told, or to go."""
        return self._other is not None and not self._is_over

    def take(self) -> None:
        """Take the seat, and wait a little if another process has it and may be alive. Two requests at most if not.

        Raises:
            InitializationError: another process of this rank is there; it is told as well.
            DistError: the store has gone.
        """
        _made_here.add(self._own.number)
        try:
            while (found := self._set(self._key, "", self._text)) != self._text:
                if self._set(self._key, found, self._text) == self._text:
                    self._before = [claim for claim in _decoded(found) if not claim.has_left()]
                    break
            until = time.monotonic() + max(_ANSWER_S, _ANSWER_S_PER_RANK * self._own.size)
            while time.monotonic() < until and not all(claim.has_left() for claim in self._before):
                self._check_rank()
                time.sleep(_PAUSE_S)
        except BaseException:
            self.give_back()
            raise

    def check(self) -> None:
        """Look whether another process claims this rank, or has come with another world size. Two requests.

        Raises:
            InitializationError: one does; it is told as well. No other rank is.
        """
        if self._is_over:
            return
        try:
            self._check_rank()
            self._check_size()
        except DistError:  # the next request finds that the store has gone
            if self._other is not None:
                raise self._sizes_differ(self._other) from None

    def doubt(self) -> InitializationError | None:
        """The error of a meeting that is late, if an earlier process of this rank may be why; else None."""
        before = [claim for claim in self._before if not claim.has_left()]
        if self._is_over or not before:
            return None
        earlier, own = _named([before[0], self._own])
        return InitializationError.rank_taken(self._own.rank, earlier, own, before[0].pid, before[0].host)

    def leave(self) -> None:
        """All ranks have come to the meeting: no other process may claim this seat any more. One request, or two."""
        if self._is_over:
            return
        self._end()
        with contextlib.suppress(DistError):  # the store has gone
            self._store.delete_key(self._key)
            if self._is_spokesman:
                self._store.delete_key(_SIZE)

    def give_back(self) -> None:
        """The meeting has failed for this process: the next may have the seat."""
        if self._is_over:
            return
        self._end()
        with contextlib.suppress(DistError):  # the store has gone
            for key in (self._key, _SIZE) if self._is_spokesman else (self._key,):
                found = peek(self._store, key)
                claims = _decoded(found or b"")
                if claims and claims[0] == self._own:
                    # One that has not seen yet that it lost its seat would take an empty one again.
                    unaware = [claim for claim in self._before if key == self._key and claim not in claims]
                    self._set(key, _encoded(claims), _encoded(claims[1:]) if unaware and claims[1:] else "")

    def _end(self) -> None:
        self._is_over = True
        _made_here.discard(self._own.number)

    def _check_rank(self) -> None:
        found = peek(self._store, self._key)
        if found is None:
            raise self._rank_is_twice(self._before, have_met=True)
        if not found:
            self._set(self._key, "", self._text)
        elif (text := found.decode(errors="replace")) != self._text:
            claims = _decoded(text)
            others = [claim for claim in claims if claim != self._own]
            if claims == others and others and all(claim.has_left() for claim in others):
                self._set(self._key, text, self._text)  # it came and went, without having been told
                return
            self._write_note(self._key, text)
            raise self._rank_is_twice(others)

    def _check_size(self) -> None:
        found = self._set(_SIZE, "", self._text)
        claims = _decoded(found)
        others = [claim for claim in claims if claim.size != self._own.size]
        if others and self._own in claims:
            raise self._sizes_differ(others[0])  # a note for this process, even if its writer has gone since
        if found == self._text:
            self._is_spokesman = True
        if not self._has_looked:
            if others:
                self._is_spokesman = self._has_looked = self._set(_SIZE, found, self._text) == self._text
            else:
                self._has_looked = True
            return
        now_s = time.monotonic()
        if others and self._other is None:
            self._other, self._other_since_s = others[0], now_s
        if self._other is None:
            return
        if self._other.has_left() or found == self._text:
            self._other = None  # it has gone, and so it has not come to wait for this one
        elif others and len(others) < len(claims):
            raise self._sizes_differ(others[0])  # a note for another process of this size
        elif now_s - self._other_since_s >= _GRACE_S:
            if others:
                self._write_note(_SIZE, found)
            raise self._sizes_differ(self._other)

    def _write_note(self, key: str, found: str) -> None:
        """Tell the claimant that it is not alone, and wait until it has read that; or read what it was told."""
        claims = _decoded(found)
        if self._own in claims:
            return  # it is a note already; giving the seat back empties it
        note = _encoded([*claims, self._own])
        if self._set(key, found, note) != note:
            return  # another claimant has come, or has told it
        until = time.monotonic() + _READING_S
        with contextlib.suppress(DistError):  # its process has read the note, and has gone with the store
            while time.monotonic() < until and claims and not claims[0].has_left():
                if peek(self._store, key) != note.encode():
                    return
                time.sleep(_PAUSE_S)

    def _rank_is_twice(self, others: Iterable[_Claim], have_met: bool = False) -> InitializationError:
        others = [*others]
        pid, host = (others[0].pid, others[0].host) if others else (0, "")
        named = _named([*others, self._own]) if others else ["another process", *_named([self._own])]
        self.error = InitializationError.rank_twice(self._own.rank, named, have_met, pid, host)
        return self.error

    def _sizes_differ(self, other: _Claim) -> InitializationError:
        own = self._own
        text = f"rank {own.rank} ({own.name})"
        self.error = InitializationError.sizes_differ(other.rank, other.pid, other.host, other.size, text, own.size)
        return self.error

    def _set(self, key: str, expected: str, desired: str) -> str:
        return bytes(self._store.compare_set(key, expected, desired)).decode(errors="replace")


def _named(claims: list[_Claim]) -> list[str]:
    """The processes, for people; with their threads if they are of one process."""
    names = [claim.name for claim in claims]
    if len(set(names)) == len(names):
        return names
    return [f"{claim.name} (thread {claim.thread})" for claim in claims]


def _encoded(claims: list[_Claim]) -> str:
    return json.dumps([asdict(claim) for claim in claims])


def _decoded(text: str | bytes) -> list[_Claim]:
    """The claims; none if it is something else, as of another release. In a store of torch's anybody may write."""
    try:
        return [checked(_Claim, claim) for claim in read_json(text)] if text else []
    except (TypeError, ValueError, AttributeError):
        return []
