"""Whether the ranks of a job call the same operations on torch's own backends, which do not compare that themselves.

Gloo adds integers to floats, and a sum to a maximum, without a word; and if a rank leaves out one of two equal calls,
each adds up the wrong tensors. Only what a call has recorded can be compared, once all ranks have done it: its kind,
dtype, operation, root, bytes and shape, and the line that made it. Lines are compared by the rule of
``native/csrc/line_pairs.h``, which a program does not break whose branches depend on the rank.

The calls of different hosts come at different times (``done_calls.py``). What has come is kept until all ranks of the
group have done the same collective, and of each rank the newest ones only.
"""

from __future__ import annotations

import ctypes
import linecache
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx import settings
from phalanx.errors import CollectiveMismatch
from phalanx.native.core import Crossing, Status, library
from phalanx.system.folder import beside, own_folder
from phalanx.watch.decisions import Place, Program, read_program
from phalanx.watch.disagreement import ranks_alike
from phalanx.watch.done_calls import DoneCall, DoneCalls
from phalanx.watch.records import Group, world_rank
from phalanx.words import first_kinds, format_named

__all__ = ["Comparison"]

_MOST_LINES = 1 << 15  # of two ranks, since they last were in step; a program has fewer
_MOST_JUDGED = 64
_MOST_GROUPS = 1024  # that are compared at a time: a program may make ever new ones
_MOST_KNOWN = 1 << 14


@dataclass(frozen=True)
class _Line:
    """A line of the program and what it calls, but for the size."""

    identity: int
    kind: str
    dtype: str
    op: str
    root: int


class _Lines:
    """The lines at which two ranks have met, in the core."""

    def __init__(self) -> None:
        self._core = library()
        self._pairs: int | None = self._core.phx_pairs_open()
        self._numbers: dict[_Line, int] = {}
        self._places: dict[str, int] = {}

    def __del__(self) -> None:
        if self._pairs:
            self._core.phx_pairs_close(self._pairs)

    @property
    def settled(self) -> bool:
        """Whether it makes no difference that they have met."""
        return not self._pairs or bool(self._core.phx_pairs_settled(self._pairs))

    def meet(self, mine: _Line, theirs: _Line, place: str, number: int) -> list[tuple[str, int, int]]:
        """Note a call in which the ranks were at these lines.

        Args:
            mine, theirs: the lines of the first rank and of the other.
            place: the place of the first one's.
            number: the call's number in the group.

        Returns:
            Two lines that are crossed now: each with its place and its number on either rank; empty if none are.
        """
        if not self._pairs or len(self._numbers) > _MOST_LINES:
            return []
        found = Crossing()
        place_of = self._places.setdefault(place, len(self._places))
        lines = (self._number(line) for line in (mine, theirs))
        met = self._core.phx_pairs_meet_at(self._pairs, *lines, place_of, number, ctypes.byref(found))
        if met != Status.CROSSED:
            return []
        places = [*self._places]
        return [(places[found.lines[at]], found.mine[at], found.theirs[at]) for at in (0, 1)]

    def _number(self, line: _Line) -> int:
        # The core compares 16 bits, which here no two lines share.
        return self._numbers.setdefault(line, len(self._numbers) + 1)


@dataclass
class _Compared:
    """How far a group has been compared.

    Attributes:
        until: the last call that was compared.
        differed: calls have differed, or one has failed, after which nothing else is said.
        judgements_left: how many crossed lines are judged yet; 0 once one has been told, or if none is wanted.
        lines: of each rank but the first, with the first.
        done: of each rank that has been heard of the calls that are not compared yet, by their numbers.
        come: up to which call each of these ranks has come.
    """

    until: int = 0
    differed: bool = False
    judgements_left: int = _MOST_JUDGED
    lines: dict[int, _Lines] = field(default_factory=dict)
    done: dict[int, dict[int, DoneCall]] = field(default_factory=dict)
    come: dict[int, int] = field(default_factory=dict)

    def end(self) -> None:
        """Compare nothing of this group any more."""
        self.differed = True
        self.done.clear()
        self.lines.clear()


