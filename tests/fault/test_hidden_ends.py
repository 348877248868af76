"""A rank ends while the process that has to say so is stopped (SIGSTOP) or hangs: the job ends, and says of what."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from tests.launch_support import Launcher, Outcome, RunningJob, launcher, wait_for
from tests.support.stuck_zygote import STUCK
from tests.support.waiting import stop

__all__ = ["launcher"]

SOON_S = 100.0  # far below the time for which the ranks wait if nobody ends them
WAITS = ("sh", "-c", "echo $RANK $$; exec sleep 300")
MEETS = """
    import os, signal, phalanx.errors, torch
    world = phalanx.init()
    world.all_reduce(torch.ones(1))
    print(world.rank, os.getpid(), flush=True)
    if world.rank == 1:
        signal.pause()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher may ask it to end before it has raised
    try:
        world.all_reduce(torch.ones(1))
    except phalanx.errors.PeerLost as error:
        print(world.rank, "raised", error, flush=True)
        raise
"""


def start(launcher: Launcher, size: int, *command: str, **environment: str) -> tuple[RunningJob, list[int]]:
    """A job of so many ranks, each of which has printed its rank and its process id; and the ids, by rank."""
    job = launcher.start("-n", str(size), "-q", "--grace", "250", *command, environment=environment)
    return job, pids_of(job, size)


def pids_of(job: RunningJob, size: int) -> list[int]:
    return [int(line.split()[-1]) for line in job.read_lines(size)]


def assert_killed(job: RunningJob, pid: int, size: int) -> Outcome:
    outcome = job.finish(SOON_S)
    assert outcome.code == 128 + signal.SIGKILL, outcome.err_text
    assert f"phalanx: rank 1 of {size} failed\n" in outcome.err_text
    assert f"pid {pid}, " in outcome.err_text
    assert "ended by signal 9 (SIGKILL)" in outcome.err_text
    job.wait_until_gone(SOON_S)
    return outcome


def test_survivors_raise_while_the_zygote_is_stopped(launcher: Launcher) -> None:
    size = 3
    job, pids = start(launcher, size, launcher.script(MEETS))
    stop(job.named("phalanx-zygote"))
    os.kill(pids[1], signal.SIGKILL)
    outcome = assert_killed(job, pids[1], size)
    lost = f"raised rank 1 of the group (pid {pids[1]} on {os.uname().nodename}) has ended by signal 9 (SIGKILL)"
    survivors = [rank for rank in range(size) if rank != 1]
    said = sorted(outcome.out_lines)
    assert len(said) == len(survivors), said
    for rank, line in zip(survivors, said, strict=True):
        assert line.startswith(f"[rank {rank}] {rank} {lost}")


def test_ranks_that_end_well_end_the_job_while_the_zygote_is_stopped(launcher: Launcher) -> None:
    job = launcher.start("-n", "3", "-q", "sh", "-c", "echo up; exec cat", stdin=subprocess.PIPE)
    job.read_lines(3)
    stop(job.named("phalanx-zygote"))
    outcome = job.finish(SOON_S)  # which closes the input
    assert (outcome.code, outcome.err) == (0, b"")


def test_the_next_attempt_starts(launcher: Launcher) -> None:
    size = 3
    script = launcher.script("""
        import os, signal
        print(os.environ["RANK"], os.getpid(), flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            signal.pause()
    """)
    job = launcher.start("-n", str(size), "-q", "--restarts", "1", script)
    pids = pids_of(job, size)
    stop(job.named("phalanx-zygote"))
    os.kill(pids[1], signal.SIGKILL)
    outcome = job.finish(SOON_S)
    assert outcome.code == 0, outcome.err_text
    assert f"phalanx: rank 1 of {size} failed\n" in outcome.err_text
    assert len(outcome.out_lines) == size


def test_a_stopped_zygote_stays_so_while_all_ranks_run(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "-q", "sh", "-c", "echo up; while :; do echo on; sleep 0.05; done")
    job.read_lines(2)
    zygote = job.named("phalanx-zygote")
    stop(zygote)
    job.read_lines(60)  # a second and a half long
    assert state(zygote) == "T"
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(SOON_S).code == 128 + signal.SIGTERM


def test_a_suspended_job_stays_so_although_a_rank_ends(launcher: Launcher) -> None:
    job, pids = start(launcher, 3, *WAITS)
    suspended = [pid for pid in job.processes() if pid != pids[1]]
    for pid in suspended:
        stop(pid)
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: state(pids[1]) == "Z")
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(2.0)
    assert {state(pid) for pid in suspended} == {"T"}
    for pid in suspended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert_killed(job, pids[1], 3)


def test_a_zygote_that_never_answers_is_given_up(launcher: Launcher, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "sitecustomize.py").write_text(STUCK)
    job, pids = start(launcher, 3, *WAITS, PYTHONPATH=str(changed))
    zygote = job.named("phalanx-zygote")
    os.kill(pids[1], signal.SIGKILL)
    outcome = job.finish(SOON_S)
    assert outcome.code == 1, outcome.err_text
    said = outcome.err_text.splitlines()
    how = "does not answer (state S); the job ended with it"
    assert said[0] == f"phalanx: the process that starts and watches the ranks {how}"
    assert said[1] == "  rank 1 has ended, and for 1 s it has not said how, which nobody else can know"
    assert said[2].startswith(f"  host {os.uname().nodename}, pid {zygote}; ")
    job.wait_until_gone(SOON_S)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
