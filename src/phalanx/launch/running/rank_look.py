"""Look at one rank: its line in /proc, and its flight recorder. The rank neither notices nor helps.

Its agent looks (:class:`WatchedRank`), and what it finds (:class:`RankLook`) goes to ``phalanx top``. A rank may run
hundreds of thousands of operations a second. So a look copies the recorder once, counts in numpy, and puts only two
operations into words.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.diagnosis.reading import RecorderCopy, copy_recorder
from phalanx.diagnosis.snapshot import KINDS, Record, spans, world_rank
from phalanx.launch.rank.trace import Trace
from phalanx.native.core import RECORDS, SeenRecord
from phalanx.system.files import beside, own_folder
from phalanx.system.host import machine_name
from phalanx.system.processes import ProcessUse, process_use

# A rank in no operation that has had less of a core than this does not compute.
_COMPUTES_CORES = 0.02
# The share of a host's cores that looking may use, so that the job does not notice.
_MOST_CORES = 0.0025
_STATES = {"T": "stopped", "t": "debugged", "D": "disk"}
_SEND, _RECV = (number for number, kind in KINDS.items() if kind in ("send", "recv"))
_SEEN = np.dtype(SeenRecord)
_STEPS = 20  # a rate of steps is the mean over so many of the last ones
_ENDLESS = np.iinfo(np.uint64).max

_Records = npt.NDArray[np.void]


class Pace(msgspec.Struct):
    """Rates of one rank, by its recorder.

    They are of the time since the look before, or of the last 4,096 operations if there were more since then. At the
    first look they are of all that the recorder holds.

    Attributes:
        begun: how many operations have begun since its first.
        operation, last: the one that it is in, and the last one to begin, as ``phalanx top --json`` prints them.
        step: None if the script says none.
        operations_per_s, bytes_per_s: the operations that began, and the bytes of those that ended.
        steps_per_s: the mean over the last 20 steps, or those since the look before; None if the script says none.
        communication: the share of the time in which it was in an operation, from 0 to 1.
        collectives: of each group its name, its ranks (:func:`spans`), and how many collectives this one has begun.
        complete: whether the recorder goes back to the first operation, so that ``collectives`` has every group.
    """

    begun: int = msgspec.field(name="operations")
    operation: dict[str, Any] | None
    last: dict[str, Any] | None
    step: int | None
    label: str
    operations_per_s: float
    bytes_per_s: float
    steps_per_s: float | None
    communication: float
    collectives: list[tuple[str, list[list[int]], int]]
    complete: bool


class RankLook(msgspec.Struct):
    """Findings of a look at one rank, of this moment or since the look before.

    Attributes:
        state: ``waits`` (in an operation, or for the answer to a call by RPC), ``computes``, ``sleeps`` (in no
            operation, and on no core), ``disk`` (it waits for a disk or a driver), ``stopped``, ``debugged`` or
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
    """One rank, of which an agent's trace has a part, looked at again and again."""

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


