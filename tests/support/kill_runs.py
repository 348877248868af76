"""One case of the kill matrix: start the job, strike, end it if it must go on, and compare what came of it.

What differs between places, such as how a job is started and where its zygote is, is the matrix's own test's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from .kill_cases import Case, Right, what_is_right
from .remote import RemoteJob
from .waiting import soon

__all__ = ["PROGRAM", "run_case"]

PROGRAM = Path(__file__).with_name("kill_program.py")
PATIENCE_S = 200.0  # no busy machine needs as long
SOON_S = 30.0  # for what takes 0.2 s to 5 s on a quiet machine; the timeout of the groups is far from it
GOES_ON_S = 1.0  # a job that must not end is looked at for so long

Start = Callable[[Sequence[str]], RemoteJob]
Find = Callable[[RemoteJob], int]


def run_case(
    case: Case, folder: Path, start: Start, find_victim: Find, *, waits_in_mpi: bool = False
) -> dict[str, float]:
    """Run it, and fail with everything that was said unless it ends as it should.

    Args:
        case: which one.
        folder: an empty folder that all ranks see.
        start: starts ``phalanx run`` with these arguments.
        find_victim: the process of the launcher or the zygote.
        waits_in_mpi: see :func:`~tests.support.kill_cases.what_is_right`.

    Returns:
        How long after the fault, in seconds, the last survivor had its error (``named``) and the job ended (``ended``),
        as far as these have happened.
    """
    right = what_is_right(case, waits_in_mpi=waits_in_mpi)
    arguments = ["-n", str(case.world), "-q", str(PROGRAM), json.dumps(case.for_program(right)), str(folder)]
    job = start(arguments)
    try:
        assert soon(lambda: (folder / "fell").exists() or job.process.poll() is not None, PATIENCE_S), "nobody fell"
        assert (folder / "fell").exists(), "the job has ended before"
        fell = json.loads((folder / "fell").read_text())["at"]
        if not case.of_rank:
            os.kill(find_victim(job), case.signal)
        if right.end:
            end(job, right)
        assert soon(lambda: job.process.poll() is not None, SOON_S + right.timeout_s % 300), "the job does not end"
        ended_s = time.time() - fell
        assert job.process.returncode in right.codes
        assert says(right, job), f"{right.said} is not said"
        survivors = [rank for rank in range(case.world) if not (case.of_rank and rank == case.actor)]
        told = [check_survivor(case, right, folder, rank) for rank in survivors] if right.speaks_of_survivors else []
        named = [at - fell for at in told if at is not None]
    except AssertionError as error:
        pytest.fail(f"{case}, seed {case.seed}: {error}\nright: {right}\n{job.said()}\n{outcomes(folder)}")
    return {"ended": ended_s, **({"named": max(named)} if named else {})}


def end(job: RemoteJob, right: Right) -> None:
    """End a job that goes on, when it has said what it must, unless that is that it ends by itself."""
    if right.said:
        assert soon(lambda: says(right, job), SOON_S), f"{right.said} is not said"
    else:
        assert not soon(lambda: job.process.poll() is not None, GOES_ON_S), "the job has ended"
    if right.instead and soon(lambda: says_instead(right, job), 2 * right.timeout_s):
        return
    if right.end == "stop":
        command = [sys.executable, "-m", "phalanx", "stop", str(job.process.pid)]
        stopped = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert stopped.returncode == 0, stopped.stderr
        assert "is stopped (state T)" in stopped.stderr
    else:
        job.process.send_signal(signal.Signals[right.end])


def says(right: Right, job: RemoteJob) -> bool:
    """Whether it has said what it must."""
    return says_instead(right, job) or all(re.search(words, job.err) for words in right.said)


def says_instead(right: Right, job: RemoteJob) -> bool:
    return any(re.search(words, job.err) for words in right.instead)


def check_survivor(case: Case, right: Right, folder: Path, rank: int) -> float | None:
    """It has raised the right error in time; when, in seconds since the epoch. None if it may do without, and does."""
    file = folder / f"outcome-{rank}"
    if right.may_be_ended and not file.exists():
        return None
    assert file.exists(), f"rank {rank} was not told"
    told: dict[str, Any] = json.loads(file.read_text())
    if right.may_come_through and told["error"] is None:
        return None
    assert told["error"] in right.errors, f"rank {rank}: {told}"
    for words in right.words:
        assert re.search(words, told["text"]), f"rank {rank} is not told {words!r}: {told}"
    # Before there is a group, a rank has no number in it.
    name = "rank" if told["error"] == "InitializationError" else "group_rank"
    assert told[name] == case.actor, f"rank {rank}: {told}"
    if case.place == "two hosts" and case.host(rank) != case.host(case.actor):
        assert f"h{case.host(case.actor)}" in told["text"], f"rank {rank} is not told the host: {told}"
    fell = json.loads((folder / "fell").read_text())
    assert told["pid"] == fell["pid"], f"rank {rank} is told another process: {told}, {fell}"
    if right.timeout_s == 300:
        assert told["at"] - fell["at"] < SOON_S, f"rank {rank} is told late: {told}"
    at: float = told["at"]
    return at


def outcomes(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(folder.iterdir()))
