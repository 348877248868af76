"""Watches the ranks of this host for a job that does not go on, says who keeps it, and writes a report.

The launcher looks at the ranks' flight recorders a few times between two warnings: at how many operations each has
begun, and whether the last is under way. That takes microseconds. Only when a rank has been in one operation for long
are the recordings read, and the ranks that the others wait for asked where they are. For a report all are asked.

A rank that computes for long cannot be told apart from one that hangs. So the line says only what is seen: for whom the
others wait, and where that one is. It is repeated ever more seldom.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from phalanx.errors import PhalanxError
from phalanx.launch.job.job import Job
from phalanx.launch.output.failure import End
from phalanx.launch.output.stacks import format_stack, frames_in, place_in
from phalanx.launch.rank.trace import Trace
from phalanx.system import processes
from phalanx.watch.parting import parting
from phalanx.watch.records import Glance, Recording, glance, read_recording
from phalanx.watch.verdict import Seen, Verdict, judge

__all__ = ["HangWatch"]

_AGAIN = 4  # each warning of one wait comes when it has lasted so many times longer than at the last
_UNANSWERED_S = 10.0  # the zygote waits a few seconds for ranks that do not say where they are
_LONGEST_LOOK_S = 1.0
_MOST_ASKED = 4  # of those that wait, one for each line, for a warning


class Watched(Protocol):
    """What the launcher knows of a rank: its pid once it runs, and its end once it has ended."""

    pid: int | None
    end: End | None


class HangWatch:
    """The watch over one job.

    Args:
        job: the job.
        trace: where its ranks have their recorders and write their stacks.
        ask: asks the ranks ``of`` for their stacks; :meth:`answered` is to be called when they have written.
        say: prints a line.
        rank: gives what the launcher knows of a rank.
    """

    def __init__(
        self,
        job: Job,
        trace: Trace,
        ask: Callable[..., None],
        say: Callable[[str], None],
        rank: Callable[[int], Watched],
    ) -> None:
        self._job, self._trace, self._ask, self._say, self._rank = job, trace, ask, say, rank
        wanted = job.diagnosis
        self._on = not wanted.why_unwatched(is_local=job.is_local, is_python=job.target.is_python, ranks=job.ranks)
        self._interval_s = min(_LONGEST_LOOK_S, wanted.warn_after_s / 4)
        self._next = time.monotonic() + self._interval_s
        self._glances: dict[int, Glance] = {}
        self._moved_at = time.monotonic()
        self._warn_at_s = wanted.warn_after_s  # the next warning comes after a wait of so many seconds
        self._reported = False
        self._asked_at: float | None = None
        self._wants_report = False
        self._begun_at = time.time()

    def due_in_s(self) -> float | None:
        """When :meth:`look` has something to do; None for never."""
        return max(0.0, self._next - time.monotonic()) if self._on else None

    @property
    def expects_stacks(self) -> bool:
        """Whether the stacks that the ranks write next are for this watch."""
        return self._asked_at is not None

    def look(self) -> None:
        """Look at the ranks, if it is time to."""
        now = time.monotonic()
        if not self._on or now < self._next:
            return
        self._next = now + self._interval_s
        if self._asked_at is not None:
            if now - self._asked_at > _UNANSWERED_S:
                self.answered({})
            return
        waited_s = self._longest_wait_s(now)
        still_s = now - self._moved_at
        if waited_s < self._job.diagnosis.warn_after_s:
            self._warn_at_s, self._reported = self._job.diagnosis.warn_after_s, False
            return
        report_after_s = self._job.diagnosis.report_after_s
        self._wants_report = not self._reported and min(still_s, waited_s) >= report_after_s
        if waited_s < self._warn_at_s and not self._wants_report:
            return
        seen = self._see({})
        verdict = judge(seen)
        if verdict is None:
            return
        self._asked_at = now
        running = [rank for rank in range(self._job.ranks) if self._runs(rank)]
        asked = running if self._wants_report else [*verdict.awaited, *_one_for_each_line(verdict, seen)]
        self._ask(of=[rank for rank in running if rank in asked])

    def answered(self, stacks: Mapping[int, str]) -> None:
        """Say who waits for whom: the ranks have written where they are, as faulthandler does, or do not answer."""
        self._asked_at = None
        now = time.monotonic()
        seen = self._see(stacks)
        verdict = judge(seen)
        waited_s = self._longest_wait_s(now)
        if verdict is None or waited_s < self._job.diagnosis.warn_after_s:
            return  # they went on meanwhile
        verdict = replace(verdict, hint=parting(verdict, seen, os.getcwd(), self._begun_at))
        if waited_s >= self._warn_at_s or not self._wants_report:
            self._warn_at_s = waited_s * _AGAIN
            self._say(f"{verdict.sentence}, for {waited_s:.0f} s now{verdict.advice}")
        if self._wants_report:
            self._reported = True
            if self._job.diagnosis.report_dir:
                self._write(verdict, seen, stacks)

    def _write(self, verdict: Verdict, seen: Sequence[Seen], stacks: Mapping[int, str]) -> None:
        from phalanx.watch.hang_report import HangReport, write_report

        job = self._job
        report = HangReport(
            job.title(),
            job.host,
            datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            time.monotonic_ns(),
            verdict,
            seen,
            {rank: format_stack(stack) for rank, stack in stacks.items()},
        )
        try:
            path = write_report(Path(job.diagnosis.report_dir), report)
        except OSError as error:
            self._say(f"the report on this could not be written to {job.diagnosis.report_dir}: {error.strerror}")
            return
        self._say(f"{path} has every rank's stack and operations: phalanx report {job.diagnosis.report_dir}")

    def _longest_wait_s(self, now: float) -> float:
        """How long the rank that has been in its operation for longest has been there; also notes who has moved."""
        longest = 0.0
        for rank in range(self._job.ranks):
            found = glance(self._trace.descriptor, self._trace.place_of_recorder(rank)) if self._runs(rank) else None
            if found is None:
                self._glances.pop(rank, None)
                continue
            if self._glances.get(rank) != found:
                self._glances[rank] = found
                self._moved_at = now
            if found.under_way_since_ns:
                longest = max(longest, now - found.under_way_since_ns / 1e9)
        return longest

    def _runs(self, rank: int) -> bool:
        known = self._rank(rank)
        return known.pid is not None and known.end is None

    def _see(self, stacks: Mapping[int, str]) -> list[Seen]:
        return [self._see_one(rank, stacks.get(rank, "")) for rank in range(self._job.ranks)]

    def _see_one(self, rank: int, stack: str) -> Seen:
        pid, end = self._rank(rank).pid, self._rank(rank).end
        ended = "" if end is None else f"exit code {end.status}" if end.status >= 0 else f"signal {-end.status}"
        state = processes.state_of(pid) if pid is not None and end is None else ""
        return Seen(
            rank,
            self._recording(rank),
            state,
            ended,
            place_in(stack) if stack else "",
            self._trace.asked(rank),
            ended_well=end is not None and end.status == 0,
            frames=frames_in(stack) if stack else (),
        )

    def _recording(self, rank: int) -> Recording | None:
        try:
            found = read_recording(self._trace.descriptor, self._trace.place_of_recorder(rank))
        except (OSError, ValueError, PhalanxError):
            return None
        return found.beside(os.getcwd()) if found is not None else None


def _one_for_each_line(verdict: Verdict, seen: Sequence[Seen]) -> list[int]:
    """Ranks that wait, one for each line at which they do, whose stacks show how they have come there."""
    lines: dict[str, int] = {}
    for rank in seen:
        if rank.rank in verdict.waiting and rank.operation is not None:
            lines.setdefault(rank.operation.site, rank.rank)
    return list(lines.values())[:_MOST_ASKED]
