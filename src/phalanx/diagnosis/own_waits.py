"""Watch this rank's own waits, and say for whom it waits, where no ``phalanx run`` does.

Each rank has a thread that looks at its own flight recorder twice a second, which takes microseconds. When an operation
has lasted for long, it reads the recorders of the world's other ranks on this host and analyses them (``diagnose.py``).
Of the ranks of a host that wait the first says it, and ever more seldom.

If it depends on a rank of another host, that host is asked, where it can be, and one of its ranks answers for all
(``membership/liveness.py``); ranks beside that rank which wait too say it themselves. Where nobody can be
asked, as over MPI, nothing is said, and the group's timeout names the rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from phalanx import settings
from phalanx.diagnosis.call_site import running_at, shown
from phalanx.diagnosis.diagnose import HangDiagnosis, diagnose
from phalanx.diagnosis.reading import Position, read_memory, read_position, read_process
from phalanx.diagnosis.recorder import is_kept, own_memory, own_place
from phalanx.diagnosis.snapshot import RankSnapshot
from phalanx.diagnosis.stacks import place_of_main
from phalanx.errors import PhalanxError
from phalanx.system.processes import state_of
from phalanx.system.threads import AwakeClock, start
from phalanx.words import tell

_WARN_AFTER_S = 5.0
_LOOK_S = 0.5
AGAIN = 4  # each line about one wait comes when it has lasted so many times longer than at the last
_MOST_ASKED = 2  # of those that others wait for; each may take seconds to say where it is
_ENDS_IN_S = 0.3
_GONE = ("", "Z", "X")  # states of a process


class OtherHosts(Protocol):
    """The ranks of other hosts.

    Attributes:
        answer: tells them, whenever they ask, what the ranks of this host do; nothing if it is empty.
    """

    answer: Callable[[], Sequence[RankSnapshot]]

    def ask(self, over: Callable[[], bool]) -> list[RankSnapshot]:
        """Ask what they do, for seconds; empty if nobody can be asked. ``over`` says that nobody wants to know."""

    def named(self, seen: RankSnapshot) -> RankSnapshot:
        """The same with the name of its host."""


def watch_own_waits(rank: int, pids: Mapping[int, int], others: OtherHosts | None = None) -> OwnWaits | None:
    """Begin to watch, with a thread; None where the launcher does, where nobody else is seen, or nobody wants it.

    ``pids`` are the processes of the world's ranks on this host, by rank; ``others`` asks the ranks of other hosts.
    """
    after_s = warn_after_s()
    if is_kept() or (len(pids) < 2 and others is None) or not after_s:
        return None
    return OwnWaits(rank, pids, others, after_s)


def warn_after_s() -> float:
    """After how many seconds a rank says for whom it waits; 0 for never."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(os.environ.get(settings.WARN_AFTER) or _WARN_AFTER_S))
    return _WARN_AFTER_S


