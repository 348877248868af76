"""Find out when each rank of a job computed, communicated and waited, and for which rank the others waited most.

A rank waits in a collective until the last rank of its group has come to the same one; from then on it communicates.
One that leaves before that, as it may leave a broadcast, has waited for the root alone. A rank that receives a message
waits until the sender has begun to send. A timeline begins with the first step, if the script says its steps, or where
all recorders reach back to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from phalanx.diagnosis.render import duration
from phalanx.diagnosis.report import HangReport
from phalanx.diagnosis.snapshot import RankSnapshot, Record, Recording, world_rank
from phalanx.words import format_count

COMPUTES, COMMUNICATES, WAITS = "computes", "communicates", "waits"
_Key = tuple[str, str, int, int, int]  # what names an operation on all ranks that take part in it


@dataclass(frozen=True)
class Span:
    """An operation, in which a rank waited until ``ready_ns`` for the rank ``awaited``, if that is not -1."""

    key: _Key
    record: Record
    begin_ns: int
    ready_ns: int
    end_ns: int
    awaited: int


@dataclass(frozen=True)
class Wait:
    """An operation in which ranks waited for another one; the record is of the rank that waited longest."""

    awaited: int
    waiting: tuple[int, ...]
    record: Record
    wait_ns: int

    def text(self) -> str:
        """``rank 2 was waited for 3.1 s in all_reduce #7 at train.py:20``."""
        waited = f"rank {self.awaited} was waited for {duration(self.wait_ns)}"
        return f"{waited} in {self.record.name()}{self.record.where()}"


@dataclass(frozen=True)
class Lane:
    """Timeline of one rank."""

    seen: RankSnapshot
    spans: Sequence[Span]  # in the order in which they began
    # (begin, end, what it did), without gaps. Where operations overlap it communicates if one of them does.
    parts: Sequence[tuple[int, int, str]]
    # Since when it was in which step, or had which label. A step begins where the last operation before it has ended.
    marks: Sequence[tuple[int, str]]

    def share(self, kind: str) -> float:
        """The share of the time, from 0 to 1, in which it did this."""
        whole = sum(end - begin for begin, end, _ in self.parts)
        return sum(end - begin for begin, end, each in self.parts if each == kind) / max(1, whole)


@dataclass(frozen=True)
class Timeline:
    """The ranks of a job between two moments of the host's monotonic clock."""

    report: HangReport
    begin_ns: int
    end_ns: int
    lanes: Sequence[Lane]

    @cached_property
    def waits(self) -> list[Wait]:
        """All waits, the longest first."""
        together: dict[tuple[_Key, int], list[tuple[int, Lane, Span]]] = {}
        for lane in self.lanes:
            for span in lane.spans:
                if span.awaited >= 0 and span.ready_ns > span.begin_ns:
                    found = together.setdefault((span.key, span.awaited), [])
                    found.append((span.ready_ns - span.begin_ns, lane, span))
        waits = []
        for (_, awaited), found in together.items():
            wait_ns, _, span = max(found, key=lambda each: each[0])
            waiting = tuple(sorted(lane.seen.rank for _, lane, _ in found))
            waits.append(Wait(awaited, waiting, span.record, wait_ns))
        return sorted(waits, key=lambda wait: -wait.wait_ns)

    def awaited_ns(self, rank: int) -> int:
        """Add up how long others waited for a rank: of each operation the longest wait."""
        return sum(wait.wait_ns for wait in self.waits if wait.awaited == rank)

    @cached_property
    def verdict(self) -> str:
        """``rank 1 was waited for most: 517 ms in 5 operations``."""
        if not self.waits:
            return "no rank was waited for"
        most = max((lane.seen.rank for lane in self.lanes), key=self.awaited_ns)
        times = format_count(sum(wait.awaited == most for wait in self.waits), "operation")
        return f"rank {most} was waited for most: {duration(self.awaited_ns(most))} in {times}"

    def to_json(self) -> dict[str, Any]:
        """The shares and the waits as plain values."""
        ranks = [
            {"rank": lane.seen.rank, "host": lane.seen.host, "operations": len(lane.spans)}
            | {kind: round(lane.share(kind), 4) for kind in (COMPUTES, COMMUNICATES, WAITS)}
            | {"waited_for_s": self.awaited_ns(lane.seen.rank) / 1e9}
            for lane in self.lanes
        ]
        waits = [
            {"awaited": wait.awaited, "waiting": wait.waiting, "wait_s": wait.wait_ns / 1e9}
            | {"operation": wait.record.name(), "at_s": (wait.record.entered_ns - self.begin_ns) / 1e9}
            | {name: getattr(wait.record, name) for name in ("site", "step", "label")}
            for wait in self.waits
        ]
        whole_s = (self.end_ns - self.begin_ns) / 1e9
        return {"job": self.report.job, "when": self.report.when, "seconds": whole_s, "ranks": ranks, "waits": waits}