class PaceOfRank:
    """Looks at the recorder that begins at ``at`` in a file, again and again."""

    def __init__(self, file: int, at: int) -> None:
        self._place = file, at
        self._before_ns = 0  # the time of the last look, on the host's monotonic clock
        self._begun = 0
        self._step = -1

    def look(self, now_ns: int) -> Pace | None:
        """Compare with the last look, by the host's monotonic clock; None if there is no recorder so far."""
        copy = copy_recorder(*self._place)
        if copy is None:
            self._before_ns = now_ns
            return None
        # A structured array of the same memory, in the order in which the operations began.
        memory: Any = copy.seen
        seen = np.frombuffer(memory, dtype=_SEEN) if len(memory) else np.empty(0, dtype=_SEEN)
        order = np.argsort(seen["number"], kind="stable")
        seen = seen[order]
        if not self._before_ns:
            self._before_ns = int(seen["entered_ns"].min()) if len(seen) else now_ns
            self._begun = copy.begun - len(seen)
        begun = copy.begun - int((seen["entered_ns"] > now_ns).sum())  # a busy machine may take the copy long after
        now_ns = max(now_ns, self._before_ns + 1)
        elapsed_s = (now_ns - self._before_ns) / 1e9
        left, since_ns = seen["left_ns"], self._before_ns
        if copy.begun - self._begun > len(seen) and len(seen):
            since_ns = max(since_ns, int(seen["entered_ns"][0]))  # what was before that has been written over
        covered_s = max(now_ns - since_ns, 1) / 1e9
        kinds = seen["what"] & 0xFF
        messages = (kinds == _SEND) | (kinds == _RECV)
        under_way = np.flatnonzero(left == 0)
        collectives = under_way[~messages[under_way]]
        first = collectives if len(collectives) else under_way
        found = Pace(
            begun=copy.begun,
            operation=_operation(copy.record(int(order[first[0]])), now_ns) if len(first) else None,
            last=_operation(copy.record(int(order[-1])), now_ns) if len(order) else None,
            step=copy.step if copy.step >= 0 else None,
            label=copy.label,
            operations_per_s=max(0, begun - self._begun) / elapsed_s,
            bytes_per_s=float(seen["nbytes"][(left > since_ns) & (left <= now_ns)].sum()) / covered_s,
            steps_per_s=self._steps_per_s(seen, copy.step, now_ns, elapsed_s),
            communication=min(1.0, _covered_ns(seen, since_ns, now_ns) / 1e9 / covered_s),
            collectives=_collectives(copy, seen[~messages]),
            complete=copy.begun <= RECORDS,
        )
        self._before_ns, self._begun, self._step = now_ns, begun, copy.step
        return found

    def _steps_per_s(self, seen: _Records, step: int, now_ns: int, elapsed_s: float) -> float | None:
        if step < 0:
            return None
        steps = seen["step"].astype(np.int64)
        # Where the first operations of a step are. A script may go back, to the first step of another epoch.
        begins = np.flatnonzero((np.diff(steps) != 0) & (steps[1:] >= 0))[-_STEPS - 1 :] + 1
        if len(begins) < 2:
            return max(0, step - self._step) / elapsed_s if self._step >= 0 else None
        differences = np.diff(steps[begins])
        done = int(np.where(differences > 0, differences, 1).sum())
        times = seen["entered_ns"][begins].astype(np.int64)
        duration_ns = max(int(times[-1] - times[0]), 1)
        # What the script says next is late if it takes more than twice as long as usual. It may not say every step.
        late = now_ns - int(times[-1]) > 2 * duration_ns / len(differences)
        return done / ((now_ns - int(times[0]) if late else duration_ns) / 1e9)


def _operation(record: Record, now_ns: int) -> dict[str, Any]:
    names = ("kind", "in_group", "nbytes", "dtype", "op", "peer", "failed", "under_way")
    return {
        "name": record.name(),
        **{name: getattr(record, name) for name in names},
        "group": record.group.name,
        "site": beside(record.site, own_folder()),
        "awaits": world_rank(record.group, record.awaits) if record.under_way and record.awaits >= 0 else None,
        "for_s": max(0, (record.left_ns or now_ns) - record.entered_ns) / 1e9,  # under way, or taken
    }


def _covered_ns(seen: _Records, since_ns: int, now_ns: int) -> int:
    """Add up the time in which at least one operation was under way."""
    ends = np.minimum(np.where(seen["left_ns"] == 0, _ENDLESS, seen["left_ns"]), now_ns).astype(np.int64)
    begins = np.clip(seen["entered_ns"], since_ns, now_ns).astype(np.int64)
    kept = np.flatnonzero(ends > begins)
    by_time = kept[np.argsort(begins[kept], kind="stable")]
    begins, ends = begins[by_time], ends[by_time]
    # Each operation counts from where all earlier ones have ended.
    before = np.concatenate(([since_ns], np.maximum.accumulate(ends)))[: len(ends)]
    return int(np.maximum(0, ends - np.maximum(begins, before)).sum())


def _collectives(copy: RecorderCopy, seen: _Records) -> list[tuple[str, list[list[int]], int]]:
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for number in np.unique(seen["group"]):
        group = copy.group(int(number))
        key = group.name, group.ranks
        found[key] = max(found.get(key, 0), int(seen["in_group"][seen["group"] == number].max()))
    return [(name, spans(ranks), count) for (name, ranks), count in found.items()]
