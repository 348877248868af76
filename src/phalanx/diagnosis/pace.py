"""Measure how a rank is getting on: what its flight recorder holds, compared with the look before.

A rank may run hundreds of thousands of operations a second. So a look copies the recorder once, counts in numpy, and
puts only two operations into words.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.diagnosis.reading import RecorderCopy, copy_recorder
from phalanx.diagnosis.snapshot import KINDS, Record, spans, world_rank
from phalanx.native.core import RECORDS, SeenRecord
from phalanx.system.files import beside, own_folder

_SEND, _RECV = (number for number, kind in KINDS.items() if kind in ("send", "recv"))
_SEEN = np.dtype(SeenRecord)
_STEPS = 20  # a rate of steps is the mean over so many of the last ones
_ENDLESS = np.iinfo(np.uint64).max

_Records = npt.NDArray[np.void]


class OperationLook(msgspec.Struct):
    """An operation, as ``phalanx top --json`` prints it; ``for_s`` is how long it has been under way, or took."""

    name: str
    kind: str
    in_group: int
    nbytes: int
    dtype: str
    op: str
    peer: int
    failed: bool
    group: str
    site: str
    under_way: bool
    awaits: int | None  # the rank in the world
    for_s: float


class Pace(msgspec.Struct):
    """Rates of one rank, by its recorder.

    Rates and shares are those since the look before, or of the last 4,096 operations if there were more since then. At
    the first look they are those of all that the recorder holds.

    Attributes:
        begun: how many operations have begun since its first.
        operation: the one that it is in; None if it is in none.
        last: the last one to begin.
        step: None if the script says none.
        operations_per_s, bytes_per_s: the operations that began, and the bytes of those that ended.
        steps_per_s: the mean over the last 20 steps, or those since the look before; None if the script says none.
        communication: the share of the time in which it was in an operation, from 0 to 1.
        collectives: of each group its name, its ranks (:func:`spans`), and how many collectives this one has begun.
        complete: whether the recorder goes back to the first operation, so that ``collectives`` has every group.
    """

    begun: int = msgspec.field(name="operations")
    operation: OperationLook | None
    last: OperationLook | None
    step: int | None
    label: str
    operations_per_s: float
    bytes_per_s: float
    steps_per_s: float | None
    communication: float
    collectives: list[tuple[str, list[list[int]], int]]
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


def _operation(record: Record, now_ns: int) -> OperationLook:
    return OperationLook(
        name=record.name(),
        kind=record.kind,
        in_group=record.in_group,
        nbytes=record.nbytes,
        dtype=record.dtype,
        op=record.op,
        peer=record.peer,
        failed=record.failed,
        group=record.group.name,
        site=beside(record.site, own_folder()),
        under_way=record.under_way,
        awaits=world_rank(record.group, record.awaits) if record.under_way and record.awaits >= 0 else None,
        for_s=max(0, (record.left_ns or now_ns) - record.entered_ns) / 1e9,
    )


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
