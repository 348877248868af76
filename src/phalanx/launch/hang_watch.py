"""Watch the ranks of a job for one that does not go on, say who keeps it, and write a report.

An agent says when one of its ranks has been in one operation for long, or is stopped (``observer.py``). Then all agents
are asked what their ranks do and where they are. One that does not answer in time is left out, and its ranks count as
silent; a later answer is dropped.

A rank that computes for long cannot be told from one that hangs, so the line says only for whom the others wait, and
where that one is; it is repeated ever more seldom. A rank that a signal has stopped does not go on by itself, so the
line on it comes sooner, and once.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import platform
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from phalanx.diagnosis.diagnose import HangDiagnosis, calls_that_differ, diagnose
from phalanx.diagnosis.divergence import divergence
from phalanx.diagnosis.snapshot import RankSnapshot, Recording
from phalanx.diagnosis.stacks import format_stack, frames_in, place_in
from phalanx.launch.job.job import Job
from phalanx.launch.protocol import Examine, Examined, Order, Waits
from phalanx.launch.roster import AgentState
from phalanx.settings import VERSION
from phalanx.system.files import own_folder
from phalanx.topology.table import RankRow
from phalanx.words import format_named

if TYPE_CHECKING:
    from phalanx.diagnosis.report import HangReport

__all__ = ["HangWatch", "received_recording"]

_AGAIN = 4  # each warning of one wait comes when it has lasted so many times longer than at the last
# A report that lacks ranks, on a busy machine, is tried again so much later, and so often.
_REPORT_AGAIN_S, _MOST_REPORTS = 3.0, 5
# How long ranks have been stopped before it is asked who waits for them: a job that is suspended as a whole is stopped
# and continued rank by rank. If nobody waits, the next question comes after twice the pause, up to the second.
_STOPPED_S, _LONGEST_PAUSE_S = 1.0, 64.0
# How many of a rank's last operations an answer has, for a line and for a report; and how many of all ranks together.
_RECORDS_OF_LINE, _RECORDS_OF_REPORT, _RECORDS_OF_ALL = 16, 512, 1 << 16
# How long an answer may take, and how much longer if ranks are to write their stacks: the agent waits so long for one
# that has no core to run on.
_ANSWER_S, _STACKS_S = 3.0, 3.0


class HangWatch:
    """The watch over one job, which asks its agents one question at a time.

    Attributes:
        look_at: when :meth:`look` has something to do; None for never.
        answer_by: until when the agents may answer the open question; None if there is none.
    """

    def __init__(
        self,
        job: Job,
        agents: Sequence[AgentState],
        rows: Callable[[], Sequence[RankRow]],
        send: Callable[[AgentState, Order], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._agents, self._rows, self._send, self._say, self._clock = job, agents, rows, send, say, clock
        self._wanted = job.diagnosis
        is_on = not self._wanted.why_unwatched(is_python=job.target.is_python, ranks=job.ranks)
        self.look_at = clock() + self._wanted.look_every_s if is_on else None
        # Of each agent whose ranks wait: since when they do, and when one of them was last seen to move.
        self._waits: dict[int, tuple[float, float]] = {}
        self._stopped_of: dict[int, Sequence[int]] = {}
        self._number = 0  # of the question
        self._awaited: set[int] = set()  # the agents whose answers are
        self._answers: list[tuple[Examined, float]] = []  # and what is to be added to the times of each
        self._tell_user: Callable[[Sequence[RankSnapshot], Mapping[int, str]], None] | None = None
        self.answer_by: float | None = None
        self._asks_for_stacks = self._asks_for_report = False
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

    # What agents say.

    def hear_waits(self, agent: AgentState, said: Waits) -> None:
        """Take how long a rank has waited, as its agent says unasked, and look at the next turn."""
        now = self._clock()
        self._stopped_of[agent.number] = said.stopped
        self._waits.pop(agent.number, None)
        if said.waited_s:
            self._waits[agent.number] = now - said.waited_s, now - said.still_s
        if self.look_at is not None:
            self.look_at = now

    def hear(self, agent: AgentState, answer: Examined) -> None:
        """Take an answer."""
        if answer.number == self._number and agent.number in self._awaited:
            self._awaited.discard(agent.number)
            self._answers.append((answer, agent.later))

    def lose(self, agent: AgentState) -> None:
        """Expect nothing of an agent that has gone, or has no rank any more."""
        self._awaited.discard(agent.number)
        self._waits.pop(agent.number, None)
        self._stopped_of.pop(agent.number, None)

    def drop(self) -> None:
        """Drop an open question: the job ends for a known reason, and an answer could only blame ranks."""
        self.answer_by, self._awaited, self._tell_user = None, set(), None

    @property
    def stopped(self) -> Sequence[int]:
        """The ranks that a signal has stopped."""
        return sorted(rank for ranks in self._stopped_of.values() for rank in ranks)

    # Questions.

    def ask_for_user(self, tell: Callable[[Sequence[RankSnapshot], Mapping[int, str]], None]) -> None:
        """Ask for all stacks, and have the user told of the ranks and their stacks."""
        self._tell_user = tell
        self._ask(stacks=True)

    def _ask(self, *, stacks: bool, whole: bool = False) -> None:
        """Ask what the ranks do: also for their stacks, and for as many operations as a report has."""
        self._number += 1
        count = sum(len(agent.ranks) for agent in self._agents)
        most = min(_RECORDS_OF_REPORT, max(_RECORDS_OF_LINE, _RECORDS_OF_ALL // max(1, count)))
        self._answers = []
        self._awaited = {agent.number for agent in self._agents if agent.link is not None and not agent.over}
        self.answer_by = self._clock() + _ANSWER_S + (_STACKS_S if stacks else 0.0)
        question = Examine(number=self._number, stacks=stacks, records=most if whole else _RECORDS_OF_LINE)
        for agent in self._agents:
            if agent.number in self._awaited:
                self._send(agent, question)

    # In time.

    def act(self) -> None:
        """Say what was found, if all have answered or the time is up."""
        if self.answer_by is None or (self._awaited and self._clock() < self.answer_by):
            return
        self.answer_by = None
        silent, self._awaited = self._awaited, set()
        seen = self._snapshots(silent)
        stacks = {rank: stack for answer, _ in self._answers for rank, stack in answer.stacks.items()}
        if self._tell_user is not None:
            self._tell_user(seen, stacks)
            self._tell_user = None
        waited_s = max((answer.waited_s for answer, _ in self._answers), default=0.0)
        still_s = min((answer.still_s for answer, _ in self._answers), default=0.0)
        if self.look_at is not None:
            with self._guarded():
                self._tell(seen, stacks, waited_s, still_s)

    def _snapshots(self, silent: Collection[int]) -> list[RankSnapshot]:
        rows = self._rows()
        several = len({row.host for row in rows}) > 1
        sent = {rank: (said, later) for answer, later in self._answers for rank, said in answer.ranks.items()}
        seen = []
        for agent in self._agents:
            for rank in agent.ranks:
                said, later = sent.get(rank.number, ({}, 0.0))
                status = rank.end.status if rank.end is not None else None
                ended = "" if status is None else f"exit code {status}" if status >= 0 else f"signal {-status}"
                one = RankSnapshot(
                    rank.number,
                    received_recording(said.get("recording"), later),
                    said.get("state", "") if not ended else "",
                    ended,
                    asked=said.get("asked", ""),
                    host=rows[rank.number].host if several else "",
                    silent=agent.number in silent and not ended,
                    ended_well=status == 0,
                    local_rank=rows[rank.number].local_rank,
                )
                seen.append(one)
        return sorted(seen, key=lambda one: one.rank)

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
        if self.answer_by is not None:
            return
        # Agents whose ranks do not wait may move or not, before they are asked.
        waited_s = now - min((since for since, _ in self._waits.values()), default=now)
        still_s = min(waited_s, now - max((at for _, at in self._waits.values()), default=now))
        if waited_s < self._wanted.ask_after_s:
            self._forget_wait()
        if (stopped := self.stopped) != self._stopped:
            self._stopped, self._pause_s = stopped, _STOPPED_S
            self._ask_of_stopped_at = now + _STOPPED_S if stopped else math.inf
            self._told = self._told if stopped else ()
        warns, asks_of_stopped = waited_s >= self._warn_at_s, now >= self._ask_of_stopped_at
        self._asks_for_report = (
            still_s >= max(self._wanted.report_after_s, self._wanted.ask_after_s)
            and self._reports_left > 0
            and now >= self._report_not_before
        )
        if asks_of_stopped:
            self._ask_of_stopped_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.look_at = now + self._wanted.look_again_in_s(
            self._warn_at_s - waited_s, self._wanted.report_after_s - still_s, self._ask_of_stopped_at - now
        )
        self._asks_for_stacks = warns or self._asks_for_report
        if self._asks_for_stacks or asks_of_stopped:
            self._ask(stacks=self._asks_for_stacks, whole=self._asks_for_report)

    def _tell(self, seen: Sequence[RankSnapshot], stacks: Mapping[int, str], waited_s: float, still_s: float) -> None:
        """Say who waits for whom, if that is due."""
        report_after_s = self._wanted.report_after_s
        if still_s < report_after_s:
            # Ranks of a host on which nobody waits have moved.
            self._asks_for_report = False
            self._report_not_before = self._clock() + report_after_s - still_s
        seen = [_placed(rank, stacks.get(rank.rank, "")) for rank in seen]
        verdict = diagnose(seen)
        if verdict is None:
            return  # they went on meanwhile
        states = {rank.rank: rank.state for rank in seen}
        all_stopped = bool(verdict.waiting) and all(states.get(rank) == "T" for rank in verdict.awaited)
        stopped = verdict.awaited if all_stopped else ()
        warns = self._asks_for_stacks and waited_s >= self._warn_at_s
        says = bool(stopped) and stopped != self._told
        if warns:
            # The first line on a wait is not said if one on stopped ranks has said the same.
            says = says or not (stopped and self._warn_at_s == self._wanted.ask_after_s)
            self._warn_at_s = max(waited_s, self._wanted.warn_after_s) * _AGAIN
        differing: list[str] = []
        if warns or self._asks_for_report:
            differing = _differing(verdict, seen)
            if not differing or set(verdict.awaited) <= set(verdict.waiting):
                # Else the ranks are at different lines because their calls differed.
                verdict = replace(verdict, hint=divergence(verdict, seen, own_folder(), self._begun_at))
        if says:
            self._told = stopped
            said = f"{verdict.sentence}, for {waited_s:.0f} s now{verdict.advice}"
            self._say("\n  ".join([said, *differing]))
        if self._asks_for_report and waited_s >= self._wanted.ask_after_s:
            self._write_report(verdict, seen, stacks)

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


def received_recording(sent: Any, later: float) -> Recording | None:
    """Read a rank's operations as its agent has sent them, by this process's clock and with the user's paths."""
    if sent is None or not math.isfinite(later):
        return None
    return Recording.from_json(sent).seen_from(own_folder(), round(later * 1e9))


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
