"""Until the world is made, its ranks watch over each other: each finds out whose process has ended.

No group watches over the ranks yet, and a store that is not Phalanx's own (torchrun's, one that a script opens, a file)
does not know its clients. So each rank writes down its process when it comes, and ranks that wait look at the processes
of their own host. Which of them has gone is written down for the ranks of other hosts. A rank that is alone on its host
and killed is found by nobody, and neither is one that ends before it has come.

Who writes, who reads, and when the writer dies. Below the meeting's part of the store:

- ``<sight>/<n>``: the n-th process that came of those that see each other. Written by that process as it comes, and
  emptied when the meeting is over for it, or has failed by another's fault. After its own fault the entry stays, so
  that a rank that comes later finds the process gone, and says that this one waits for nobody any more. Read by those
  that came as one of the four before or after it, so that a thousand ranks do not ask the store a million questions.
  ``<sight>/rank-0`` names the entry of rank 0, for all.
  If a process dies before it has written its entry, the others do not know of it, and skip its number. If it dies after
  that, they find it gone. If it dies after it has emptied the entry, nobody needs to know: it has finished its part.
- ``gone``: the rank that has gone, with its number in the order of all comings. Written by the rank that finds it, or
  by the rank itself as an exception takes it out of the meeting; read by all. A rank believes it only if it has itself
  come before, so a failed meeting does not end the next one in the same store; one that has come later takes the words
  from it if it finds that process gone itself. If the writer dies before it has
  written, the next rank that looks finds the same, and the writer.
- ``<sight>/left`` and ``left``: how many have come to the end of the meeting, of those that see each other, and of all.
  Each process adds to them as the last thing that it does there. If all that have ever come have now left, the last one
  deletes the keys: nobody reads them any more, because the meeting ends well for no rank before all have come. If a
  rank dies before it adds, or the meeting fails for one, the keys stay. If it dies while it deletes them, some stay; of
  two numbers that are compared the one of those that have left goes first, so it never comes to be the larger one.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from phalanx.diagnosis.recorder import is_kept
from phalanx.errors import BackendError, DeviceError, InitializationError, LauncherEnvironmentError, PhalanxError
from phalanx.membership.departures import ENDED, FAILED, Gone
from phalanx.store.client import JobStore, underlying
from phalanx.system.host import this_host
from phalanx.system.processes import has_ended, own_sight, start_of, state_if_stopped
from phalanx.transports.seat import Seat
from phalanx.words import format_named

__all__ = ["Attendance", "attend", "attending"]

_GONE, _COMINGS, _LEFT = "gone", "comings", "left"
_IS_OVER = "over"  # in the entry of a process that has failed by its own fault
_NEIGHBOURS = 4  # in the order of coming, on either side
# Of the errors of Phalanx and of torch those that are not about other ranks.
_OWN_FAULTS = (BackendError, DeviceError, LauncherEnvironmentError)
_LINGER_S = 1.0
_PAUSE_S = 0.02
_LONGEST_TEXT = 200  # characters of an exception


class _Process(NamedTuple):
    """A process that has come as a rank: what distinguishes it, and under which key it has said so."""

    rank: int
    pid: int
    start: int
    host: str
    key: str


class _Told(NamedTuple):
    """What is written down of a rank that has gone, and when: a number in the order of all comings."""

    number: int
    rank: int
    gone: Gone


class Attendance:
    """As a context: this process is in a meeting of the world's ranks from its beginning to its end.

    Args:
        store: the meeting's part of the job's store.
        rank: this process's rank in the world.
        seat: its seat, if other processes could claim it.
    """

    def __init__(self, store: Store, rank: int, seat: Seat | None = None) -> None:
        self._store = PrefixStore("attendance", store)
        self._seat = seat
        self._rank = rank
        self._came = 0  # this process's number in the order of all comings, which counts from 1
        self._sight = own_sight()
        self._number = 0  # the same among those that it sees
        self._known: dict[str, _Process] = {}

    def __enter__(self) -> None:
        global _open
        try:
            if self._seat is not None:
                self._seat.take()
            self._come()
        except BaseException as error:
            if self._seat is not None:
                self._seat.give_back()
            if isinstance(error, DistError):
                raise InitializationError.store_lost("the ranks meet", error) from error
            raise
        _open = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        global _open
        _open = None
        if self._seat is not None:
            (self._seat.leave if error is None else self._seat.give_back)()
        with contextlib.suppress(RuntimeError):  # the store has gone
            if error is not None and self._is_own_fault(error):
                self._say(self._rank, _going(error))
                if self._number:
                    self._store.set(self._entry(self._number), self._own_entry(_IS_OVER))
            elif self._number:
                self._store.set(self._entry(self._number), "")
            if error is None:
                self._leave()
            elif self._rank == 0:
                self._linger()

    def _is_own_fault(self, error: BaseException) -> bool:
        """Whether the other ranks are to hear of it from this one."""
        if self._seat is not None and error is self._seat.error:
            return True
        return not isinstance(error, (DistError, PhalanxError)) or isinstance(error, _OWN_FAULTS)

    def _come(self) -> None:
        self._came = self._store.add(_COMINGS, 1)
        if self._sight:
            self._number = self._store.add(self._sight, 1)
            key = self._entry(self._number)
            self._store.set(key, self._own_entry())
            if self._rank == 0:
                self._store.set(self._entry("rank-0"), key)

    def _leave(self) -> None:
        """Count this process as one for which the meeting is over; the last one clears the store."""
        if self._number:
            came = self._store.add(self._sight, 0)
            if self._store.add(self._entry(_LEFT), 1) == came:
                self._delete([self._entry(number) for number in range(1, came + 1)])
                self._delete([self._entry("rank-0"), self._entry(_LEFT), self._sight])
        came = self._store.add(_COMINGS, 0)  # before it is counted: afterwards another may delete the keys at once
        if self._store.add(_LEFT, 1) == came:
            self._delete([_LEFT, _GONE, _COMINGS])

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def _linger(self) -> None:
        """Let the others find the same reason as rank 0, whose store may go with its process."""
        until = time.monotonic() + _LINGER_S
        self._read_new()
        while time.monotonic() < until and any(
            not _has_ended(process) and process.rank not in self.stopped() and _waits(self._store.get(process.key))
            for process in self._known.values()
        ):
            time.sleep(_PAUSE_S)

    def gone(self, ranks: Collection[int]) -> dict[int, Gone]:
        """The rank that has gone, as all in the meeting say; none if nobody knows of one. It asks the store."""
        try:
            told = self._told()
            if told is not None and told.number > self._came and told.rank != self._rank:
                return {told.rank: told.gone}
            self._read_new()
            ended = self._ended(ranks)
            # One that emptied its entry right before it ended is not among those that the meeting has lost.
            for process in list(ended.values()):
                if not self._store.get(process.key):
                    del self._known[process.key], ended[process.rank]
        except RuntimeError:
            return self._gone_with_store(ranks)
        if not ended:
            return {}
        rank, process = min(ended.items())
        gone = Gone(process.pid, process.host, ENDED)
        if told is not None and (told.rank, told.gone.pid, told.gone.host) == (rank, process.pid, process.host):
            gone = told.gone
        with contextlib.suppress(RuntimeError):
            self._say(rank, gone)
        return {rank: gone}

    def _gone_with_store(self, ranks: Collection[int]) -> dict[int, Gone]:
        """Rank 0, if it has ended: the store has, and cannot say for whom the meeting was over."""
        ended = self._ended(ranks)
        if 0 not in ended:
            return {}
        others = sorted(ended.keys() - {0})
        also = f" ({format_named('rank', others)} {'have' if others[1:] else 'has'} ended as well)" if others else ""
        return {0: Gone(ended[0].pid, ended[0].host, ENDED, f"with the store{also}")}

    def check_seat(self) -> None:
        """Look whether another process claims this one's rank, or has come with another world size.

        Raises:
            InitializationError: one does.
        """
        if self._seat is not None:
            self._seat.check()

    def seat_in_question(self) -> bool:
        """Whether another process has come with another world size, so that one of the two is soon to raise."""
        return self._seat is not None and self._seat.is_in_question

    def doubt_seat(self) -> InitializationError | None:
        """The error of a meeting that is late, if an earlier process of this rank may be why."""
        return None if self._seat is None else self._seat.doubt()

    def all_have_come(self) -> None:
        """All ranks of the world have come: from now on nobody may claim this one's seat."""
        if self._seat is not None:
            self._seat.leave()

    def sees_rank_0(self) -> bool:
        """Whether this process can see how rank 0 ends, which has the store if the launcher has not."""
        return self._rank != 0 and any(process.rank == 0 for process in self._known.values())

    def read_rank_0(self) -> None:
        """Read who rank 0 is, which has come."""
        if self._sight and not self.sees_rank_0():
            with contextlib.suppress(RuntimeError):  # the next request finds that the store has gone
                self._read_entries([])

    def read_new(self) -> None:
        """Read who else has come, as far as this process looks at them."""
        with contextlib.suppress(RuntimeError):  # the next request finds that the store has gone
            self._read_new()

    def stopped(self) -> dict[int, tuple[int, str, str]]:
        """The ranks whose processes this one sees stopped: the pid, the host, and the kernel's letter for the state."""
        found = {}
        for process in self._known.values():
            if state := state_if_stopped(process.pid, process.start):
                found[process.rank] = process.pid, process.host, state
        return found

    def _told(self) -> _Told | None:
        if not self._store.check([_GONE]):
            return None
        number, rank, pid, host, way, text = json.loads(self._store.get(_GONE))
        return _Told(number, rank, Gone(pid, host, way, text))

    def _say(self, rank: int, gone: Gone) -> None:
        number = self._store.add(_COMINGS, 1)
        self._store.set(_GONE, json.dumps([number, rank, gone.pid, gone.host, gone.way, gone.text]))

    def _entry(self, name: int | str) -> str:
        return f"{self._sight}/{name}"

    def _own_entry(self, *more: str) -> str:
        pid = os.getpid()
        return json.dumps([self._rank, pid, start_of(pid), this_host().name, *more])

    def _read_new(self) -> None:
        """Read the entries that this process has not read yet: of rank 0, and of those that came next to it."""
        if not self._sight:
            return
        last = min(self._store.add(self._sight, 0), self._number + _NEIGHBOURS)
        keys = [self._entry(number) for number in range(max(1, self._number - _NEIGHBOURS), last + 1)]
        self._read_entries(keys)

    def _read_entries(self, keys: list[str]) -> None:
        """Read those that are there, and rank 0's."""
        if not self.sees_rank_0() and self._store.check([self._entry("rank-0")]):
            keys = [*keys, self._store.get(self._entry("rank-0")).decode()]
        for key in keys:
            # The key may be about to be written: then a later look reads it.
            if key not in (self._entry(self._number), *self._known) and self._store.check([key]):
                entry = self._store.get(key)
                if entry:
                    rank, pid, start, host, *_ = json.loads(entry)
                    self._known[key] = _Process(rank, pid, start, host, key)

    def _ended(self, ranks: Collection[int]) -> dict[int, _Process]:
        """Those of these ranks that came and of which no process is left; a second one may have been refused."""
        known = self._known.values()
        not_ended = {process.rank for process in known if not _has_ended(process)} | {self._rank}
        return {each.rank: each for each in known if each.rank in ranks and each.rank not in not_ended}