class Comparison:
    """Compares what the ranks of one job have called, as it becomes known.

    Args:
        unchanged_since: a time of day. Files that have changed since may not be what the ranks run.
        newest: how many calls of each rank are kept for ranks that are behind.
        lines: whether the lines are compared, too.
    """

    def __init__(self, unchanged_since: float, newest: int, *, lines: bool) -> None:
        self._unchanged_since, self._newest, self._lines = unchanged_since, newest, lines
        self._groups: dict[Group, _Compared] = {}
        self._known: dict[DoneCall, DoneCall] = {}

    def look(self, calls: Iterable[DoneCalls]) -> list[str]:
        """What went wrong, in words: a text for each mistake that shows now.

        Args:
            calls: what has become known since the last look.
        """
        touched: dict[Group, _Compared] = {}
        for each in calls:
            touched[each.group] = self._note(each)
        return [text for group, state in touched.items() for text in self._compare(group, state)]

    def _note(self, calls: DoneCalls) -> _Compared:
        state = self._groups.pop(calls.group, None)
        if state is None:
            state = _Compared(judgements_left=_MOST_JUDGED if self._lines else 0)
        self._groups[calls.group] = state  # behind all others, the first of which is the one to be forgotten
        if len(self._groups) > _MOST_GROUPS:
            del self._groups[next(iter(self._groups))]
        if calls.failed:
            # After a failure ranks may count on from different calls, if the script makes the group anew.
            state.end()
        if state.differed:
            return state
        own = self._own(calls.calls)
        numbered = enumerate(own, calls.first)
        new = {number: call for number, call in numbered if call is not None and number > state.until}
        for rank in calls.ranks:
            done = state.done.setdefault(rank, {})
            done.update(new)
            if len(done) > self._newest:
                state.done[rank] = {number: done[number] for number in sorted(done)[-self._newest :]}
            state.come[rank] = max(state.come.get(rank, 0), calls.first + len(own) - 1)
        return state

    def _own(self, calls: Sequence[DoneCall | None]) -> list[DoneCall | None]:
        """The same calls, of which equal ones are one object."""
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        different = {id(call): call for call in calls if call is not None}
        found = {name: self._known.setdefault(call, call) for name, call in different.items()}
        return [found.get(id(call)) for call in calls]

    def _compare(self, group: Group, state: _Compared) -> Iterator[str]:
        if state.differed or len(state.come) < len(group.ranks):
            return
        until = min(state.come.values())
        first, *others = (state.done[rank] for rank in group.ranks)
        for number in sorted(number for number in first if number <= until):
            same = {rank: state.done[rank].get(number) for rank in group.ranks}
            if not all(same.values()):
                continue
            if number > state.until + 1:
                state.lines.clear()  # among the calls of which nothing is known, the ranks may have met at equal lines
            state.until = number
            if not state.lines and all(of[number] is first[number] for of in others):
                continue
            known = {rank: call for rank, call in same.items() if call is not None}
            alike = ranks_alike(group.backend, known)
            if len(alike) > 1:
                state.end()
                yield _differing(group, number, known, alike)
                return
            if state.judgements_left:
                yield from self._meet(state, group, number, known)
        for rank, done in state.done.items():
            state.done[rank] = {number: call for number, call in done.items() if number > until}

    def _meet(self, state: _Compared, group: Group, number: int, same: Mapping[int, DoneCall]) -> Iterator[str]:
        first, *others = (world_rank(group, rank) for rank in range(len(group.ranks)))
        mine = _line(same[first])
        for other in others:
            theirs = _line(same[other])
            if not mine.identity or not theirs.identity:
                continue
            if mine == theirs and other not in state.lines:
                continue
            lines = state.lines.get(other) or state.lines.setdefault(other, _Lines())
            crossed = lines.meet(mine, theirs, same[first].site, number)
            if lines.settled:
                del state.lines[other]
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


def _exclude(program: Program, one: Place, other: Place) -> bool:
    """Whether one place stands in an arm that leaves out the other: by another arm, or by ``return`` before it."""
    if one.function != other.function:
        return False
    arms = {arm.decision: arm.number for arm in one.arms}
    if any(arms.get(arm.decision, arm.number) != arm.number for arm in other.arms):
        return True
    by_jumps = program.decisions(other, after_return=True) - {arm.decision for arm in other.arms}
    return not by_jumps.isdisjoint(arms)


def _line(call: DoneCall) -> _Line:
    return _Line(call.identity, call.kind, call.dtype, call.op, -1 if call.kind == "barrier" else call.peer)


def _parts(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line) if line.isdecimal() else 0


def _differing(group: Group, number: int, calls: Mapping[int, DoneCall], alike: Sequence[list[int]]) -> str:
    lines = []
    for ranks in sorted(alike, key=min):
        record = calls[ranks[0]].record(group, number)
        named = replace(record, site=beside(record.site, own_folder()))
        lines.append(f"  {format_named('rank', sorted(ranks))}: {named.text(with_shape=True)}")
    return CollectiveMismatch.let_pass(group.backend, "\n".join(first_kinds(lines)))


def _crossing(low: int, high: int, crossed: list[tuple[str, int, int]]) -> str:
    lines = []
    for place, mine, theirs in crossed:
        text = linecache.getline(*_parts(place)).strip()
        line = beside(place, own_folder())
        at = f"{text} at {line}" if text else line
        lines.append(f"  {at} was call #{mine} of rank {low} and #{theirs} of rank {high}")
    told = CollectiveMismatch.in_different_orders(low, high, "\n".join(sorted(lines)))
    return f"{told} If it is meant, {settings.CALL_SITES}=ignore says nothing"
