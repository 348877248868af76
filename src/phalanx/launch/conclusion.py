"""The end of a job in words, printed when no rank is left, and the exit code of ``phalanx run``.

Its words come after those of the ranks. If ranks may take long to end (``--grace``), one line says meanwhile why the
job ends, and for whom the launcher waits how long (:class:`ShutdownNotice`).
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.diagnosis.diagnose import calls_that_differ, disagreement
from phalanx.diagnosis.snapshot import Recording
from phalanx.diagnosis.stacks import format_places
from phalanx.launch.job.job import Job
from phalanx.launch.job.options import FAILURE_FILE
from phalanx.launch.output.failure import Failure, failure_in_short, find_cause, format_failure, signal_name
from phalanx.launch.output.logs import Console
from phalanx.launch.rank.trace import Stage
from phalanx.launch.roster import RankState
from phalanx.words import format_named

__all__ = ["Ended", "HandOver", "ShutdownNotice", "conclude", "conclude_attempt", "failed", "why_it_ends"]

_UNWRITABLE = 74  # the exit code when the ranks' output cannot be written (EX_IOERR)
_SAID_AFTER_S = 5.0  # as long as ranks have by default after a failure: what ends by itself in that time needs no word
_CLOCKS_DIFFER_S = 0.1  # of two hosts, at most

#: Takes over why a job failed, in place of the terminal: the rank that failed first, or -1 if the job could not be
#: started, the text, and the exit code.
HandOver = Callable[[int, str, int], None]


@dataclass(frozen=True)
class Ended:
    """What is known of a job that has ended.

    Attributes:
        failures: the ranks that did not end well.
        asked_at: when the ranks were told to end; infinite if they were not.
        hosts: the host of each rank.
        started_at: when the ranks were started; None if none was.
        interrupted: the signal with which somebody ended the job; None if nobody did.
        overdue: the ranks that were killed because they did not end in time, by how long they had.
        refusal: why the job could not be started or watched, as it is printed, with the exit code; None if it could.
        last_lines: the last lines of the output of each rank that was not shown.
        stopped: the ranks that were stopped (state T) when the first one failed.
    """

    ranks: Sequence[RankState]
    failures: Sequence[Failure]
    asked_at: float
    hosts: Sequence[str]
    started_at: float | None
    interrupted: int | None
    overdue: Mapping[float, Sequence[int]]
    refusal: tuple[str, int] | None
    last_lines: Mapping[int, Sequence[str]]
    stopped: Sequence[int]

    @property
    def finished(self) -> list[int]:
        """The ranks that ended by themselves, with exit code 0."""
        return [rank.number for rank in self.ranks if rank.end and rank.end.status == 0 and rank.end.at < self.asked_at]


def conclude(job: Job, ended: Ended, console: Console, hand_over: HandOver | None = None) -> int:
    """Print how the job ended, unless all ranks ended well and joined each other; return the exit code."""
    code = _conclude(job, ended, console, hand_over)
    _say_overdue(ended, console)
    if job.attempt.number and failed(ended, console):
        console.say(f"{job.attempt.title} failed, which was the last")
    return code


def failed(ended: Ended, console: Console) -> bool:
    """Whether a job ended because a rank failed, and not because somebody ended it, or its output has no reader."""
    by_others = ended.interrupted is not None or ended.refusal is not None
    return bool(ended.failures) and not (by_others or console.out.closed or console.err.closed)


def conclude_attempt(job: Job, ended: Ended, console: Console) -> None:
    """Print why an attempt :func:`failed`, and that the next one starts."""
    _, text = _explain(job, ended)
    _give(job, -1, text, 1, console, None)
    _say_overdue(ended, console)
    console.say(f"{job.attempt.title} failed; {job.attempt.next().title} starts now")


def why_it_ends(interrupted: int | None, said: str, failures: Sequence[Failure], hosts: Sequence[str]) -> str:
    """Why a job is being ended, as the beginning of a line about it; empty if that is not known.

    Args:
        interrupted: the signal with which somebody ends it; None if nobody does.
        said: why it could not be watched, or its output not be written, as it is printed; empty if it could.
        failures: the ranks that have ended so far, and not well.
        hosts: the host of each rank.
    """
    if interrupted is not None:
        return f"{signal_name(interrupted)}: "
    if said:
        return f"{said.removeprefix('phalanx: ').splitlines()[0].rstrip(':')}; "
    causes = [each for each in failures if each.has_failed]
    if not causes:
        return ""
    cause = find_cause(causes)
    return f"{failure_in_short(cause, hosts[cause.rank])}; "


def _say_overdue(ended: Ended, console: Console) -> None:
    for patience_s, ranks in ended.overdue.items():
        console.say(
            f"{format_named('rank', ranks)} did not end within {patience_s:g} s and "
            f"{'was' if len(ranks) == 1 else 'were'} killed; --grace gives ranks longer"
        )


def _conclude(job: Job, ended: Ended, console: Console, hand_over: HandOver | None) -> int:
    if ended.interrupted is not None:
        _say_interrupted(job, ended, ended.interrupted, console)
        return 128 + ended.interrupted
    for name, sink in (("standard output", console.out), ("standard error", console.err)):
        if sink.fault:
            console.say(f"{name} cannot be written: {sink.fault}; the job was ended")
            return _UNWRITABLE
    if console.out.closed or console.err.closed:
        return 128 + signal.SIGPIPE
    if ended.refusal is not None:
        text, code = ended.refusal
        _give(job, -1, text, code, console, hand_over)
        return code
    if not ended.failures:
        _note_strangers(job, ended, console)
        return 0
    cause, text = _explain(job, ended)
    _give(job, cause.rank, text, cause.exit_code, console, hand_over)
    return cause.exit_code


def _explain(job: Job, ended: Ended) -> tuple[Failure, str]:
    """The failure that caused the others, and the block about it."""
    cause = find_cause(ended.failures)
    return cause, format_failure(
        cause,
        [failure for failure in ended.failures if failure is not cause],
        ranks=job.ranks,
        host=ended.hosts[cause.rank],
        started=ended.started_at if ended.started_at is not None else cause.time,
        asked=ended.ranks[cause.rank].asked,
        log=job.output.log_of(cause.rank),
        last_lines=ended.last_lines.get(cause.rank),
        last=_last_operation(ended.ranks[cause.rank].recording, cause.time),
        parted=_differing_calls(ended, cause),
    )


def _last_operation(recording: Recording | None, at: float) -> str:
    """A rank's last operation in words, for the block about its failure at that time; empty if it has recorded none."""
    last = recording.last if recording is not None else None
    if last is None:
        return ""
    since_s = max(0.0, at - (last.entered_ns if last.under_way else last.left_ns) / 1e9)
    if last.under_way:
        return f"it was in {last.text()}, for {since_s:.1f} s"
    return f"its last operation, {last.text()}, {'failed' if last.failed else 'was done'} {since_s:.1f} s before"


