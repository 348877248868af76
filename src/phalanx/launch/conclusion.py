"""The end of a job in words, printed when no rank is left, and the exit code of ``phalanx run``."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.diagnosis.diagnose import calls_that_differ, disagreement
from phalanx.diagnosis.snapshot import Recording
from phalanx.diagnosis.stacks import format_places
from phalanx.errors import OUT_OF_MEMORY_HINT
from phalanx.launch.job.job import Job
from phalanx.launch.job.options import FAILURE_FILE
from phalanx.launch.output.failure import RankState, Report, describe_status, find_cause, signal_name
from phalanx.launch.output.logs import Console
from phalanx.launch.rank.trace import Stage
from phalanx.words import format_named

__all__ = ["Ended", "HandOver", "conclude", "conclude_attempt", "failed", "format_failure", "who_is_awaited"]

_UNWRITABLE = 74  # the exit code when the ranks' output cannot be written (EX_IOERR)
_CLOCKS_DIFFER_S = 0.1  # of two hosts, at most
_MOST_LINES = 8
_THEN = "then failed: "
# What a user reads of a failure: the lines of a block beside those of a traceback and of the rank's own output.
_MOST_OWN_LINES = 12

#: Takes why a job failed, in place of the terminal: the rank that failed first, or -1, the text, and the exit code.
HandOver = Callable[[int, str, int], None]


@dataclass(frozen=True)
class Ended:
    """The knowledge of a job that has ended, or is ending."""

    job: Job
    ranks: Sequence[RankState]
    asked_at: float  # when the ranks were told to end; infinite if they were not
    hosts: Sequence[str]  # the host of each rank
    started_at: float | None  # when the ranks were started; None if none was
    interrupted: int | None  # the signal with which somebody ended the job; None if nobody did
    # the ranks that were killed because they did not end in time, by how long they had
    overdue: Mapping[float, Sequence[int]]
    # why the job could not be started or watched, as it is printed, with the exit code; None if it could
    refusal: tuple[str, int] | None
    last_lines: Mapping[int, Sequence[str]]  # the last lines of the output of each rank that was not shown
    stopped: Sequence[int]  # the ranks that were stopped (state T) when the first one failed

    @property
    def failures(self) -> list[RankState]:
        """The ranks that were started, and did not end well."""
        return [rank for rank in self.ranks if rank.pid and not rank.ended_well]

    @property
    def finished(self) -> list[int]:
        """The ranks that ended by themselves, with exit code 0."""
        return [rank.number for rank in self.ranks if rank.end and rank.ended_well and rank.end.at < self.asked_at]


def conclude(ended: Ended, console: Console, hand_over: HandOver | None = None) -> int:
    """Print how the job ended, unless all ranks ended well and joined each other; return the exit code."""
    code = _conclude(ended, console, hand_over)
    _say_overdue(ended, console)
    if ended.job.attempt.number and failed(ended, console):
        console.say(f"{ended.job.attempt.title} failed, which was the last")
    return code


def failed(ended: Ended, console: Console) -> bool:
    """Tell whether a job ended because a rank failed, not because somebody ended it or its output has no reader."""
    by_others = ended.interrupted is not None or ended.refusal is not None
    return bool(ended.failures) and not (by_others or console.out.closed or console.err.closed)


def conclude_attempt(ended: Ended, console: Console) -> None:
    """Print why an attempt :func:`failed`, and that the next one starts."""
    _give(ended.job, -1, format_failure(ended), 1, console, None)
    _say_overdue(ended, console)
    attempt = ended.job.attempt
    when = "now" if ended.job.nodes is None else "when all nodes are there"
    console.say(f"{attempt.title} failed; {attempt.next().title} starts {when}")


def who_is_awaited(ended: Ended, left_s: float) -> str:
    """Say for whom the launcher waits, and until when, after the reason why the job ends; empty if all have ended."""
    ranks = [rank.number for rank in ended.ranks if rank.end is None]
    if not ranks:
        return ""
    why = why_it_ends(ended)
    have, are = ("has", "it is") if len(ranks) == 1 else ("have", "they are")
    why += "" if not why else "; " if ended.interrupted is None else ": "
    return (
        f"{why}{format_named('rank', ranks)} {have} {max(0.0, left_s):.0f} s more to end before {are} killed (--grace)"
    )


def why_it_ends(ended: Ended) -> str:
    """Say in short why a job ends, or has ended; empty if all is well, as far as is known."""
    if ended.interrupted is not None:
        return signal_name(ended.interrupted)
    if ended.refusal is not None:
        return ended.refusal[0].removeprefix("phalanx: ").splitlines()[0].rstrip(":")
    causes = [rank for rank in ended.failures if rank.has_failed]
    if not causes:
        return ""
    cause = find_cause(causes)
    return f"rank {cause.number} on {ended.hosts[cause.number]} failed: {_why(cause)}"


def _say_overdue(ended: Ended, console: Console) -> None:
    for patience_s, ranks in ended.overdue.items():
        console.say(
            f"{format_named('rank', ranks)} did not end within {patience_s:g} s and "
            f"{'was' if len(ranks) == 1 else 'were'} killed; --grace gives ranks longer"
        )


def _conclude(ended: Ended, console: Console, hand_over: HandOver | None) -> int:
    if ended.interrupted is not None:
        _say_interrupted(ended, ended.interrupted, console)
        return 128 + ended.interrupted
    for name, sink in (("standard output", console.out), ("standard error", console.err)):
        if sink.fault:
            console.say(f"{name} cannot be written: {sink.fault}; the job was ended")
            return _UNWRITABLE
    if console.out.closed or console.err.closed:
        return 128 + signal.SIGPIPE
    if ended.refusal is not None:
        text, code = ended.refusal
        _give(ended.job, -1, text, code, console, hand_over)
        return code
    if not ended.failures:
        _note_strangers(ended, console)
        return 0
    cause = find_cause(ended.failures)
    _give(ended.job, cause.number, format_failure(ended), cause.exit_code, console, hand_over)
    return cause.exit_code


def format_failure(ended: Ended) -> str:
    """Format the block that is printed when a job fails, about the rank that failed first."""
    cause = find_cause(ended.failures)
    last_lines, log = ended.last_lines.get(cause.number), ended.job.output.log_of(cause.number)
    last = _last_operation(cause.recording, cause.failed_at)
    report = cause.report
    reason = f": {_reason(report)}" if report is not None and _reason(report) else ""
    lines = [f"phalanx: rank {cause.number} of {ended.job.ranks} failed{reason}"]
    elapsed = max(0.0, cause.failed_at - ended.started_at) if ended.started_at is not None else 0.0
    lines.append(
        f"  host {ended.hosts[cause.number]}, pid {cause.pid}, {elapsed:.1f} s after the start, {_ending(cause)}"
    )
    if last and report is None:  # else its traceback says where
        lines.append(f"  {last}")
    lines += [f"  {line}" for line in _differing_calls(ended, cause)]
    if cause.asked:
        lines.append(f"  it was waiting for {cause.asked}")
    hint = _hint(cause, "above" if last_lines is None else "below")
    if hint:
        lines.append(f"  {hint}")
    if report is not None and report.hint:
        lines.append(f"  {report.hint}")
    room = max(1, min(_MOST_LINES, _MOST_OWN_LINES - 1 - len(lines)))
    if report is not None and report.traceback:
        lines += ["", report.traceback.rstrip("\n"), ""]
    if last_lines:
        lines += ["  the last lines of its output, which was not shown:", *(f"    {line}" for line in last_lines)]
    if log:
        lines.append(f"  its output is in {log}")
    others = [failure for failure in ended.failures if failure is not cause]
    lines += _aftermath(others, "" if report is None else f"{_THEN}{_reason(report)}", room)
    return "\n".join(lines).rstrip("\n") + "\n"


def _reason(report: Report) -> str:
    """The exception, by the first line of its text; of ``sys.exit`` the text that it was given, if any."""
    line = report.message.partition("\n")[0] if report.exited else report.summary
    return line.removesuffix(":") if "\n" in report.message else line  # what follows the colon is in the traceback


def _ending(cause: RankState) -> str:
    if cause.report is None and cause.end is not None and cause.end.status < 0:
        return describe_status(cause.end.status)
    return f"exit code {cause.exit_code}"


def _hint(cause: RankState, where: str) -> str:
    """Say what a user may think of first; ``where`` says where the output is."""
    report, end = cause.report, cause.end
    if report is not None and report.exited:
        said = "with this text" if report.message else f"without a text; if it printed a reason, that is {where}"
        return f"it called sys.exit {said}"
    if report is not None:
        return f"its traceback was printed by the script itself, {where}" if report.shown else ""
    if end is None or end.status >= 0:
        return f"it raised no Python exception; if it printed a reason, that is {where}"
    stack = f"the Python stack, if there is one, is {where}"
    if end.out_of_memory:
        killed = "the kernel ran out of memory and killed it; use less memory per rank, or fewer ranks"
    else:
        killed = f"another process killed it; if none did, {OUT_OF_MEMORY_HINT}"
    unhandled = "it does not handle this signal, which the launcher passes on to all ranks"
    hints: Mapping[int, str] = {
        signal.SIGKILL: killed,
        signal.SIGSEGV: f"native code accessed memory that it may not; {stack}",
        signal.SIGBUS: "memory could not be provided; if a DataLoader's workers have filled /dev/shm (df -h /dev/shm), "
        f"enlarge it (in Docker --shm-size=8g); {stack}",
        signal.SIGABRT: f"native code gave up; its message is {where}, and {stack}",
        signal.SIGFPE: f"native code divided by zero; {stack}",
        signal.SIGILL: f"native code was built for another processor; {stack}",
        signal.SIGTERM: "another process, not the launcher, asked it to end",
        signal.SIGINT: "another process, not the launcher, interrupted it",
        signal.SIGUSR1: unhandled,
        signal.SIGUSR2: unhandled,
        signal.SIGXCPU: "it has used up its limit of processor time (ulimit -t)",
    }
    return hints.get(-end.status, "")


def _aftermath(others: Iterable[RankState], known: str, most: int) -> list[str]:
    """Write a line for all ranks that ended alike: failures in the order of their times, then what the launcher ended.

    ``known`` is what it would say of the rank that the block is about. At most ``most`` lines are spent on ranks.
    """
    groups: dict[str, list[RankState]] = {}
    for failure in sorted(others, key=lambda other: (other.ended_by_launcher, other.failed_at)):
        report = failure.report
        # Each rank may say in words of its own that another one has gone: one of them is enough.
        alike = report.type if report is not None and report.consequence else _aftermath_of(failure)
        groups.setdefault(alike, []).append(failure)
    lines = []
    for failures in groups.values():
        ranks = format_named("rank", [failure.number for failure in failures])
        text = _aftermath_of(failures[0])
        if text == known:
            text = "then failed with the same error"
        elif any(_aftermath_of(failure) != text for failure in failures):
            text = f"then failed, rank {failures[0].number} with {_why(failures[0])}"
        lines.append(f"  {ranks} {text}")
    if len(lines) > most:
        lines = [*lines[:most], f"  and {len(lines) - most} more kinds of failure after that"]
    return lines


def _aftermath_of(failure: RankState) -> str:
    return "ended by the launcher" if failure.ended_by_launcher else f"{_THEN}{_why(failure)}"


def _why(failure: RankState) -> str:
    return (_reason(failure.report) if failure.report is not None else "") or _ending(failure)


def _last_operation(recording: Recording | None, at: float) -> str:
    """A rank's last operation in words, for the block about its failure at that time; empty if it has recorded none."""
    last = recording.last if recording is not None else None
    if last is None:
        return ""
    since_s = max(0.0, at - (last.entered_ns if last.under_way else last.left_ns) / 1e9)
    if last.under_way:
        return f"it was in {last.text()}, for {since_s:.1f} s"
    return f"its last operation, {last.text()}, {'failed' if last.failed else 'was done'} {since_s:.1f} s before"