# The meeting that this process is in. Written by the thread that makes the world.
_open: Attendance | None = None


@contextlib.contextmanager
def attend(store: Store, rank: int, size: int, common: Store | None = None) -> Iterator[None]:
    """While the body runs, this process is in a meeting of the world's ranks, perhaps in one that began before.

    In Phalanx's own store nobody needs to look, since that sees who goes, and names to each rank those that it can look
    at while it waits (``store/company.py``). A second way to tell would race with it: a rank that has heard of the end
    of another and gives up would be told to the rest as the one that has gone. Under ``phalanx run`` nobody needs to
    look either: the launcher ends the job with a rank that fails, says which is stopped, and tells its store which have
    ended in order.

    Args:
        store: the meeting's part of the job's store.
        rank, size: this process's place in the world.
        common: what the meetings of all world sizes have in common of that store; by default all of it.

    Raises:
        InitializationError: another process claims this rank (``seat.py``), or the store has gone.
    """
    if _open is not None or is_kept() or isinstance(underlying(store), JobStore):
        yield
    else:
        with Attendance(store, rank, Seat(PrefixStore("seats", common or store), rank, size)):
            yield


def attending() -> Attendance | None:
    """The meeting of the world's ranks that this process is in, if it is in one."""
    return _open


def _going(error: BaseException) -> Gone:
    """How this process goes that an exception takes out of the meeting."""
    pid, host = os.getpid(), this_host().name
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return Gone(pid, host, ENDED, f"with exit code {error.code or 0}")
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Gone(pid, host, FAILED, text[:_LONGEST_TEXT])


def _waits(entry: bytes) -> bool:
    """Whether the process of this entry is still in the meeting, unless it has died."""
    return bool(entry) and _IS_OVER not in json.loads(entry)[4:]


def _has_ended(process: _Process) -> bool:
    return has_ended(process.pid, process.start)
