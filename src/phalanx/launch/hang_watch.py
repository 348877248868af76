"""Watch the ranks of a job for one that does not go on, say who keeps it, and write a report.

An agent says when one of its ranks has been in one operation for long (``observer.py``). Then all agents are asked what
their ranks do and where they are (``examination.py``). A rank that computes for long cannot be told from one that
hangs, so the line says only for whom the others wait, and where that one is; it is repeated ever more seldom. A rank
that a signal has stopped does not go on by itself, so the line on it comes sooner, and once.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.diagnosis.diagnose import HangDiagnosis, calls_that_differ, diagnose
from phalanx.diagnosis.divergence import divergence
from phalanx.diagnosis.snapshot import RankSnapshot
from phalanx.diagnosis.stacks import format_stack, frames_in, place_in
from phalanx.launch.examination import Examination, Examiner
from phalanx.launch.job.job import Job
from phalanx.settings import VERSION
from phalanx.system.files import own_folder
from phalanx.words import format_named

if TYPE_CHECKING:
    from phalanx.diagnosis.report import HangReport
    from phalanx.diagnosis.snapshot import Recording

__all__ = ["HangWatch"]

_AGAIN = 4  # each warning of one wait comes when it has lasted so many times longer than at the last
# A report that lacks ranks, on a busy machine, is tried again so much later, and so often.
_REPORT_AGAIN_S, _MOST_REPORTS = 3.0, 5
# How long ranks have been stopped before it is asked who waits for them: a job that is suspended as a whole is stopped
# and continued rank by rank. If nobody waits, the next question comes after twice the pause, up to the second.
_STOPPED_S, _LONGEST_PAUSE_S = 1.0, 64.0


class HangWatch:
    """The watch over one job. ``say`` prints a line; ``examiner`` gives its answers to :meth:`examined`.

    Attributes:
        look_at: when :meth:`look` has something to do; None for never.
    """

    examiner: Examiner

    def __init__(self, job: Job, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._say, self._clock = job, say, clock
        self._wanted = job.diagnosis
        is_on = not self._wanted.why_unwatched(is_python=job.target.is_python, ranks=job.ranks)
        self.look_at = clock() + self._wanted.look_every_s if is_on else None
        self._is_asking = self._asks_for_stacks = self._asks_for_report = False
        self._begun_at = time.time()
        self._stopped: Sequence[int] = ()
        self._told: Sequence[int] = ()  # the stopped ranks that a line has named
        self._ask_of_stopped_at, self._pause_s = math.inf, _STOPPED_S
        self._forget_wait()

    def _forget_wait(self) -> None:
        self._warn_at_s = self._wanted.ask_after_s  # the next warning comes after a wait of so many seconds
        self._report: Path | None = None  # the one on the present wait
        self._lacking: list[int] = []  # the ranks that are not in it
        self._reports_left = _MOST_REPORTS if self._wanted.report_dir else 0
        self._report_not_before = 0.0

    def look_soon(self) -> None:
        """Look at the next turn: an agent has said that ranks wait."""
        if self.look_at is not None:
            self.look_at = self._clock()

    def look(self) -> None:
        """Look at the ranks, if it is time to."""
        if self.look_at is not None and self._clock() >= self.look_at:
            with self._guarded():
                self._look(self._clock())

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Have what goes wrong in here end this watch, and not the job."""
        try:
            yield
        except Exception as error:
            self.look_at = None
            self._say(f"the job goes on, but nothing more is said of ranks that wait: {type(error).__name__}: {error}")

    def _look(self, now: float) -> None:
        self.look_at = now + self._wanted.look_every_s
        if self._is_asking:
            return
        pace = self.examiner.look()
        still_s = min(pace.still_s, pace.waited_s)
        if pace.waited_s < self._wanted.ask_after_s:
            self._forget_wait()
        if pace.stopped != self._stopped:
            self._stopped, self._pause_s = pace.stopped, _STOPPED_S
            self._ask_of_stopped_at = now + _STOPPED_S if pace.stopped else math.inf
            self._told = self._told if pace.stopped else ()
        warns, asks_of_stopped = pace.waited_s >= self._warn_at_s, now >= self._ask_of_stopped_at
        self._asks_for_report = (
            still_s >= max(self._wanted.report_after_s, self._wanted.ask_after_s)
            and self._reports_left > 0
            and now >= self._report_not_before
        )
        if asks_of_stopped:
            self._ask_of_stopped_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.look_at = now + self._wanted.look_again_in_s(
            self._warn_at_s - pace.waited_s, self._wanted.report_after_s - still_s, self._ask_of_stopped_at - now
        )
        self._asks_for_stacks = warns or self._asks_for_report
        if self._asks_for_stacks or asks_of_stopped:
            self._is_asking = True
            self.examiner.ask(stacks=self._asks_for_stacks, whole=self._asks_for_report)

    def examined(self, found: Examination) -> None:
        """Take an answer of the examiner's, and say who waits for whom."""
        self._is_asking = False
        if self.look_at is not None:
            with self._guarded():
                self._tell(found)

    def _tell(self, found: Examination) -> None:
        report_after_s = self._wanted.report_after_s
        if found.still_s < report_after_s:
            # Ranks of a host on which nobody waits have moved.
            self._asks_for_report = False
            self._report_not_before = self._clock() + report_after_s - found.still_s
        seen = [_placed(rank, found.stacks.get(rank.rank, "")) for rank in found.ranks]
        verdict = diagnose(seen)
        if verdict is None:
            return  # they went on meanwhile
        states = {rank.rank: rank.state for rank in seen}
        all_stopped = bool(verdict.waiting) and all(states.get(rank) == "T" for rank in verdict.awaited)
        stopped = verdict.awaited if all_stopped else ()
        warns = self._asks_for_stacks and found.waited_s >= self._warn_at_s
        says = bool(stopped) and stopped != self._told
        if warns:
            # The first line on a wait is not said if one on stopped ranks has said the same.
            says = says or not (stopped and self._warn_at_s == self._wanted.ask_after_s)
            self._warn_at_s = max(found.waited_s, self._wanted.warn_after_s) * _AGAIN
        differing: list[str] = []
        if warns or self._asks_for_report:
            differing = _differing(verdict, seen)
            if not differing or set(verdict.awaited) <= set(verdict.waiting):
                # Else the ranks are at different lines because their calls differed.
                verdict = replace(verdict, hint=divergence(verdict, seen, own_folder(), self._begun_at))
        if says:
            self._told = stopped
            said = f"{verdict.sentence}, for {found.waited_s:.0f} s now{verdict.advice}"
            self._say("\n  ".join([said, *differing]))
        if self._asks_for_report and found.waited_s >= self._wanted.ask_after_s:
            self._write_report(verdict, seen, found.stacks)

    def _write_report(self, verdict: HangDiagnosis, seen: Sequence[RankSnapshot], stacks: Mapping[int, str]) -> None:
        """Write the report, or write it again if it lacks fewer ranks now."""
        lacking = [rank.rank for rank in seen if _says_nothing(rank, stacks)]
        self._reports_left = self._reports_left - 1 if lacking else 0
        self._report_not_before = self._clock() + _REPORT_AGAIN_S
        if self._report is not None and len(lacking) >= len(self._lacking):
            return
        from phalanx.diagnosis.report import write_report

        folder = self._wanted.report_dir
        try:
            self._report = write_report(Path(folder), self._as_report(verdict, seen, stacks), self._report)
        except OSError as error:
            self._reports_left = 0
            self._say(f"the report on this could not be written to {folder}: {error.strerror}")
            return
        self._lacking = lacking
        but = f" ({format_named('rank', lacking)} did not answer)" if lacking else ""
        read = f"phalanx report {shlex.quote(str(folder))} (--html FILE makes a page)"
        self._say(f"{self._report} has every rank's stack and operations{but}; read it with: {read}")

    def leave(self, recordings: Mapping[int, Recording], hosts: Sequence[str]) -> None:
        """Leave each rank's last operations at the end of the job, for ``phalanx timeline``, if there are any."""
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
