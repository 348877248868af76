"""Look at one rank: its line in /proc, and its flight recorder. The rank neither notices nor helps.

Its agent looks (:class:`WatchedRank`), and what it finds (:class:`RankLook`) goes to ``phalanx top``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from phalanx.diagnosis.pace import Pace, PaceOfRank
from phalanx.diagnosis.reading import open_own_recorder
from phalanx.diagnosis.snapshot import Recording, ranks_in, spans
from phalanx.launch.rank.trace import Trace
from phalanx.system.foreign_values import checked
from phalanx.system.host import machine_name
from phalanx.system.processes import ProcessUse, process_use

__all__ = ["RankLook", "WatchedRank", "pause_after_s"]

# A rank in no operation that has had less of a core than this does not compute.
_COMPUTES_CORES = 0.02
# The share of a host's cores that looking may use, so that the job does not notice.
_MOST_CORES = 0.0025
_STATES = {"T": "stopped", "t": "debugged", "D": "disk"}
_OWN = ("rank", "pid", "host", "state", "asked", "cores", "resident_bytes")
_RATES = ("operations_per_s", "bytes_per_s", "steps_per_s", "communication", "complete")


@dataclass(frozen=True)
class RankLook:
    """What a look has found of one rank, of this moment or since the look before.

    Attributes:
        rank, pid: its number in the world, and its process.
        host: the name of its host.
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
    host: str
    state: str
    pace: Pace | None
    asked: str
    lag: int | None
    cores: float | None
    resident_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which :meth:`from_json` makes the same; without the lag, which takes all ranks to know."""
        return {**{name: getattr(self, name) for name in _OWN}, "pace": None if self.pace is None else _sent(self.pace)}

    @classmethod
    def from_json(cls, values: dict[str, Any], later_ns: int = 0) -> RankLook:
        """See :meth:`to_json`.

        Args:
            values: the plain values.
            later_ns: how much this host's monotonic clock is ahead of that of the host where the look was taken.

        Raises:
            ValueError, TypeError, KeyError, IndexError: they were not made by :meth:`to_json`.
        """
        pace = values["pace"]
        own = {name: values[name] for name in _OWN}
        return checked(cls, {**own, "lag": None, "pace": None if pace is None else _received(pace, later_ns)})


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
        self._own = -1  # the recorder of a program that is not Python
        self._before: tuple[int, float] | None = None  # the time of the last look, and the time on cores until then

    def close(self) -> None:
        """Close what is open of the rank."""
        if self._own >= 0:
            os.close(self._own)

    def look(self, now_ns: int, *, runs: bool) -> RankLook:
        """Look at the rank; ``runs`` says whether its agent has not reaped it."""
        use = process_use(self._pid) if runs else None
        if use is not None and use.has_ended:
            use = None
        pace = self._pace.look(now_ns)
        if pace is None and use is not None and self._own < 0:
            own = open_own_recorder(self._pid)
            if own is not None:
                self._own, self._pace = own, PaceOfRank(own, 0)
                pace = self._pace.look(now_ns)
        asked = self._trace.asked(self._part) if use is not None else ""
        cores = self._cores(use, now_ns)
        return RankLook(
            rank=self._rank,
            pid=self._pid,
            host=machine_name(),
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


def pause_after_s(used_s: float) -> float:
    """Return how long to wait before the next look, if one has taken so much time on a core of this host."""
    return used_s / (_MOST_CORES * (os.cpu_count() or 1))


def _state(use: ProcessUse | None, pace: Pace | None, asked: str, cores: float | None) -> str:
    if use is None:
        return "ended"
    if use.state in "Tt":
        return _STATES[use.state]
    if (pace is not None and pace.operation is not None) or asked:
        return "waits"
    if use.state in _STATES:
        return _STATES[use.state]
    # On a busy machine a rank that computes may wait for a core longer than between two looks.
    return "computes" if use.state == "R" or (cores or 0.0) >= _COMPUTES_CORES else "sleeps"


def _sent(pace: Pace) -> dict[str, Any]:
    records = {record.number: record for record in (pace.operation, pace.last) if record is not None}
    kept = tuple(records[number] for number in sorted(records))
    recording = Recording(pace.pid, -1, 0, pace.step, pace.label, pace.begun, kept)
    return {
        "recording": recording.to_json(),
        "operation": None if pace.operation is None else pace.operation.number,
        "last": None if pace.last is None else pace.last.number,
        **{name: getattr(pace, name) for name in _RATES},
        "collectives": [[name, spans(ranks), count] for (name, ranks), count in pace.collectives.items()],
    }


def _received(values: dict[str, Any], later_ns: int) -> Pace:
    recording = Recording.from_json(values["recording"]).later(later_ns)
    records = {record.number: record for record in recording.records}
    found = {name: None if values[name] is None else records[values[name]] for name in ("operation", "last")}
    own = {name: getattr(recording, name) for name in ("pid", "begun", "step", "label")}
    collectives = {(str(name), ranks_in(ranks)): int(count) for name, ranks, count in values["collectives"]}
    return checked(Pace, {**own, **found, **{name: values[name] for name in _RATES}, "collectives": collectives})
