"""Measure how a rank is getting on: what its flight recorder holds, compared with the look before.

A rank may run hundreds of thousands of operations a second. So a look copies the recorder once, counts in numpy, and
puts only two operations into words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.diagnosis.reading import RecorderCopy, copy_recorder
from phalanx.diagnosis.snapshot import KINDS, Record
from phalanx.native.core import RECORDS, SeenRecord

_SEND, _RECV = (number for number, kind in KINDS.items() if kind in ("send", "recv"))
_SEEN = np.dtype(SeenRecord)
_STEPS = 20  # a rate of steps is the mean over so many of the last ones
_ENDLESS = np.iinfo(np.uint64).max

_Array = npt.NDArray[np.uint64]
GroupKey = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Pace:
    """Rates of one rank, by its recorder.

    Rates and shares are those since the look before, or of the last 4,096 operations if there were more since then. At
    the first look they are those of all that the recorder holds.

    Attributes:
        pid: the process that has recorded.
        begun: how many operations have begun since its first.
        operation: the one that it is in; None if it is in none.
        last: the last one to begin.
        operations_per_s, bytes_per_s: the operations that began, and the bytes of those that ended.
        steps_per_s: the mean over the last 20 steps, or those since the look before; None if the script says none.
        communication: the share of the time in which it was in an operation, from 0 to 1.
        collectives: how many collectives of each group (its name and its ranks) it has begun, as far as is known.
        complete: whether the recorder goes back to the first operation, so that ``collectives`` has every group.
    """

    pid: int
    begun: int
    operation: Record | None
    last: Record | None
    step: int
    label: str
    operations_per_s: float
    bytes_per_s: float
    steps_per_s: float | None
    communication: float
    collectives: dict[GroupKey, int] = field(repr=False)
    complete: bool


class PaceOfRank:
    """Looks at the recorder that begins at ``at`` in a file, again and again."""

    def __init__(self, file: int, at: int) -> None:
        self._place = file, at
        self._before_ns = 0  # the time of the last look, on the host's monotonic clock
        self._begun = 0
        self._step = -1

    def look(self, now_ns: int) -> Pace | None:
        """Compare with the last look; None if there is no recorder so far.

        Args:
            now_ns: the time on the host's monotonic clock.
        """
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
        found = self._compare(copy, seen, order, begun, max(now_ns, self._before_ns + 1))
        self._before_ns, self._begun, self._step = now_ns, begun, copy.step
        return found

    def _compare(
        self, copy: RecorderCopy, seen: npt.NDArray[np.void], order: npt.NDArray[np.intp], begun: int, now_ns: int
    ) -> Pace:
        elapsed_s = (now_ns - self._before_ns) / 1e9
        entered, left, since_ns = seen["entered_ns"], seen["left_ns"], self._before_ns
        if copy.begun - self._begun > len(seen) and len(seen):
            since_ns = max(since_ns, int(entered[0]))  # what was before that has been written over
        covered_s = max(now_ns - since_ns, 1) / 1e9
        under_way = np.flatnonzero(left == 0)
        kinds = seen["what"] & 0xFF
        messages = (kinds == _SEND) | (kinds == _RECV)
        collectives = under_way[~messages[under_way]]
        first = collectives if len(collectives) else under_way
        return Pace(
            pid=copy.pid,
            begun=copy.begun,
            operation=copy.record(int(order[first[0]])) if len(first) else None,
            last=copy.record(int(order[-1])) if len(order) else None,
            step=copy.step,
            label=copy.label,
            operations_per_s=max(0, begun - self._begun) / elapsed_s,
            bytes_per_s=float(seen["nbytes"][(left > since_ns) & (left <= now_ns)].sum()) / covered_s,
            steps_per_s=self._steps_per_s(seen, copy.step, now_ns, elapsed_s),
            communication=min(1.0, _covered_ns(entered, left, since_ns, now_ns) / 1e9 / covered_s),
            collectives=_collectives(copy, seen[~messages]),
            complete=copy.begun <= RECORDS,
        )

    def _steps_per_s(self, seen: npt.NDArray[np.void], step: int, now_ns: int, elapsed_s: float) -> float | None:
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


def _covered_ns(entered: _Array, left: _Array, since_ns: int, now_ns: int) -> int:
    """Add up the time in which at least one operation was under way."""
    ends = np.minimum(np.where(left == 0, _ENDLESS, left), now_ns).astype(np.int64)
    begins = np.clip(entered, since_ns, now_ns).astype(np.int64)
    kept = np.flatnonzero(ends > begins)
    by_time = kept[np.argsort(begins[kept], kind="stable")]
    begins, ends = begins[by_time], ends[by_time]
    if not len(begins):
        return 0
    # Each operation counts from where all earlier ones have ended.
    before = np.concatenate(([since_ns], np.maximum.accumulate(ends)[:-1]))
    return int(np.maximum(0, ends - np.maximum(begins, before)).sum())


def _collectives(copy: RecorderCopy, seen: npt.NDArray[np.void]) -> dict[GroupKey, int]:
    found: dict[GroupKey, int] = {}
    for number in np.unique(seen["group"]):
        group = copy.group(int(number))
        key = group.name, group.ranks
        found[key] = max(found.get(key, 0), int(seen["in_group"][seen["group"] == number].max()))
    return found