def make_timeline(report: HangReport) -> Timeline | None:
    """Find out what the ranks of a job did; None if they have no operation."""
    recordings = {seen.rank: seen.recording for seen in report.ranks if seen.recording and seen.recording.records}
    named = {rank: [*_named(rank, recording)][::-1] for rank, recording in recordings.items()}
    firsts = [found[0][1] for found in named.values() if found]
    if not firsts:
        return None
    cut = [first.entered_ns for first in firsts if first.in_group > 1]  # the operations before it are not kept
    steps = []
    for found in named.values():
        records = [record for _, record in found]
        number = next((number for number, record in enumerate(records) if record.step >= 0), -1)
        if number >= 0:  # a step begins when what a rank did before has ended
            steps.append(records[number - 1].left_ns if number else records[0].entered_ns)
    begin = max([*cut, min(steps or [first.entered_ns for first in firsts])])
    ends = [each.left_ns or report.now_ns for found in named.values() for _, each in found]
    end = max(begin + 1, *ends)
    come: dict[_Key, dict[int, int]] = {}
    for rank, found in named.items():
        for key, record in found:
            come.setdefault(key, {})[rank] = record.entered_ns
    lanes = []
    for seen in report.ranks:
        spans = []
        for key, record in named.get(seen.rank, ()):
            first, until = max(begin, record.entered_ns), record.left_ns or end
            if until > begin:
                ready, awaited = _last_to_come(seen.rank, record, until, come[key], recordings)
                spans.append(Span(key, record, first, min(max(ready, first), until), until, awaited))
        spans.sort(key=lambda span: span.begin_ns)
        lanes.append(Lane(seen, spans, _parts(spans, begin, end), _marks(spans, begin)))
    return Timeline(report, begin, end, lanes)


def _named(rank: int, recording: Recording) -> Iterator[tuple[_Key, Record]]:
    """The operations of a rank, the newest first, since the newest are there on all ranks.

    Messages between two ranks are counted from the last one. So are collectives of one number: the name of a group that
    has been destroyed may be used again.
    """
    counts: Counter[_Key] = Counter()
    for record in reversed(recording.records):
        if record.kind == "init" or record.found_late:
            continue
        peer = world_rank(record.group, record.peer) if record.peer >= 0 else -1
        key = record.group.name, record.kind, record.in_group, 0, 0
        if record.is_message:
            key = record.group.name, "message", *((rank, peer) if record.kind == "send" else (peer, rank)), 0
        yield (*key[:4], counts[key]), record
        counts[key] += 1


def _last_to_come(
    rank: int, record: Record, left_ns: int, come: Mapping[int, int], recordings: Mapping[int, Recording]
) -> tuple[int, int]:
    """Find until when a rank waited in an operation, and for which rank; its own beginning and -1 if for none."""
    root = world_rank(record.group, record.peer) if record.peer >= 0 else -1
    if record.is_message:
        last = root if record.kind == "recv" else -1
    else:
        missing = [member for member in record.group.ranks if member not in come]
        for member in missing if record.under_way or record.failed else ():
            theirs = recordings[member].records if member in recordings else ()
            if all(each.group.name != record.group.name or each.in_group < record.in_group for each in theirs):
                return left_ns, member  # it has never come
        last = max(come, key=lambda member: come[member]) if not missing else -1
        if last >= 0 and come[last] > left_ns:
            last = root if record.kind in ("broadcast", "scatter") else -1
    at = come.get(last, 0)
    return (at, last) if last != rank and at > record.entered_ns else (record.entered_ns, -1)


def _parts(spans: Sequence[Span], begin: int, end: int) -> list[tuple[int, int, str]]:
    changes = [
        (moment, kind, step)
        for span in spans
        for kind, first, until in ((WAITS, span.begin_ns, span.ready_ns), (COMMUNICATES, span.ready_ns, span.end_ns))
        for moment, step in ((first, 1), (until, -1))
    ]
    parts: list[tuple[int, int, str]] = []
    under_way: Counter[str] = Counter()
    since = begin
    for moment, changed, step in [*sorted(changes), (end, "", 0)]:
        if moment > since:
            kind = next((kind for kind in (COMMUNICATES, WAITS) if under_way[kind] > 0), COMPUTES)
            if parts and parts[-1][2] == kind:
                parts[-1] = parts[-1][0], moment, kind
            else:
                parts.append((since, moment, kind))
            since = moment
        under_way[changed] += step
    return parts


def _marks(spans: Sequence[Span], begin: int) -> list[tuple[int, str]]:
    marks: list[tuple[int, str]] = []
    before, since = (-1, ""), begin
    for span in spans:
        now = span.record.step, span.record.label
        if now != before:
            marks.append((since, now[1] or (f"step {now[0]}" if now[0] >= 0 else "")))
        before, since = now, max(since, span.end_ns)
    return marks


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as Chrome's trace format, which Perfetto and chrome://tracing show: a process for each rank."""
    events: list[dict[str, Any]] = []

    def add(rank: int, thread: int, name: str, begin: int, end: int, **about: Any) -> None:
        at = {"ts": (begin - timeline.begin_ns) / 1e3, "dur": (end - begin) / 1e3, "pid": rank, "tid": thread}
        events.append({"name": name, "ph": "X", **at, "args": about})

    for lane in timeline.lanes:
        rank, ends = lane.seen.rank, [timeline.begin_ns]
        for (since, text), (until, _) in zip(lane.marks, [*lane.marks[1:], (timeline.end_ns, "")], strict=False):
            add(rank, 0, text or "no step", since, until)
        for begin, end, kind in lane.parts:
            if kind == COMPUTES:
                add(rank, 1, kind, begin, end)
        for span in lane.spans:  # those that overlap lie in threads of their own
            free = next((number for number, until in enumerate(ends) if until <= span.begin_ns), len(ends))
            ends[free : free + 1] = [span.end_ns]
            about = {name: getattr(span.record, name) for name in ("site", "step", "label", "nbytes", "dtype", "op")}
            add(rank, 1 + free, span.record.name(), span.begin_ns, span.end_ns, **about)
            if span.ready_ns > span.begin_ns:
                add(rank, 1 + free, f"waits for rank {span.awaited}", span.begin_ns, span.ready_ns)
        for thread, name in enumerate(["steps", "operations", *["at the same time"] * (len(ends) - 1)]):
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}})
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
