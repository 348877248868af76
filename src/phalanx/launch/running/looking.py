"""Looking at the ranks of a running job from another process, which the job neither notices nor helps.

All that is known of a rank is read: its line in /proc, and its flight recorder. That lies in the trace of the rank's
host, which the launcher holds for the ranks that it has forked itself, and every rank holds. Where there is none, as in
a program that is not Python, the rank may keep a recorder of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.launch.rank.trace import Trace, trace_name
from phalanx.launch.running.jobs import RankProcess, RunningJob
from phalanx.system import processes
from phalanx.system.process_use import ProcessUse, process_use
from phalanx.watch.pace import GroupKey, Pace, PaceOfRank
from phalanx.watch.records import open_own_recorder

__all__ = ["Look", "RankLook", "Watcher"]

# A rank in no operation that has had less of a core than this does not compute.
_COMPUTES_CORES = 0.02
_STATES = {"T": "stopped", "t": "debugged", "D": "disk"}


@dataclass(frozen=True)
class RankLook:
    """What a look has found of one rank, of this moment or since the look before.

    Attributes:
        rank, pid: its number in the world, and its process.
        state: ``waits`` (in an operation, or for the answer to a call by RPC), ``computes``, ``sleeps`` (in no
            operation, and on no core), ``disk`` (it waits for a disk or a driver), ``stopped``, ``debugged``, or
            ``ended``.
        pace: what its recorder says; None if it has none, or no group yet.
        asked: what it has asked another process for, and waits for; empty for nothing.
        lag: how many collectives it is behind the first rank of a group; None if that is not known.
        cores: how many cores its threads have used on average; None at the first look, and of a rank that has ended.
        resident_bytes: its memory in RAM, with what it shares with others; None of a rank that has ended.
    """

    rank: int
    pid: int
    state: str
    pace: Pace | None
    asked: str
    lag: int | None
    cores: float | None
    resident_bytes: int | None


@dataclass(frozen=True)
class Look:
    """A look at all ranks of a job on this host.

    Attributes:
        job: the job, as its launcher describes it now.
        at: the time, in seconds since 1970.
        interval_s: the time since the look before; 0 at the first.
        ranks: those that can be seen, by rank.
        elsewhere: the ranks on other hosts, by host.
        hidden: the ranks that should be here, and that this process does not see, as in another container.
        launcher: the state of the launcher, as the kernel names it.
    """

    job: RunningJob
    at: float
    interval_s: float
    ranks: Sequence[RankLook]
    elsewhere: dict[str, list[int]]
    hidden: Sequence[int]
    launcher: str


class Watcher:
    """One who looks at a job again and again. Use as a context manager, or call :meth:`close`.

    Args:
        job: the job.
    """

    def __init__(self, job: RunningJob) -> None:
        self.job = job
        self._ranks: dict[RankProcess, _Watched | None] = {}
        self._traces: dict[tuple[int, int], Trace] = {}
        self._before_ns = 0

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open of the job."""
        for watched in self._ranks.values():
            if watched is not None:
                watched.close()
        for trace in self._traces.values():
            os.close(trace.descriptor)
        self._ranks, self._traces = {}, {}

    def look(self) -> Look | None:
        """Look at the job; None if it has ended."""
        job = self.job.again()
        if job is None:
            return None
        if job.processes != self.job.processes:  # the ranks have been started, or started anew
            self.close()
            self.job = job
        now_ns = time.monotonic_ns()
        looks: list[RankLook] = []
        elsewhere: dict[str, list[int]] = {}
        hidden: list[int] = []
        for process in job.processes:
            if process not in self._ranks:
                self._ranks[process] = self._attach(process)
            watched = self._ranks[process]
            if watched is not None:
                looks.append(watched.look(now_ns))
            elif process.host != job.host:
                elsewhere.setdefault(process.host, []).append(process.rank)
            else:
                hidden.append(process.rank)
        interval_s = (now_ns - self._before_ns) / 1e9 if self._before_ns else 0.0
        self._before_ns = now_ns
        return Look(job, time.time(), interval_s, _with_lags(looks), elsewhere, hidden, processes.state_of(job.pid))

    def _attach(self, process: RankProcess) -> _Watched | None:
        """Find a rank's recorder; None if the rank is not a process that can be seen here."""
        if not process.start:
            return None
        if self.job.trace >= 0:
            trace = self._open_trace(self.job.pid, self.job.trace)
        else:
            trace = self._trace_of(process.pid)
            if trace is None:
                return None  # a process of another container with that id, or one that has ended already
        return _Watched(process, trace)

    def _trace_of(self, pid: int) -> Trace | None:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                found = self._open_trace(pid, int(number))
                if found is not None:
                    return found
        return None

    def _open_trace(self, pid: int, number: int) -> Trace | None:
        key = pid, number
        if key not in self._traces:
            path = f"/proc/{pid}/fd/{number}"
            try:
                if not os.readlink(path).startswith(f"/memfd:{trace_name(self.job.run_id)} "):
                    return None
                self._traces[key] = Trace(os.open(path, os.O_RDONLY | os.O_CLOEXEC), self.job.run_id)
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


def _with_lags(looks: Iterable[RankLook]) -> list[RankLook]:
    """The same looks, each with how far the rank is behind the first one of a group that it is in."""
    looks = list(looks)
    furthest: dict[GroupKey, int] = {}
    for look in looks:
        for group, count in (look.pace.collectives if look.pace is not None else {}).items():
            furthest[group] = max(furthest.get(group, 0), count)
    groups: dict[int, list[GroupKey]] = {}
    for group in furthest:
        for rank in group[1]:
            groups.setdefault(rank, []).append(group)
    return [replace(look, lag=_lag(look.pace, groups.get(look.rank, ()), furthest)) for look in looks]


def _lag(pace: Pace | None, groups: Iterable[GroupKey], furthest: Mapping[GroupKey, int]) -> int | None:
    if pace is None:
        return max((furthest[group] for group in groups), default=None)
    # A recorder that does not go back to the first operation may have written over a group that is seldom used.
    known = [group for group in groups if group in pace.collectives or pace.complete]
    return max((furthest[group] - pace.collectives.get(group, 0) for group in known), default=None)
