"""Watches the ranks of a job for one that does not go on, says who keeps it, and writes a report.

The agents look at the ranks' flight recorders a few times between two warnings: at how many operations each has begun,
and whether the last is under way (``observer.py``). Only when a rank has been in one operation for long are the
recordings read, and the ranks that the others wait for asked where they are (``examination.py``). For a report all are
asked. On a busy machine one may not say it in time: then the report is written without it, and written again once it
has said so.

A rank that computes for long cannot be told apart from one that hangs. So the line says only what is seen: for whom the
others wait, and where that one is. It is repeated ever more seldom. A rank that is stopped does not go on by itself, so
the line on it comes sooner (``stopped_ranks.py``), and once.
"""

from __future__ import annotations

import contextlib
import datetime
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from phalanx.diagnosis.diagnose import HangDiagnosis, calls_that_differ, diagnose
from phalanx.diagnosis.divergence import divergence
from phalanx.diagnosis.snapshot import RankSnapshot
from phalanx.diagnosis.stacks import format_stack, frames_in, place_in
from phalanx.launch.examination import Examination, Examiner, Pace
from phalanx.launch.job.job import Job
from phalanx.launch.stopped_ranks import StoppedRanks
from phalanx.settings import VERSION
from phalanx.system.files import own_folder
from phalanx.words import format_named

if TYPE_CHECKING:
    from phalanx.diagnosis.report import HangReport
    from phalanx.diagnosis.snapshot import Recording

__all__ = ["HangWatch"]

_AGAIN = 4  # each warning of one wait comes when it has lasted so many times longer than at the last
_MOST_ASKED = 4  # of those that wait, one for each line, for a warning
# How long after a report that lacks ranks all are asked again, twice as long each time, and how often.
_FILLED_AFTER_S, _MOST_FILLED = 2.0, 5
# How long before the end of a wait the last look at the ranks may have been, and more on a busy machine.
_LAST_LOOK_S = 4.0


