"""Where the ways of ranks part: the branch or loop that has taken one elsewhere than those that wait for it.

Two ranks' stacks are equal down to a function in which they stand at different lines. Of these two lines one was left
out by the rank that is at the other: the earlier one, unless a loop around both has taken the ranks to different
passes. What can have had a rank leave it out (``decisions.py``) is what to look at. It is named only if there is one
such statement, or if of several one alone decides by the rank; otherwise nothing is said. A rank that is merely slow
stands earlier, perhaps in a branch that the others have been in too, so a branch around it counts only if it decides by
the rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.system.folder import beside
from phalanx.watch.decisions import Decision, Place, Program, read_program
from phalanx.watch.records import Record
from phalanx.watch.stack_text import Frame
from phalanx.watch.verdict import Seen, Verdict

__all__ = ["parting"]

_MANY = 2  # loops; how many does not matter
_MOST_WAYS = 8  # of each side; with more there is no one statement that parts them
_IN_STEP = 8  # calls in a row at the same lines, after which ranks are evidently in step


@dataclass(frozen=True)
class _Step:
    """A line on a rank's way through the program, and whether a library called the function that it is in."""

    file: str
    line: int
    through_library: bool


@dataclass(frozen=True)
class _Way:
    """How a rank has come to where it is, the outermost line first; empty for one that has ended."""

    steps: tuple[_Step, ...]
    pass_number: int  # the script's own step; -1 if it says none
    is_in_operation: bool


def parting(verdict: Verdict, ranks: Sequence[Seen], folder: str, unchanged_since: float) -> str:
    """The statement at which the ways of the ranks part, as "the `if` in line 55"; empty if it cannot be told.

    Args:
        verdict: who waits for whom.
        ranks: all ranks, with the frames of those that were asked.
        folder: which the sites of operations are relative to.
        unchanged_since: a time of day. Files that have changed since may not be what the ranks run.
    """
    seen = {rank.rank: rank for rank in ranks}
    awaited = [seen[rank] for rank in verdict.awaited if rank in seen]
    if any(rank.state in ("T", "t") for rank in awaited):
        return ""  # something else has stopped it
    waiting = [seen[rank] for rank in verdict.waiting if rank in seen and rank not in verdict.awaited]
    if awaited and set(verdict.awaited) <= set(verdict.waiting):  # they wait for each other
        first = _site(awaited[0])
        waiting = [rank for rank in awaited if _site(rank) != first]
        awaited = [rank for rank in awaited if _site(rank) == first]
    if any(rank.operation is not None and rank.operation.is_message for rank in (*awaited, *waiting)):
        return ""  # the two ends of a message are different calls
    found = _Search(folder, unchanged_since).common(awaited, waiting)
    if found is None:
        return ""
    file, decision = found
    elsewhere = {step.file for rank in waiting for step in _steps_of_site(rank.operation, folder)} != {file}
    return f"the `{decision.word}` in line {decision.line}{f' of {beside(file, folder)}' if elsewhere else ''}"