def _differing_calls(ended: Ended, cause: Failure) -> list[str]:
    """Lines on how the ranks' calls differed when one failed, where an error of torch's own backends cannot say it."""
    found = {rank.number: rank.recording for rank in ended.ranks if rank.recording is not None}
    if cause.rank not in found:
        return []
    if len(set(ended.hosts)) > 1:
        # Which calls differ does not depend on who came first, and clocks of hosts are not known to the microsecond.
        late_ns = (cause.time + _CLOCKS_DIFFER_S) * 1e9
        if differing := calls_that_differ(found, cause.rank, late_ns):
            return differing
    nothing = Recording(0, -1, 0, -1, "", 0, ())  # of a rank that has not come to a group so far
    every = {rank.number: found.get(rank.number, nothing) for rank in ended.ranks}
    return disagreement(every, cause.rank, cause.time * 1e9, ended.stopped, ended.finished)


def _give(job: Job, rank: int, text: str, code: int, console: Console, hand_over: HandOver | None) -> None:
    if job.output.log_dir:
        with contextlib.suppress(OSError):
            Path(job.output.log_dir, FAILURE_FILE).write_text(text, errors="backslashreplace")
    if hand_over is None:
        console.err.write(text)
    else:
        hand_over(rank, text, code)


def _say_interrupted(job: Job, ended: Ended, signum: int, console: Console) -> None:
    if not ended.started_at:
        what = f"{job.attempt.title} had not started" if job.attempt.number else "nothing had been started"
        console.say(f"{signal_name(signum)}: {what}")
        return
    finished = ended.finished
    others = [rank for rank in range(job.ranks) if rank not in finished]
    whose = f"all {job.ranks} ranks have" if job.ranks > 1 else "the rank has"
    if finished:
        whose = f"{format_named('rank', finished)} had finished" + (
            f"; {format_named('rank', others)} {'has' if len(others) == 1 else 'have'}" if others else ""
        )
    been_ended = " been ended" if others else ""
    places = [] if job.quiet else format_places({rank.number: rank.stack for rank in ended.ranks if rank.stack})
    ran = [rank for rank in ended.ranks if rank.end is None or rank.end.at >= ended.asked_at]
    silent = [rank.number for rank in ran if not rank.stack]
    if places and silent:  # the last thing that is said of a rank that was stopped
        places.append(f"{format_named('rank', silent)}: no answer")
    were_at = f"; {'they were' if len(others) > 1 else 'it was'} at:" if places else ""
    lines = [f"{signal_name(signum)}: {whose}{been_ended}{were_at}"]
    console.say("\n  ".join(lines + places))


