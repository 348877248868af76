"""Without ``phalanx run``: a rank that waits says for whom, long before the group's timeout is over.

Under ``phalanx run`` the launcher sees all ranks and says it (``launch/hang_watch.py``); other launchers do not look.
So each rank has a thread that looks at its own flight recorder twice a second, which takes microseconds. When an
operation has lasted for long, the thread reads the recorders of the world's other ranks on this host, and concludes
from all of them who keeps the others (``verdict.py``). Of the ranks of a host that wait the first says so, and ever
more seldom.

Ranks of other hosts are not seen. If it depends on one of them, nothing is said, and the group's timeout names it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from phalanx import settings
from phalanx.errors import PhalanxError
from phalanx.system.awake import AwakeClock
from phalanx.system.processes import state_of
from phalanx.system.threads import start
from phalanx.watch.call_site import shown
from phalanx.watch.from_outside import place_of_main
from phalanx.watch.glance import Glance, glance
from phalanx.watch.recorder import is_kept, own_place
from phalanx.watch.records import read_process, read_recording
from phalanx.watch.verdict import Seen, Verdict, judge
from phalanx.words import tell

__all__ = ["OwnWaits", "watch_own_waits"]

_WARN_AFTER_S = 5.0
_LOOK_S = 0.5
_AGAIN = 4  # each line about one wait comes when it has lasted so many times longer than at the last
_MOST_ASKED = 2  # of those that others wait for; each may take seconds to say where it is
_ENDS_IN_S = 0.3


def watch_own_waits(rank: int, pids: Mapping[int, int]) -> OwnWaits | None:
    """Begin to watch, with a thread; None where the launcher does, where nobody else is seen, or nobody wants it.

    Args:
        rank: this process's rank in the world.
        pids: the process ids of the ranks of the world on this host, by rank.
    """
    after_s = _wanted()
    if is_kept() or len(pids) < 2 or not after_s:
        return None
    waits = OwnWaits(rank, pids, after_s)
    waits.start()
    return waits


def _wanted() -> float:
    """After how many seconds to say something; 0 for never."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(os.environ.get(settings.WARN_AFTER) or _WARN_AFTER_S))
    return _WARN_AFTER_S


class OwnWaits:
    """The waits of this process. One thread calls :meth:`look`; the state of the waits is that thread's alone.

    Other threads only set ``_over``. The recorders of other processes are read, and nothing is written there, so a
    process that dies while it is looked at is one that cannot be read.

    Args:
        rank: this process's rank in the world.
        pids: the process ids of the ranks of the world on this host, by rank.
        after_s: how long a wait is nothing to speak of.
        say: prints a line.
    """

    def __init__(self, rank: int, pids: Mapping[int, int], after_s: float, say: Callable[[str], None] = tell) -> None:
        self._rank, self._pids, self._after_s, self._say = rank, dict(pids), after_s, say
        self._look_s = min(_LOOK_S, after_s / 4)
        self._clock = AwakeClock()  # a job that was suspended has not waited meanwhile
        self._last: Glance | None = None
        self._since_s = self._say_at_s = 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, if there is a thread for it."""
        thread = threading.Thread(target=self._run, name="phalanx-waits", daemon=True)
        with contextlib.suppress(RuntimeError):  # a job runs as well without
            start(thread)
            self._thread = thread

    def close(self) -> None:
        """Look no more. It may be called again."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ENDS_IN_S)

    def leave(self) -> list[threading.Thread]:
        """Have the thread end, without waiting for it; returns it. See ``c10d/leaving.py``."""
        self._over.set()
        return [] if self._thread is None else [self._thread]

    def give_back(self) -> None:
        """Nothing is left that would disturb the interpreter's end."""

    def _run(self) -> None:
        while not self._over.wait(self._look_s):
            try:
                self.look()
            except (OSError, ValueError, PhalanxError):  # the program has closed the recorder's file
                return

    def look(self) -> None:
        """See whether this rank has waited for long, and say for whom if it is the first that does.

        Raises:
            OSError, ValueError, PhalanxError: this process's own recorder cannot be read.
        """
        found, now_s = glance(*own_place()), self._clock.now()
        if found is None or not found.under_way_since_ns:
            self._last = None
            return
        if found != self._last:
            self._last, self._since_s, self._say_at_s = found, now_s, self._after_s - self._look_s
        waited_s = now_s - self._since_s
        if waited_s < self._say_at_s:
            return
        text = self._concluded()
        waited_s = self._clock.now() - self._since_s  # others may have taken seconds to say where they are
        self._say_at_s = waited_s * _AGAIN
        if text and found == glance(*own_place()):  # else it has gone on meanwhile
            self._say(f"{text}, for {waited_s + self._look_s:.0f} s now")

    def _concluded(self) -> str:
        """Put into words who keeps this rank. The text is empty if another rank says it, or if nobody here can know."""
        seen = [self._seen(rank, pid) for rank, pid in sorted(self._pids.items())]
        verdict = judge(seen)
        if verdict is None or not self._says(verdict, seen):
            return ""
        asked = [rank for rank in verdict.awaited if rank != self._rank][:_MOST_ASKED]
        seen = [replace(each, place=self._place(each)) if each.rank in asked else each for each in seen]
        verdict = judge(seen)
        return verdict.sentence if verdict is not None and self._says(verdict, seen) else ""

    def _says(self, verdict: Verdict, seen: list[Seen]) -> bool:
        """Whether this rank is the first of those that wait, and all that are waited for are seen, and there."""
        there = {each.rank for each in seen if each.state not in ("", "Z", "X")}
        joins = any(each.operation is not None and each.operation.kind == "init" for each in seen)
        own = min(verdict.waiting, default=-1) == self._rank
        return own and not joins and bool(verdict.awaited) and set(verdict.awaited) <= there

    def _seen(self, rank: int, pid: int) -> Seen:
        recording = None
        with contextlib.suppress(OSError, ValueError, PhalanxError):  # it has ended, or has begun to
            recording = read_recording(*own_place()) if rank == self._rank else read_process(pid)
        return Seen(rank, recording, state_of(pid))

    def _place(self, seen: Seen) -> str:
        place = "" if seen.state in ("T", "t") else place_of_main(self._pids[seen.rank])
        return shown(place) if place else ""
