"""How a job ended, in words: what the supervisor prints when no rank is left, and the exit code of ``phalanx run``."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.launch.job.job import Job
from phalanx.launch.output.failure import Failure, find_cause, format_failure, signal_name
from phalanx.launch.output.logs import Console
from phalanx.launch.output.stacks import format_places
from phalanx.launch.rank.trace import Stage
from phalanx.words import format_named

__all__ = ["UNWRITABLE", "Ended", "conclude"]

# The exit code when the ranks' output cannot be written (EX_IOERR).
UNWRITABLE = 74


@dataclass(frozen=True)
class Ended:
    """What is known of a job that has ended.

    Attributes:
        failures: the ranks that did not end well.
        hosts: the host of each rank.
        started_at: when the ranks were started, on the monotonic clock; None if none was.
        interrupted: the signal with which somebody ended the job; None if nobody did.
        stacks: where the ranks were when it came, by rank, as faulthandler writes it.
        overdue: the ranks that were killed because they did not end in time, by how long they had.
        refusal: why the job could not be started or watched, as it is printed, with the exit code; None if it could.
        stages: how far each rank came.
        out_of_memory: the kernel's out-of-memory killer ended a process during the job.
        asked: what each rank had asked another process for last, and waited for.
    """

    failures: Sequence[Failure]
    hosts: Sequence[str]
    started_at: float | None
    interrupted: int | None
    stacks: Mapping[int, str]
    overdue: Mapping[float, Sequence[int]]
    refusal: tuple[str, int] | None
    stages: Sequence[Stage] = field(default=())
    out_of_memory: bool = False
    asked: Sequence[str] = field(default=())


def conclude(job: Job, ended: Ended, console: Console) -> int:
    """Print how the job ended, unless all ranks ended well and joined each other; return the exit code."""
    code = _conclude(job, ended, console)
    for patience_s, ranks in ended.overdue.items():
        console.say(
            f"{format_named('rank', ranks)} did not end within {patience_s:g} s and "
            f"{'was' if len(ranks) == 1 else 'were'} killed; --grace gives ranks longer"
        )
    return code


def _conclude(job: Job, ended: Ended, console: Console) -> int:
    if ended.interrupted is not None:
        _say_interrupted(job, ended, ended.interrupted, console)
        return 128 + ended.interrupted
    for name, sink in (("standard output", console.out), ("standard error", console.err)):
        if sink.fault:
            console.say(f"{name} cannot be written: {sink.fault}; the job was ended")
            return UNWRITABLE
    if console.out.closed or console.err.closed:
        return 128 + signal.SIGPIPE
    if ended.refusal is not None:
        text, code = ended.refusal
        console.err.write(text.encode(errors="backslashreplace"))
        return code
    if not ended.failures:
        _note_strangers(job, ended, console)
        return 0
    cause = find_cause(ended.failures)
    block = format_failure(
        cause,
        [failure for failure in ended.failures if failure is not cause],
        ranks=job.ranks,
        host=ended.hosts[cause.rank],
        started=ended.started_at or 0.0,
        out_of_memory=ended.out_of_memory,
        asked=ended.asked[cause.rank] if ended.asked else "",
    )
    console.err.write(block.encode(errors="backslashreplace"))
    return cause.exit_code


def _say_interrupted(job: Job, ended: Ended, signum: int, console: Console) -> None:
    if not ended.started_at:
        console.say(f"{signal_name(signum)}: nothing had been started")
        return
    whose = f"all {job.ranks} ranks have" if job.ranks > 1 else "the rank has"
    places = [] if job.quiet else format_places(ended.stacks)
    lines = [f"{signal_name(signum)}: {whose} been ended{', and had been at' if places else ''}"]
    console.say("\n  ".join(lines + places))


def _note_strangers(job: Job, ended: Ended, console: Console) -> None:
    """Say so if ranks that use torch have not joined each other: then each has done the whole work alone."""
    stages = set(ended.stages)
    if job.quiet or job.ranks == 1 or job.mpi is not None or Stage.JOINED in stages or stages == {Stage.STARTED}:
        return
    local = "" if job.pass_local_rank else "; a script that takes --local_rank wants phalanx run --pass-local-rank"
    console.say(
        f"note: none of the {job.ranks} ranks joined the others, so each did the whole work by itself. A script joins "
        f"with phalanx.init() or torch.distributed.init_process_group(){local}"
    )