def _differing_calls(ended: Ended, cause: RankState) -> list[str]:
    """Lines on how the ranks' calls differed when one failed, where an error of torch's own backends cannot say it."""
    found = {rank.number: rank.recording for rank in ended.ranks if rank.recording is not None}
    if cause.number not in found:
        return []
    if len(set(ended.hosts)) > 1:
        # Which calls differ does not depend on who came first, and clocks of hosts are not known to the microsecond.
        late_ns = (cause.failed_at + _CLOCKS_DIFFER_S) * 1e9
        if differing := calls_that_differ(found, cause.number, late_ns):
            return differing
    nothing = Recording(0, -1, 0, -1, "", 0, ())  # of a rank that has not come to a group so far
    every = {rank.number: found.get(rank.number, nothing) for rank in ended.ranks}
    return disagreement(every, cause.number, cause.failed_at * 1e9, ended.stopped, ended.finished)


def _give(job: Job, rank: int, text: str, code: int, console: Console, hand_over: HandOver | None) -> None:
    if job.output.log_dir:
        with contextlib.suppress(OSError):
            Path(job.output.log_dir, FAILURE_FILE).write_text(text, errors="backslashreplace")
    if hand_over is None:
        console.err.write(text)
    else:
        hand_over(rank, text, code)


def _say_interrupted(ended: Ended, signum: int, console: Console) -> None:
    job = ended.job
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


def _note_strangers(ended: Ended, console: Console) -> None:
    """Say so if ranks that use torch have not joined each other: then each has done the whole work alone."""
    job = ended.job
    stages = {rank.stage for rank in ended.ranks}
    joined = Stage.ENDED in stages
    if job.quiet or job.ranks == 1 or job.mpi is not None or joined or stages == {Stage.STARTED}:
        return
    local = "" if job.pass_local_rank else "; a script that takes --local_rank wants phalanx run --pass-local-rank"
    console.say(
        f"note: none of the {job.ranks} ranks joined the others, so each did the whole work by itself. A script joins "
        f"with phalanx.init() or torch.distributed.init_process_group(){local}"
    )