def _note_strangers(job: Job, ended: Ended, console: Console) -> None:
    """Say so if ranks that use torch have not joined each other: then each has done the whole work alone."""
    stages = {rank.stage for rank in ended.ranks}
    joined = Stage.ENDED in stages
    if job.quiet or job.ranks == 1 or job.mpi is not None or joined or stages == {Stage.STARTED}:
        return
    local = "" if job.pass_local_rank else "; a script that takes --local_rank wants phalanx run --pass-local-rank"
    console.say(
        f"note: none of the {job.ranks} ranks joined the others, so each did the whole work by itself. A script joins "
        f"with phalanx.init() or torch.distributed.init_process_group(){local}"
    )


class ShutdownNotice:
    """The line on ranks that were told to end and take longer than a moment for it.

    Attributes:
        begun_at: when the ranks were first told to end.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._say_at: float | None = None
        self._kill_at = float("inf")
        self.begun_at = float("inf")

    def begin(self, grace_s: float) -> None:
        """The ranks have just been told to end, and are killed in so many seconds."""
        now = time.monotonic()
        self.begun_at = min(self.begun_at, now)
        self._kill_at = min(self._kill_at, now + grace_s)  # a later order gives nobody more time
        self._say_at = now + _SAID_AFTER_S if self._kill_at - now > _SAID_AFTER_S else None

    def due_in_s(self) -> float | None:
        """Return when :meth:`look` has something to do; None for never."""
        return None if self._say_at is None else max(0.0, self._say_at - time.monotonic())

    def look(self, unended: Callable[[], Sequence[int]], why: Callable[[], str]) -> None:
        """Say, once, for whom the launcher waits, if it has waited for long; ``why`` begins the line."""
        if self._say_at is None or time.monotonic() < self._say_at:
            return
        self._say_at = None
        if ranks := unended():
            have, are = ("has", "it is") if len(ranks) == 1 else ("have", "they are")
            who, left_s = format_named("rank", ranks), max(0.0, self._kill_at - time.monotonic())
            self._say(f"{why()}{who} {have} {left_s:.0f} s more to end before {are} killed (--grace)")
