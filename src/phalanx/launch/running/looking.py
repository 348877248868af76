"""Looking at the ranks of a running job from another process, which the job neither notices nor helps.

All that is known of a rank is read: its line in /proc, and its flight recorder. That lies in the trace of the rank's
agent, which every rank holds. Where there is none, as in a program that is not Python, the rank may keep a recorder of
its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from phalanx import settings
from phalanx.diagnosis.pace import Pace, PaceOfRank
from phalanx.diagnosis.reading import open_own_recorder
from phalanx.launch.rank.trace import Trace, trace_name
from phalanx.launch.running.jobs import RankProcess
from phalanx.launch.running.rank_look import RankLook
from phalanx.system.processes import ProcessUse, process_use

__all__ = ["RanksHere", "pause_after_s"]

# A rank in no operation that has had less of a core than this does not compute.
_COMPUTES_CORES = 0.02
# The share of a host's cores that looking may use, so that the job does not notice.
_MOST_CORES = 0.0025
_STATES = {"T": "stopped", "t": "debugged", "D": "disk"}


def pause_after_s(used_s: float) -> float:
    """How long to wait before the next look, if one has taken so much time on a core of this host."""
    return used_s / (_MOST_CORES * (os.cpu_count() or 1))


class RanksHere:
    """Looks at ranks of a job on this host, again and again. Call :meth:`close` in the end.

    Args:
        run_id: the job.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._ranks: dict[RankProcess, _Watched] = {}
        self._traces: dict[tuple[int, int], Trace] = {}

    def look(self, ranks: Sequence[RankProcess]) -> tuple[list[RankLook], list[RankProcess]]:
        """A look at each of these ranks that is seen here, and the ranks that are not."""
        if self._ranks.keys() - set(ranks):
            self.close()  # the ranks have been started anew, with another trace that may have the same descriptor
        now_ns = time.monotonic_ns()
        looks: list[RankLook] = []
        unseen: list[RankProcess] = []
        for rank in ranks:
            watched = self._ranks.get(rank) or self._attach(rank)
            if watched is None:
                unseen.append(rank)
            else:
                self._ranks[rank] = watched
                looks.append(watched.look(now_ns))
        return looks, unseen

    def close(self) -> None:
        """Close what is open of the job."""
        for watched in self._ranks.values():
            watched.close()
        for trace in self._traces.values():
            os.close(trace.descriptor)
        self._ranks, self._traces = {}, {}

    def _attach(self, rank: RankProcess) -> _Watched | None:
        """Find a rank's recorder; None if the rank is not a process that can be seen here."""
        if not rank.start:
            return None
        trace = self._trace_of(rank.pid)
        if trace is None and not self._is_jobs(rank.pid):
            return None  # a process of another container with that id, or one that has ended already
        return _Watched(rank, trace)

    def _trace_of(self, pid: int) -> Trace | None:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                found = self._open_trace(pid, int(number))
                if found is not None:
                    return found
        return None

    def _is_jobs(self, pid: int) -> bool:
        """Whether a process was started as one of the job's: a program that is not Python does not keep the trace."""
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            return f"{settings.RUN_ID}={self._run_id}".encode() in file.read().split(b"\0")
        return False

    def _open_trace(self, pid: int, number: int) -> Trace | None:
        key = pid, number
        if key not in self._traces:
            path = f"/proc/{pid}/fd/{number}"
            try:
                if not os.readlink(path).startswith(f"/memfd:{trace_name(self._run_id)} "):
                    return None
                self._traces[key] = Trace(os.open(path, os.O_RDONLY | os.O_CLOEXEC), self._run_id)
            except OSError:
                return None
        return self._traces[key]


class _Watched:
    """A rank that is watched."""

    def __init__(self, process: RankProcess, trace: Trace | None) -> None:
        self._process = process
        self._trace = trace
        self._pace: PaceOfRank | None = None
        if trace is not None:
            self._pace = PaceOfRank(trace.descriptor, trace.place_of_recorder(process.part))
        self._own = -1
        self._before: tuple[int, float] | None = None  # the time of the last look, and the time on cores until then

    def close(self) -> None:
        if self._own >= 0:
            os.close(self._own)
            self._own = -1

    def look(self, now_ns: int) -> RankLook:
        process = self._process
        use = process_use(process.pid)
        if use is not None and (use.start != process.start or use.has_ended):
            use = None
        pace = self._pace.look(now_ns) if self._pace is not None else None
        if pace is not None and pace.pid != process.pid:
            pace = None  # of another rank, whose part this is
        if pace is None and use is not None and self._own < 0:
            own = open_own_recorder(process.pid)
            if own is not None:
                self._own, self._pace = own, PaceOfRank(own, 0)
                pace = self._pace.look(now_ns)
        asked = self._trace.asked(process.part) if self._trace is not None and use is not None else ""
        cores = self._cores(use, now_ns)
        return RankLook(
            rank=process.rank,
            pid=process.pid,
            host=process.host,
            state=_state(use, pace, asked, cores),
            pace=pace,
            asked=asked,
            lag=None,
            cores=cores,
            resident_bytes=use.resident_bytes if use is not None else None,
        )

    def _cores(self, use: ProcessUse | None, now_ns: int) -> float | None:
        before, self._before = self._before, (now_ns, use.cpu_s) if use is not None else None
        if use is None or before is None or now_ns <= before[0]:
            return None
        return max(0.0, use.cpu_s - before[1]) / ((now_ns - before[0]) / 1e9)


def _state(use: ProcessUse | None, pace: Pace | None, asked: str, cores: float | None) -> str:
    if use is None:
        return "ended"
    if use.state in "Tt":
        return _STATES[use.state]
    if (pace is not None and pace.operation is not None) or asked:
        return "waits"
    if use.state in _STATES:
        return _STATES[use.state]
    if cores is None:
        return "computes" if use.state == "R" else "sleeps"
    return "computes" if cores >= _COMPUTES_CORES else "sleeps"
