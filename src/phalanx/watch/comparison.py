"""Whether the ranks of one host call the same operations on torch's own backends, which do not compare that themselves.

Gloo adds integers to floats, and a sum to a maximum, without a word; and if a rank leaves out one of two equal calls,
each adds up the wrong tensors. Only what a call has recorded can be compared, once all ranks have done it: its kind,
dtype, operation, root and bytes, and the line that made it. Lines are compared by the rule of
``native/csrc/line_pairs.h``, which a program does not break whose branches depend on the rank.
"""

from __future__ import annotations

import linecache
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from phalanx import settings
from phalanx.errors import CollectiveMismatch
from phalanx.system.folder import beside
from phalanx.watch.decisions import Place, Program, read_program
from phalanx.watch.disagreement import has_own_size
from phalanx.watch.records import KINDS, Group, RecorderCopy, world_rank
from phalanx.words import format_named

__all__ = ["Comparison"]

_ROW = struct.Struct("=4Q5I3i2I")  # a SeenRecord
_PAIRS, _CALM = 16, 8  # as in native/csrc/line_pairs.h
_MOST_JUDGED = 64
_NOT_COMPARED = {number for number, kind in KINDS.items() if kind in ("send", "recv", "init")}
_BARRIER = next(number for number, kind in KINDS.items() if kind == "barrier")


@dataclass(frozen=True)
class _Call:
    """A collective that a rank has done: where it is in the copy, in what ranks must agree, and its line."""

    index: int
    facts: tuple[int, int, int]
    site: int


@dataclass
class _Calls:
    """One rank's collectives of a group.

    Attributes:
        done: those that went well, by their numbers.
        until: the last one up to which all are done.
        failed: one has failed.
    """

    done: dict[int, _Call] = field(default_factory=dict)
    until: int = 1 << 62
    failed: bool = False


@dataclass(frozen=True)
class _Line:
    """A line of the program and what it calls, but for the size."""

    identity: int
    what: int
    root: int


@dataclass(frozen=True)
class _Pair:
    """A call in which two ranks were at different lines; the place is the first one's."""

    mine: _Line
    theirs: _Line
    place: str
    number: int


@dataclass
class _Lines:
    """The lines at which two ranks have met."""

    pairs: deque[_Pair] = field(default_factory=lambda: deque(maxlen=_PAIRS))
    calm: int = 0

    def meet(self, pair: _Pair) -> list[tuple[str, int, int]]:
        """Two lines that are crossed now: each with its place and its number on either rank; empty if none are."""
        if pair.mine == pair.theirs:
            self.calm += 1
            if self.calm >= _CALM:
                self.pairs.clear()
            return []
        self.calm = 0
        if any((known.mine, known.theirs) == (pair.mine, pair.theirs) for known in self.pairs):
            return []
        self.pairs.append(pair)
        first = self._crossed(pair.mine) or self._crossed(pair.theirs)
        if first is None:
            return []
        for known in self.pairs:
            second = self._crossed(known.mine)
            if second is not None and second[0] != first[0]:
                return [first, second]
        return []

    def _crossed(self, line: _Line) -> tuple[str, int, int] | None:
        mine = next((pair for pair in self.pairs if pair.mine == line), None)
        theirs = next((pair for pair in self.pairs if pair.theirs == line), None)
        return (mine.place, mine.number, theirs.number) if mine is not None and theirs is not None else None


@dataclass
class _Compared:
    """How far a group has been compared.

    Attributes:
        until: up to which call.
        differed: calls have differed, or one has failed, after which nothing else is said.
        judgements_left: how many crossed lines are judged yet; 0 once a warning has been given, or if none is wanted.
        lines: of each rank but the first, with the first.
    """

    until: int = 0
    differed: bool = False
    judgements_left: int = _MOST_JUDGED
    lines: dict[int, _Lines] = field(default_factory=dict)