class OwnWaits:
    """Watch the waits of this process. Its thread owns the state; others only set ``_over``."""

    def __init__(self, rank: int, pids: Mapping[int, int], others: OtherHosts | None, after_s: float) -> None:
        self._rank, self._pids, self._others, self._after_s = rank, dict(pids), others, after_s
        self._look_s = min(_LOOK_S, after_s / 4)
        self._clock = AwakeClock()  # a job that was suspended has not waited meanwhile
        self._last: Position | None = None
        self._since_s = self._say_at_s = 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        thread = threading.Thread(target=self._run, name="phalanx-waits", daemon=True)
        with contextlib.suppress(RuntimeError):  # a job runs as well without
            start(thread)
            self._thread = thread
        if others is not None:
            others.answer = self._answer

    def close(self) -> None:
        """Look no more. It may be called again."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ENDS_IN_S)

    def leave(self) -> list[threading.Thread]:
        """Have the thread end, without waiting for it; returns it. See ``c10d/leaving.py``."""
        self._over.set()
        return [] if self._thread is None else [self._thread]

    def _run(self) -> None:
        while not self._over.wait(self._look_s):
            try:
                self._look()
            except (OSError, ValueError, PhalanxError):  # the program has closed the recorder's file
                return

    def _look(self) -> None:
        """See whether this rank has waited for long, and say for whom if it is the first that does."""
        found, now_s = read_position(*own_place()), self._clock.now()
        if found is None or not found.under_way_since_ns:
            self._last = None
            return
        if found != self._last:
            self._last, self._since_s, self._say_at_s = found, now_s, self._after_s - self._look_s
        if now_s - self._since_s < self._say_at_s:
            return
        text = self._concluded()
        waited_s = self._clock.now() - self._since_s + self._look_s
        self._say_at_s = waited_s * AGAIN
        if text and found == read_position(*own_place()):  # else it has gone on meanwhile
            tell(f"{text}, for {waited_s:.0f} s now")

    def _concluded(self) -> str:
        """Put into words who keeps this rank. The text is empty if another rank says it, or if nobody can know."""
        seen = self._sight()
        found = self._diagnosed(seen)
        if found is not None and self._others is not None and not _are_there(found, seen):
            seen = [*map(self._others.named, seen), *self._others.ask(self._over.is_set)]
            found = self._diagnosed(seen)
            if found is not None and self._is_said_there(found, seen):
                return ""
        if found is None or not _are_there(found, seen):
            return ""
        placed = diagnose(self._placed(seen, found.awaited))
        return placed.sentence if placed is not None else ""

    def _diagnosed(self, seen: Sequence[RankSnapshot]) -> HangDiagnosis | None:
        """The diagnosis, if this rank is the first of those that wait, and none of them waits to join."""
        if any(each.operation is not None and each.operation.kind == "init" for each in seen):
            return None
        found = diagnose(seen)
        return found if found is not None and min(found.waiting, default=-1) == self._rank else None

    def _is_said_there(self, diagnosis: HangDiagnosis, seen: Sequence[RankSnapshot]) -> bool:
        """Return whether the awaited ranks have others beside them that wait as well, and so say it."""
        host = {each.rank: each.host for each in seen}
        waits = {host[rank] for rank in diagnosis.waiting} - {host[self._rank]}
        return bool(diagnosis.awaited) and {host.get(rank) for rank in diagnosis.awaited} <= waits

    def _answer(self) -> list[RankSnapshot]:
        """Tell what the ranks of this host do, if this is the first that is not stopped. Called on another thread."""
        before = [pid for rank, pid in self._pids.items() if rank < self._rank]
        if self._over.is_set() or any(state_of(pid) not in (*_GONE, "T", "t") for pid in before):
            return []
        try:
            return self._here()
        except (OSError, ValueError, PhalanxError):  # the program has closed the recorder's file
            return []

    def _here(self) -> list[RankSnapshot]:
        """Take snapshots of the ranks of this host, with the places of those that are in no operation."""
        seen = self._sight()
        return self._placed(seen, [each.rank for each in seen if each.operation is None])

    def _sight(self) -> list[RankSnapshot]:
        found = []
        for rank, pid in sorted(self._pids.items()):
            recording = None
            with contextlib.suppress(OSError, ValueError, PhalanxError):  # it has ended, or has begun to
                recording = read_memory(own_memory()) if rank == self._rank else read_process(pid)
            found.append(RankSnapshot(rank, recording, state_of(pid)))
        return found

    def _placed(self, seen: Sequence[RankSnapshot], ranks: Collection[int]) -> list[RankSnapshot]:
        """The same with the places of these ranks, of the first few that are here."""
        asked = [rank for rank in sorted(ranks) if rank in self._pids][:_MOST_ASKED]
        places = dict.fromkeys(asked, "")
        for each in seen:
            if each.rank == self._rank:
                places[each.rank] = running_at(sys._current_frames().get(threading.main_thread().ident or 0))
            elif each.rank in asked and not each.is_stopped:
                places[each.rank] = place_of_main(self._pids[each.rank])
        return [replace(each, place=shown(places[each.rank])) if each.rank in asked else each for each in seen]


def _are_there(diagnosis: HangDiagnosis, seen: Sequence[RankSnapshot]) -> bool:
    """Return whether somebody is waited for, and all of them are seen and there, or their hosts are silent."""
    there = {each.rank for each in seen if each.silent or each.state not in _GONE}
    return bool(diagnosis.awaited) and set(diagnosis.awaited) <= there
