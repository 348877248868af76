"""Look at one rank: its line in /proc, and its flight recorder. The rank neither notices nor helps.

Its agent looks (:class:`WatchedRank`), and what it finds (:class:`RankLook`) goes to ``phalanx top``.
"""

from __future__ import annotations

import os

import msgspec

from phalanx.diagnosis.pace import Pace, PaceOfRank
from phalanx.launch.rank.trace import Trace
from phalanx.system.host import machine_name
from phalanx.system.processes import ProcessUse, process_use

__all__ = ["RankLook", "WatchedRank", "pause_after_s"]

# A rank in no operation that has had less of a core than this does not compute.
_COMPUTES_CORES = 0.02
# The share of a host's cores that looking may use, so that the job does not notice.
_MOST_CORES = 0.0025
_STATES = {"T": "stopped", "t": "debugged", "D": "disk"}


class RankLook(msgspec.Struct):
    """What a look has found of one rank, of this moment or since the look before.

    Attributes:
        rank, pid: its number in the world, and its process.
        host: the name of its host.
        state: ``waits`` (in an operation, or for the answer to a call by RPC), ``computes``, ``sleeps`` (in no
            operation, and on no core), ``disk`` (it waits for a disk or a driver), ``stopped``, ``debugged``, or
            ``ended``.
        pace: what its recorder says; None if it has none, or no group yet.
        asked: what it has asked another process for, and waits for; empty for nothing.
        cores: how many cores its threads have used on average; None at the first look, and of a rank that has ended.
        resident_bytes: its memory in RAM, with what it shares with others; None of a rank that has ended.
        lag: how many collectives it is behind the first rank of a group. It takes a look at all ranks to know.
    """

    rank: int
    pid: int
    host: str
    state: str
    pace: Pace | None
    asked: str
    cores: float | None
    resident_bytes: int | None
    lag: int | None = None


class WatchedRank:
    """One rank, as its agent looks at it again and again.

    Args:
        trace: of the agent.
        part: the rank's part of it.
        rank, pid: its number in the world, and its process.
    """

    def __init__(self, trace: Trace, part: int, rank: int, pid: int) -> None:
        self._trace, self._part, self._rank, self._pid = trace, part, rank, pid
        self._pace = PaceOfRank(trace.descriptor, trace.place_of_recorder(part))
        self._before: tuple[int, float] | None = None  # the time of the last look, and the time on cores until then

    def look(self, now_ns: int, *, runs: bool) -> RankLook:
        """Look at the rank; ``runs`` says whether its agent has not reaped it."""
        use = process_use(self._pid) if runs else None
        if use is not None and use.has_ended:
            use = None
        pace = self._pace.look(now_ns)
        asked = self._trace.asked(self._part) if use is not None else ""
        cores = None
        if use is not None and self._before is not None and now_ns > self._before[0]:
            cores = max(0.0, use.cpu_s - self._before[1]) / ((now_ns - self._before[0]) / 1e9)
        self._before = (now_ns, use.cpu_s) if use is not None else None
        memory = use.resident_bytes if use is not None else None
        state = _state(use, pace, asked, cores)
        return RankLook(self._rank, self._pid, machine_name(), state, pace, asked, cores, memory)


def pause_after_s(used_s: float) -> float:
    """Return how long to wait before the next look, if one has taken so much time on a core of this host."""
    return used_s / (_MOST_CORES * (os.cpu_count() or 1))


def _state(use: ProcessUse | None, pace: Pace | None, asked: str, cores: float | None) -> str:
    if use is None:
        return "ended"
    in_operation = (pace is not None and pace.operation is not None) or bool(asked)
    if use.state in _STATES and not (in_operation and use.state == "D"):
        return _STATES[use.state]
    if in_operation:
        return "waits"
    # On a busy machine a rank that computes may wait for a core longer than between two looks.
    return "computes" if use.state == "R" or (cores or 0.0) >= _COMPUTES_CORES else "sleeps"
