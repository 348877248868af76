"""Who keeps a job from going on: a diagnosis on what is seen of its ranks.

A rank in an operation waits for the members of the group that have not come to it, or for the other end of a message; a
rank that is stopped, or in no operation, waits for nobody here. So from each rank that waits lead arrows to the ranks
that it waits for, and where they end are the ranks that the others wait for. Where they end nowhere, ranks wait for
each other in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.diagnosis.records import Record, Recording, world_rank
from phalanx.diagnosis.stacks import Frame
from phalanx.system.process_use import STATES
from phalanx.words import format_named

__all__ = ["HangDiagnosis", "RankSnapshot", "diagnose"]


@dataclass(frozen=True)
class RankSnapshot:
    """What is seen of one rank from outside.

    Attributes:
        rank: its rank in the world.
        recording: its flight recorder; None if it has none, or has no group yet.
        state: of its main thread, as /proc says it: ``R``, ``S``, ``D``, ``T``; empty if that is not known.
        ended: how it has ended, as ``exit code 0``; empty if it runs.
        place: the line of the program where its main thread is, with the line's text; empty if it did not say.
        asked: what it has asked another process for, and waits for.
        host: where it runs; empty if all ranks of the job are on one host.
        silent: its host did not answer in time, so that nothing else of this is known.
        ended_well: whether it has ended without a failure.
        local_rank: its number among the ranks of its host, where they are on several.
        frames: its main thread's stack, the innermost call first, without those of the launcher; empty if it did not
            say.
    """

    rank: int
    recording: Recording | None = None
    state: str = ""
    ended: str = ""
    place: str = ""
    asked: str = ""
    host: str = ""
    silent: bool = False
    ended_well: bool = False
    local_rank: int = 0
    frames: tuple[Frame, ...] = ()

    @property
    def operation(self) -> Record | None:
        """The operation that it is in."""
        last = self.recording.last if self.recording is not None else None
        return last if last is not None and last.under_way and not self.ended else None


@dataclass(frozen=True)
class HangDiagnosis:
    """Who waits for whom.

    Attributes:
        sentence: the whole of it, in one sentence without its full stop.
        awaited: the ranks that the others wait for, in the world; of a circle all of its ranks.
        waiting: the ranks that wait.
        since_ns: since when the first of them has been waiting, on the host's monotonic clock.
        hint: what to look at in the program, as "the `if` in line 55"; empty if that cannot be told.
    """

    sentence: str
    awaited: tuple[int, ...]
    waiting: tuple[int, ...]
    since_ns: int
    hint: str = ""

    @property
    def advice(self) -> str:
        """The hint as it ends a sentence; empty if there is none."""
        return f"; look at {self.hint}" if self.hint else ""


def diagnose(ranks: Sequence[RankSnapshot]) -> HangDiagnosis | None:
    """The diagnosis on a job in which somebody waits; None if no rank is in an operation."""
    seen = {rank.rank: rank for rank in ranks}
    operations = {rank.rank: rank.operation for rank in ranks}
    waiting = {rank: record for rank, record in operations.items() if record is not None}
    if not waiting:
        return None
    arrows = {rank: _awaited(rank, record, seen) for rank, record in waiting.items()}
    reached: dict[int, set[int]] = {rank: _reach(rank, arrows) for rank in waiting}
    ends = {rank for found in reached.values() for rank in found if not arrows.get(rank)}
    since_ns = min(record.entered_ns for record in waiting.values())
    if ends:
        others = {rank: record for rank, record in waiting.items() if rank not in ends and reached[rank] & ends}
        sentence = _sentence([seen[rank] for rank in sorted(ends) if rank in seen], others)
        return HangDiagnosis(sentence, tuple(sorted(ends)), tuple(sorted(others)), since_ns)
    circle = sorted(rank for rank in waiting if rank in reached[rank])
    if circle:
        doing = _whereabouts({r: waiting[r] for r in circle}, seen)
        sentence = f"{format_named('rank', circle)} wait for each other: {doing}"
        return HangDiagnosis(sentence, tuple(circle), tuple(sorted(waiting)), since_ns)
    text = _whereabouts(waiting, seen)
    done = max(found.done for rank in waiting if (found := seen[rank].recording) is not None)
    far = f"{done} % of it is done" if done >= 0 else "it is not over"
    return HangDiagnosis(f"{text}: all have come, and {far}", (), tuple(sorted(waiting)), since_ns)


def _awaited(rank: int, record: Record, seen: Mapping[int, RankSnapshot]) -> set[int]:
    """The ranks that this one waits for."""
    own = seen[rank]
    if own.state in ("T", "t"):
        return set()  # whatever it waits for, it would not go on
    if record.is_message:
        if record.peer >= 0:
            return {world_rank(record.group, record.peer)} - {rank}
        return set(record.group.ranks) - {rank}
    others = [seen[other] for other in record.group.ranks if other != rank and other in seen]
    missing = {other.rank for other in others if not _has_come(other, record)}
    if missing:
        return missing
    # All have come. One that is stopped keeps the others there; else the rank itself says whom it waits for.
    stopped = {other.rank for other in others if other.state in ("T", "t") and other.operation is not None}
    if stopped or record.awaits < 0:
        return stopped
    named = world_rank(record.group, record.awaits)
    return {named} - {rank} if named in seen and seen[named].operation is None else set()


def _has_come(other: RankSnapshot, record: Record) -> bool:
    """Whether a rank is in this collective of the group, or has been."""
    if other.recording is None:
        return False
    same = [
        theirs
        for theirs in other.recording.records
        if theirs.group.name == record.group.name and not theirs.is_message and theirs.in_group >= record.in_group
    ]
    if record.kind == "init":  # one that has failed is not the one that this rank waits in
        return any(theirs.under_way or theirs.kind != "init" for theirs in same)
    return any(theirs.in_group > record.in_group or theirs.kind == record.kind for theirs in same)


def _reach(rank: int, arrows: Mapping[int, set[int]]) -> set[int]:
    """The ranks to which a path of arrows leads; itself if it is on a circle."""
    found: set[int] = set()
    ahead = list(arrows.get(rank, ()))
    while ahead:
        at = ahead.pop()
        if at not in found:
            found.add(at)
            ahead += arrows.get(at, ())
    return found


def _sentence(awaited: Sequence[RankSnapshot], waiting: Mapping[int, Record]) -> str:
    """``rank 3 is in no operation, at train.py:42; ranks 0-2 wait for it in broadcast #118 at train.py:57``."""
    alike: dict[tuple[str, str], list[RankSnapshot]] = {}
    for rank in awaited:
        alike.setdefault((rank.host, _doing(rank)), []).append(rank)
    joining = bool(waiting) and all(record.kind == "init" for record in waiting.values())
    parts = []
    for (host, text), ranks in alike.items():
        verb = "is" if len(ranks) == 1 else "are"
        # Of a rank that has never come its user may not know where it should be.
        local = f" ({format_named('local rank', [rank.local_rank for rank in ranks])})" if joining and host else ""
        parts.append(f"{_named([rank.rank for rank in ranks], host)}{local} {_agree(text, verb)}")
    whom = "it" if len(awaited) == 1 else "them"
    who = " and ".join(parts)
    if not waiting:
        return who
    waits = "waits" if len(waiting) == 1 else "wait"
    return f"{who}; {format_named('rank', sorted(waiting))} {waits} for {whom} in {_operations(waiting)}"