class _Search:
    """Compares ways, and remembers the files that were read."""

    def __init__(self, folder: str, unchanged_since: float) -> None:
        self._folder = folder
        self._unchanged_since = unchanged_since
        self._programs: dict[str, Program | None] = {}

    def common(self, awaited: Sequence[Seen], waiting: Sequence[Seen]) -> tuple[str, Decision] | None:
        """The one statement, with its file, that parts each of these ranks from each of those."""
        awaited, waiting = _representatives(awaited), _representatives(waiting)
        if max(len(awaited), len(waiting)) > _MOST_WAYS:
            return None
        if any(not _in_step(one, other) for one in awaited for other in waiting):
            return None
        first, second = {self._way(rank) for rank in awaited}, {self._way(rank) for rank in waiting}
        results = {self._parted(one, other) if one and other else None for one in first for other in second}
        return results.pop() if len(results) == 1 else None

    def _way(self, rank: Seen) -> _Way | None:
        """How a rank has come to where it is; None if that is not known."""
        record = rank.operation
        pass_number = rank.recording.step if rank.recording is not None else -1
        if rank.ended:
            # One that fails ends the job, and is no riddle.
            return _Way((), pass_number, False) if rank.ended_well else None
        steps = _steps(rank.frames)
        if record is not None:
            (site,) = _steps_of_site(record, self._folder) or (None,)
            if site is None:
                return None
            at = next((i for i, step in enumerate(steps) if (step.file, step.line) == (site.file, site.line)), None)
            if at is not None and not any((s.file, s.line) == (site.file, site.line) for s in steps[at + 1 :]):
                steps = steps[: at + 1]
            else:
                # Without its stack: what the file itself runs, outside of any function, is run once.
                place = self._place(site)
                steps = (site,) if place is not None and place.function == 0 else ()
        return _Way(steps, pass_number, record is not None) if steps else None

    def _parted(self, awaited: _Way, waiting: _Way) -> tuple[str, Decision] | None:
        ours, theirs = awaited.steps, waiting.steps
        if not ours:
            return self._chosen([self._decisions(theirs, after_exit=True)])
        at = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
        if at is None or ours[at].file != theirs[at].file or ours[at].through_library != theirs[at].through_library:
            return None
        program = self._program(ours[at].file)
        here, there = self._place(ours[at]), self._place(theirs[at])
        if program is None or here is None or there is None or here == there or here.function != there.function:
            return None
        around = self._loops(ours[: at + 1])
        if around is None:
            return None
        shared = here.shared_with(there)
        loops = around + sum(arm.is_loop for arm in here.arms[:shared])
        is_step_known = min(awaited.pass_number, waiting.pass_number) >= 0
        ahead = awaited.pass_number - waiting.pass_number if is_step_known and loops == 1 else None
        if shared < min(len(here.arms), len(there.arms)):
            one, other = here.arms[shared], there.arms[shared]
            if one.decision == other.decision:
                sure = not loops or awaited.is_in_operation or ahead == 0
                return (ours[at].file, one.decision) if sure or one.decision.is_of_rank else None

        def left_out(awaiteds: bool, in_another_pass: bool) -> set[tuple[str, Decision]] | None:
            """What can have had a rank leave out the awaited one's place, or the awaited one the others'."""
            place, other, rest = (here, there, ours[at + 1 :]) if awaiteds else (there, here, theirs[at + 1 :])
            own = program.decisions(
                place,
                other=other,
                in_another_pass=in_another_pass,
                after_return=in_another_pass and around > 0,
                after_error=not awaiteds,
            )
            deeper = self._decisions(rest, after_error=not awaiteds)
            return None if deeper is None else deeper | {(ours[at].file, decision) for decision in own}

        awaited_is_first = here.first < there.first
        can_be_slow = not awaited.is_in_operation
        if not loops or ahead is not None:
            # All may have been where a slow one still is, also in a branch: it counts only if it is the rank's.
            is_behind = awaited_is_first if not ahead else ahead < 0
            found = left_out(is_behind, bool(ahead))
            return self._chosen([found], only_of_rank=is_behind and can_be_slow)
        # Here a slow one in an earlier pass cannot be told from one that has left out a call in this one either.
        both = [left_out(awaited_is_first, False), left_out(not awaited_is_first, True)]
        return self._chosen(both, only_of_rank=can_be_slow)

    def _decisions(
        self, steps: Iterable[_Step], *, after_exit: bool = False, after_error: bool = False
    ) -> set[tuple[str, Decision]] | None:
        """What decides whether these calls are made, given that the first one's function is called."""
        found = set()
        for step in steps:
            program, place = self._program(step.file), self._place(step)
            if program is None or place is None:
                return None
            decided = program.decisions(place, after_return=True, after_exit=after_exit, after_error=after_error)
            found |= {(step.file, decision) for decision in decided}
        return found

    def _chosen(
        self, parts: Sequence[set[tuple[str, Decision]] | None], *, only_of_rank: bool = False
    ) -> tuple[str, Decision] | None:
        """The one that counts; None if there is none, if several are alike, or if a part is not known."""
        found: set[tuple[str, Decision]] = set()
        for part in parts:
            if part is None:
                return None
            found |= part
        of_rank = [pair for pair in found if pair[1].is_of_rank]
        if len(of_rank) == 1:
            return of_rank[0]
        return found.pop() if len(found) == 1 and not only_of_rank else None

    def _loops(self, steps: Sequence[_Step]) -> int | None:
        """In how many loops the last of these functions is called, as far as that matters; None if it is not known."""
        loops = 0
        for step in steps[:-1]:
            place = self._place(step)
            if place is None:
                return None
            loops += place.loops
        return loops + _MANY * sum(step.through_library for step in steps)

    def _place(self, step: _Step) -> Place | None:
        program = self._program(step.file)
        return program.place_at(step.line) if program is not None else None

    def _program(self, file: str) -> Program | None:
        if file not in self._programs:
            self._programs[file] = read_program(file, self._unchanged_since)
        return self._programs[file]


def _representatives(ranks: Sequence[Seen]) -> list[Seen]:
    """One rank for each way: a stack, a line, and a step. Without a stack it counts only if no other is at its line."""
    ways: dict[tuple[object, ...], Seen] = {}
    for rank in ranks:
        step = rank.recording.step if rank.recording is not None else -1
        ways.setdefault((_site(rank), rank.frames, rank.ended_well, bool(rank.frames) and step), rank)
    known = {_site(rank) for rank in ways.values() if rank.frames}
    return [rank for rank in ways.values() if rank.frames or rank.operation is None or _site(rank) not in known]


def _in_step(one: Seen, other: Seen) -> bool:
    """Whether both have called their last common collectives at the same lines, or at lines that the other never calls.

    If not, they have parted before, by a call that one has left out. Arms of a branch by rank are no such sign.
    """
    groups = {rank.operation.group.name for rank in (one, other) if rank.operation is not None}
    for group in groups:
        own, others = _calls(one, group), _calls(other, group)
        crossed, equal = False, 0
        for number in sorted(own.keys() & others.keys(), reverse=True):
            equal = equal + 1 if own[number] == others[number] else 0
            crossed |= not equal and (own[number] in others.values() or others[number] in own.values())
            if equal >= _IN_STEP:
                break
        if crossed:
            return False
    return True


def _calls(rank: Seen, group: str) -> dict[int, str]:
    """The lines at which a rank has called the group's collectives, by their numbers, without the one it is in."""
    records = rank.recording.records if rank.recording is not None else ()
    return {
        record.in_group: record.site
        for record in records
        if record.group.name == group and not record.is_message and record is not rank.operation
    }


def _site(rank: Seen) -> str:
    return rank.operation.site if rank.operation is not None else ""


def _steps_of_site(record: Record | None, folder: str) -> tuple[_Step, ...]:
    file, _, line = record.site.rpartition(":") if record is not None else ("", "", "")
    return (_Step(os.path.join(folder, file), int(line), False),) if file and line.isdecimal() else ()


def _steps(frames: Sequence[Frame]) -> tuple[_Step, ...]:
    """The lines of the user's program in a stack whose innermost call comes first."""
    found: list[_Step] = []
    through_library = False
    for frame in reversed(frames):
        if frame.is_librarys:
            through_library = bool(found)  # what runs the program itself does not count
            continue
        found.append(_Step(os.path.abspath(frame.file), frame.line, through_library))
        through_library = False
    return tuple(found)