class Comparison:
    """Compares what the ranks of one job have called, in one look after the other.

    Args:
        unchanged_since: a time of day. Files that have changed since may not be what the ranks run.
        newest: how many of the last operations of each rank are looked at.
        lines: whether the lines are compared, too.
    """

    def __init__(self, unchanged_since: float, newest: int, *, lines: bool) -> None:
        self._unchanged_since, self._newest, self._lines = unchanged_since, newest, lines
        self._groups: dict[tuple[str, tuple[int, ...]], _Compared] = {}

    def look(self, copies: Mapping[int, RecorderCopy]) -> list[str]:
        """Warnings about what has been called since the last look.

        Args:
            copies: of the ranks' recorders, by rank in the world.
        """
        found: dict[tuple[str, tuple[int, ...]], dict[int, _Calls]] = {}
        names: dict[tuple[str, tuple[int, ...]], Group] = {}
        for rank, copy in copies.items():
            for number, calls in self._calls(copy).items():
                group = copy.group(number)
                if rank in group.ranks:
                    key = group.name, group.ranks
                    names[key] = group
                    found.setdefault(key, {})[rank] = calls
        return [
            text
            for key, calls in found.items()
            if len(calls) == len(key[1]) > 1
            for text in self._compare(names[key], calls, copies)
        ]

    def _calls(self, copy: RecorderCopy) -> dict[int, _Calls]:
        """The collectives in a recorder, by the number of their group there."""
        after = copy.begun - self._newest
        found: dict[int, _Calls] = {}
        skipped: set[int] = set()
        compared: dict[int, int] = {}
        any_size: dict[int, frozenset[int]] = {}  # by group: the kinds of which ranks may record other bytes
        for index, row in enumerate(_ROW.iter_unpack(memoryview(copy.seen).cast("B"))):
            number, _, left_ns, nbytes, in_group, what, group, site, _, peer, _, _, failed, _ = row
            kind = what & 0xFF
            if number < after or kind in _NOT_COMPARED or group in skipped:
                continue
            calls = found.get(group)
            if calls is None:
                about = copy.group(group)
                known = self._groups.get((about.name, about.ranks), _Compared())
                if about.backend == settings.BACKEND or known.differed:
                    skipped.add(group)  # Phalanx compares its calls by itself
                    continue
                calls, compared[group] = found.setdefault(group, _Calls()), known.until
                any_size[group] = _kinds_of_any_size(about.backend)
            if in_group <= compared[group] and left_ns:
                continue
            if left_ns and not failed:
                size = 0 if kind in any_size[group] else nbytes
                calls.done[in_group] = _Call(index, (what, size, -1 if kind == _BARRIER else peer), site)
            else:
                # One of C++ that stalls has the next one's number, and may be taken back (c10d/stalled_calls.py).
                calls.until = min(calls.until, in_group - 1)
                calls.failed |= bool(failed)
        return found

    def _compare(self, group: Group, calls: Mapping[int, _Calls], copies: Mapping[int, RecorderCopy]) -> Iterator[str]:
        state = self._groups.setdefault(
            (group.name, group.ranks), _Compared(judgements_left=_MOST_JUDGED if self._lines else 0)
        )
        # After a failure ranks may count on from different calls, if the script makes the group anew.
        state.differed |= any(of.failed for of in calls.values())
        if state.differed or not all(of.done for of in calls.values()):
            return
        begin = max(state.until + 1, *(min(of.done) for of in calls.values()))
        if begin > state.until + 1:
            state.lines.clear()  # among the calls that were written over, the ranks may have met at equal lines
        state.until = max(state.until, min(min(of.until, max(of.done)) for of in calls.values()))
        for number in range(begin, state.until + 1):
            same = {rank: of.done[number] for rank, of in calls.items() if number in of.done}
            if len(same) < len(calls):
                continue
            if len({call.facts for call in same.values()}) > 1:
                state.differed = True
                yield _differing(same, copies)
                return
            if state.judgements_left:
                yield from self._meet(state, group, number, same, copies)

    def _meet(
        self,
        state: _Compared,
        group: Group,
        number: int,
        same: Mapping[int, _Call],
        copies: Mapping[int, RecorderCopy],
    ) -> Iterator[str]:
        first, *others = (world_rank(group, rank) for rank in range(len(group.ranks)))
        place, mine = _line(copies[first], same[first])
        for other in others:
            _, theirs = _line(copies[other], same[other])
            if not mine.identity or not theirs.identity:
                continue
            lines = state.lines.setdefault(other, _Lines())
            crossed = lines.meet(_Pair(mine, theirs, place, number))
            if crossed and state.judgements_left:
                state.judgements_left -= 1
                if not self._are_alternatives(crossed[0][0], crossed[1][0]):
                    state.judgements_left = 0
                    yield _crossing(first, other, crossed)
                    return

    def _are_alternatives(self, one: str, other: str) -> bool:
        """Whether the places may be two arms of one branch, of which a pass runs only one; also if it is not known."""
        (file, first), (other_file, second) = (_parts(place) for place in (one, other))
        if file != other_file:
            return False
        program = read_program(file, self._unchanged_since)
        places = [program.place_at(line) if program is not None else None for line in (first, second)]
        if program is None or places[0] is None or places[1] is None:
            return True
        return _exclude(program, places[0], places[1]) or _exclude(program, places[1], places[0])


@lru_cache
def _kinds_of_any_size(backend: str) -> frozenset[int]:
    return frozenset(number for number, kind in KINDS.items() if has_own_size(kind, backend))


def _exclude(program: Program, one: Place, other: Place) -> bool:
    """Whether one place stands in an arm that leaves out the other: by another arm, or by ``return`` before it."""
    if one.function != other.function:
        return False
    arms = {arm.decision: arm.number for arm in one.arms}
    if any(arms.get(arm.decision, arm.number) != arm.number for arm in other.arms):
        return True
    by_jumps = program.decisions(other, after_return=True) - {arm.decision for arm in other.arms}
    return not by_jumps.isdisjoint(arms)


def _line(copy: RecorderCopy, call: _Call) -> tuple[str, _Line]:
    place, identity = copy.place(call.site)
    what, _, root = call.facts
    return place, _Line(identity, what, root)


def _parts(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line) if line.isdecimal() else 0


def _differing(calls: Mapping[int, _Call], copies: Mapping[int, RecorderCopy]) -> str:
    alike: dict[tuple[int, int, int], list[int]] = {}
    for rank, call in sorted(calls.items()):
        alike.setdefault(call.facts, []).append(rank)
    records = {ranks[0]: copies[ranks[0]].record(calls[ranks[0]].index) for ranks in alike.values()}
    backend = next(iter(records.values())).group.backend
    lines = []
    for ranks in alike.values():
        record = records[ranks[0]]
        lines.append(f"  {format_named('rank', ranks)}: {replace(record, site=beside(record.site)).text()}")
    return CollectiveMismatch.let_pass(backend, "\n".join(lines))


def _crossing(low: int, high: int, crossed: list[tuple[str, int, int]]) -> str:
    lines = []
    for place, mine, theirs in crossed:
        text = linecache.getline(*_parts(place)).strip()
        lines.append(f"  {text} at {beside(place)} was call #{mine} of rank {low} and #{theirs} of rank {high}")
    told = CollectiveMismatch.in_different_orders(low, high, "\n".join(sorted(lines)))
    return f"{told} If it is meant, {settings.CALL_SITES}=ignore says nothing"
