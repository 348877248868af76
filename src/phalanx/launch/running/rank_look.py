"""What a look finds of one rank: for the table, and on its way from the host where somebody has looked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from phalanx.diagnosis.pace import Pace
from phalanx.diagnosis.snapshot import Recording, ranks_in, spans
from phalanx.system.foreign_values import checked

__all__ = ["RankLook"]

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

    def with_lag(self, lag: int | None) -> RankLook:
        """The same with its lag, once that is known."""
        return replace(self, lag=lag)


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