def _named(ranks: Sequence[int], host: str) -> str:
    """``ranks 2-3 on h1``; without the host if that goes without saying."""
    return f"{format_named('rank', ranks)}{f' on {host}' if host else ''}"


def _agree(text: str, verb: str) -> str:
    if text.startswith("has "):
        return text if verb == "is" else f"have {text[4:]}"
    return f"{verb} {text}"


def _doing(rank: RankSnapshot) -> str:
    """What a rank that others wait for is doing, after "is"."""
    if rank.ended:
        return f"has ended ({rank.ended})"
    if rank.silent:
        return "out of sight: the host does not answer"
    record = rank.operation
    place = f"at {rank.place}" if rank.place else ""
    how = STATES.get(rank.state, "")
    if rank.state in ("T", "t", "D") and record is None:
        last = rank.recording.last if rank.recording is not None else None
        after = f", after {last.name()}{_at(last)}" if last is not None and not place else ""
        return f"{how}{f' {place}' if place else ''}{after}"
    if record is not None:
        inside = f"in {record.name()}{_at(record)}"
        return f"{how}, {inside}" if rank.state in ("T", "t", "D") else inside
    if rank.asked:
        place = f"{place + ', ' if place else ''}waiting for {rank.asked}"
    if rank.recording is None or not rank.recording.records:
        return f"{place + ', ' if place else ''}in no operation yet"
    if not place:
        last = rank.recording.records[-1]
        return f"in no operation; its last was {last.name()}{_at(last)}"
    return f"{place}, in no operation"


def _operations(waiting: Mapping[int, Record]) -> str:
    texts: dict[str, None] = dict.fromkeys(f"{record.name()}{_at(record)}" for _, record in sorted(waiting.items()))
    return " and ".join(texts)


def _whereabouts(waiting: Mapping[int, Record], seen: Mapping[int, RankSnapshot]) -> str:
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, record in sorted(waiting.items()):
        alike.setdefault((seen[rank].host, f"{record.name()}{_at(record)}"), []).append(rank)
    return ", ".join(
        f"{_named(ranks, host)} {'is' if len(ranks) == 1 else 'are'} in {text}" for (host, text), ranks in alike.items()
    )


def _at(record: Record) -> str:
    return f" at {record.site}" if record.site else ""