class HangWatch:
    """The watch over one job.

    Args:
        job: the job.
        say: prints a line.
        clock: gives the time in seconds.

    Attributes:
        examiner: how its ranks are seen; it gives its answers to :meth:`examined`.
    """

    examiner: Examiner

    def __init__(self, job: Job, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._say, self._clock = job, say, clock
        self._wanted = job.diagnosis
        self._on = not self._wanted.why_unwatched(is_python=job.target.is_python, ranks=job.ranks)
        self._next = clock() + self._wanted.look_every_s
        self._warn_at_s = self._wanted.ask_after_s  # the next warning comes after a wait of so many seconds
        self._reported = False
        self._asked_at: float | None = None
        self._asks_for_stacks = False
        self._was_awaited = False  # whether some rank was, before the ranks were asked where they are
        self._wants_report = False
        self._report_not_before = 0.0
        self._report: Path | None = None  # the one on the present wait
        self._lacking: list[int] = []
        self._filled = 0
        self._begun_at = time.time()
        self._stopped = StoppedRanks(clock)
        self._seen_stopped: tuple[int, ...] = ()
        self._seen_stopped_at = -_LAST_LOOK_S

    def due_in_s(self) -> float | None:
        """Return when :meth:`look` has something to do; None for never."""
        return max(0.0, self._next - self._clock()) if self._on else None

    def stopped_at(self, at: float) -> Sequence[int]:
        """List the ranks that were stopped (state T) when others that waited failed, as far as it was seen.

        Args:
            at: when that was, on the clock.
        """
        return self._seen_stopped if at - self._seen_stopped_at <= _LAST_LOOK_S else ()

    def look(self) -> None:
        """Look at the ranks, if it is time to."""
        if self._on and self._clock() >= self._next:
            with self._guarded():
                self._look()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Have what goes wrong in here end this watch, and not the job."""
        try:
            yield
        except Exception as error:
            self._on, self._asked_at = False, None
            self._say(f"the job goes on, but nothing more is said of ranks that wait: {type(error).__name__}: {error}")

    def _look(self) -> None:
        now = self._clock()
        self._next = now + self._wanted.look_every_s
        if self._asked_at is not None:
            return
        pace = self.examiner.look()
        if pace.waited_s < self._wanted.ask_after_s:
            self._warn_at_s, self._reported = self._wanted.ask_after_s, False
            self._report, self._filled = None, 0
            self._wants_report = False
        else:
            long_enough = min(pace.still_s, pace.waited_s) >= self._wanted.report_after_s
            self._wants_report = not self._reported and long_enough and now >= self._report_not_before
        if pace.stopped:
            self._seen_stopped, self._seen_stopped_at = pace.stopped, now
        looks_closely = self._stopped.ask_for_look(pace.stopped)
        self._next = now + self._look_again_in_s(pace, now)
        if pace.waited_s >= self._warn_at_s or self._wants_report or looks_closely:
            self._ask((), (), for_stacks=False)

    def _look_again_in_s(self, pace: Pace, now: float) -> float:
        until_report_s = self._wanted.report_after_s - min(pace.still_s, pace.waited_s)
        until_close_look_s = self._stopped.next_at - now
        return self._wanted.look_again_in_s(self._warn_at_s - pace.waited_s, until_report_s, until_close_look_s)

    def _ask(self, of: Sequence[int], skip: Sequence[int], *, for_stacks: bool) -> None:
        self._asked_at, self._asks_for_stacks = self._clock(), for_stacks
        self.examiner.ask(of, skip, whole=self._wants_report)

    def look_soon(self) -> None:
        """Look at the next turn: an agent has said that ranks wait."""
        self._next = self._clock()

    def examined(self, found: Examination) -> None:
        """Take an answer of the examiner's."""
        with self._guarded():
            self._examined(found)

    def _examined(self, found: Examination) -> None:
        """Ask the ranks on which it depends where they are; or if they have been asked, say what was found."""
        asked_at, self._asked_at = self._asked_at, None
        if asked_at is None:
            return
        report_after_s = self._wanted.report_after_s
        if self._wants_report and found.still_s < report_after_s:
            # Ranks of a host on which nobody waits have moved.
            self._report_not_before = self._clock() + report_after_s - found.still_s
            self._wants_report = False
        if self._asks_for_stacks:
            self._tell(found)
            return
        verdict = diagnose(found.ranks)
        certain = self._stopped.are_to_blame(verdict, found.ranks)
        self._next = min(self._next, self._stopped.next_at)
        if verdict is None or not (found.waited_s >= self._warn_at_s or self._wants_report):
            if verdict is not None and certain:
                self._say_it(verdict, found)  # without stacks, for a stopped rank has none to give
            return  # or else they went on meanwhile
        # One that is stopped would write where it is when it goes on, and the line would wait for that.
        running = [
            seen.rank for seen in found.ranks if not seen.ended and not seen.silent and seen.state not in ("T", "t")
        ]
        asked = running if self._wants_report else [*verdict.awaited, *_one_for_each_line(verdict, found.ranks)]
        self._was_awaited = bool(verdict.awaited)
        self._ask([rank for rank in running if rank in asked], found.silent, for_stacks=True)

    def _tell(self, found: Examination) -> None:
        """Say who waits for whom."""
        seen = [_placed(rank, found.stacks.get(rank.rank, "")) for rank in found.ranks]
        verdict = diagnose(seen)
        if verdict is None or found.waited_s < self._wanted.ask_after_s:
            return  # they went on meanwhile
        if self._was_awaited and not verdict.awaited:
            return  # they have all come meanwhile; if that does not go on, the next look finds it
        differing = _differing(verdict, seen)
        if not differing or set(verdict.awaited) <= set(verdict.waiting):
            # Else the ranks are at different lines because their calls differed.
            verdict = replace(verdict, hint=divergence(verdict, seen, own_folder(), self._begun_at))
        if found.waited_s >= self._warn_at_s:
            is_first = self._warn_at_s == self._wanted.ask_after_s
            self._warn_at_s = max(found.waited_s, self._wanted.warn_after_s) * _AGAIN
            if not (is_first and self._stopped.are_told(verdict, seen)):
                self._say_it(verdict, found, differing)
        if self._wants_report:
            self._reported = True
            if self._wanted.report_dir:
                self._report_on(verdict, seen, found.stacks)

    def _say_it(self, verdict: HangDiagnosis, found: Examination, differing: Sequence[str] = ()) -> None:
        said = f"{verdict.sentence}, for {found.waited_s:.0f} s now{verdict.advice}"
        self._say("\n  ".join([said, *differing]))
        self._stopped.note_told(verdict, found.ranks)

    def _report_on(self, verdict: HangDiagnosis, seen: Sequence[RankSnapshot], stacks: Mapping[int, str]) -> None:
        """Write the report, or write it again if it lacks fewer ranks now."""
        lacking = [rank.rank for rank in seen if _says_nothing(rank, stacks)]
        if self._report is None or len(lacking) < len(self._lacking):
            self._report = self._write(verdict, seen, stacks)
            self._lacking = lacking
            if self._report is not None:
                but = f" ({format_named('rank', lacking)} did not answer)" if lacking else ""
                read = f"phalanx report {shlex.quote(str(self._wanted.report_dir))} (--html FILE makes a page)"
                self._say(f"{self._report} has every rank's stack and operations{but}; read it with: {read}")
        if self._report is not None and lacking and self._filled < _MOST_FILLED:
            self._reported = False
            self._report_not_before = self._clock() + _FILLED_AFTER_S * 2**self._filled
            self._filled += 1

    def _write(self, verdict: HangDiagnosis, seen: Sequence[RankSnapshot], stacks: Mapping[int, str]) -> Path | None:
        from phalanx.diagnosis.report import write_report

        try:
            return write_report(Path(self._wanted.report_dir), self._as_report(verdict, seen, stacks), self._report)
        except OSError as error:
            self._say(f"the report on this could not be written to {self._wanted.report_dir}: {error.strerror}")
            return None

    def leave(self, recordings: Mapping[int, Recording], hosts: Sequence[str]) -> None:
        """Leave the ranks' operations at the end of the job, for ``phalanx timeline``, if there are any.

        Args:
            recordings: each rank's last operations.
            hosts: the host of each rank.
        """
        if not self._wanted.report_dir or not any(found.records for found in recordings.values()):
            return
        from phalanx.diagnosis.report import write_operations

        named = hosts if len(set(hosts)) > 1 else [""] * len(hosts)
        nobody = HangDiagnosis("", (), (), time.monotonic_ns())
        try:
            seen = [RankSnapshot(rank, recordings.get(rank), host=host) for rank, host in enumerate(named)]
            write_operations(Path(self._wanted.report_dir), self._as_report(nobody, seen, {}))
        except Exception as error:  # how the job ended must be said all the same
            self._say(f"the ranks' operations could not be written to {self._wanted.report_dir}: {error}")

    def _as_report(self, verdict: HangDiagnosis, seen: Sequence[RankSnapshot], stacks: Mapping[int, str]) -> HangReport:
        from phalanx.diagnosis.report import HangReport

        job = self._job
        versions = f"Phalanx {VERSION}, Python {platform.python_version()}"
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions += f", torch {metadata.version('torch')}"
        given = f", arguments: {shlex.join(job.target.argv[1:])}" if job.target.argv[1:] else ""
        return HangReport(
            f"{job.title()}{given}; {versions}",
            ", ".join(dict.fromkeys(rank.host for rank in seen if rank.host)) or job.host,
            datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            time.monotonic_ns(),
            verdict,
            seen,
            {rank: format_stack(stack) for rank, stack in stacks.items()},
        )


def _says_nothing(seen: RankSnapshot, stacks: Mapping[int, str]) -> bool:
    """Tell whether a rank may still say where it is, and has not. A stopped one says nothing before it goes on."""
    return not seen.ended and (seen.silent or not (seen.rank in stacks or seen.state in ("T", "t")))


def _placed(seen: RankSnapshot, stack: str) -> RankSnapshot:
    return replace(seen, place=place_in(stack), frames=frames_in(stack)) if stack else seen


def _differing(verdict: HangDiagnosis, seen: Sequence[RankSnapshot]) -> list[str]:
    """Lines on calls that differ, where the backend is not one that finds it; none if none do."""
    recordings = {rank.rank: rank.recording for rank in seen if rank.recording is not None}
    now_ns = time.monotonic_ns()
    found = (calls_that_differ(recordings, rank, now_ns) for rank in (*verdict.awaited, *verdict.waiting))
    return next(filter(None, found), [])


def _one_for_each_line(verdict: HangDiagnosis, seen: Sequence[RankSnapshot]) -> list[int]:
    """Choose one waiting rank for each line; its stack shows how it has come there."""
    lines: dict[str, int] = {}
    for rank in seen:
        if rank.rank in verdict.waiting and rank.operation is not None:
            lines.setdefault(rank.operation.site, rank.rank)
    return list(lines.values())[:_MOST_ASKED]
