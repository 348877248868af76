"""What is said of a mistake or a fault on backend mpi whose ranks are on two hosts, held against golden texts.

The launcher is on neither host, and knows both by the connections of the ranks' keepers.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.launch_support import wait_for
from tests.mpi.environments import MpiEnvironment
from tests.mpi.over_hosts import hosts, remote
from tests.mpi.test_told_mpi import GIVEN_UP_S, MISTAKES_OVER_MPI
from tests.support.faults import (
    CUT_OVER_TORCHS,
    ENDS,
    KILLED_WITHIN,
    LATE,
    MISSING,
    MISTAKES_FOR_ALL,
    PASSES,
    UNUSED,
    known_of,
    told_by,
)
from tests.support.golden import await_told, block_of, check_told, warnings_of, without_frames
from tests.support.hosts import why_no_hosts
from tests.support.lateness import Lateness
from tests.support.remote import RemoteLauncher

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

BESIDE_2, BESIDE_0 = "h0:1,h1:2", "h0:2,h1:1"  # rank 1 differs, and has another rank beside it on one host or the other


def host_of_1(where: str) -> str:
    return "h1" if where == BESIDE_2 else "h0"


def check_block_of_1(mpi: MpiEnvironment, how: str, where: str, block: str, known: Mapping[str, object]) -> None:
    """What the launcher says when rank 1 has ended. Open MPI itself ends a rank whose connection to another breaks."""
    elsewhere = 0 if where == BESIDE_2 else 2
    facts = {**known, "host": host_of_1(where), "elsewhere": elsewhere, "beside": 2 - elsewhere}
    check_told(f"{how}.{'open-mpi' if mpi.is_openmpi and how != 'raises' else 'mpi'}.launcher", block, facts)


def test_every_rank_of_both_hosts_says_which_calls_differ_or_who_did_not_come(remote: RemoteLauncher) -> None:
    script = remote.script(MISTAKES_OVER_MPI)
    job = remote.run("-H", BESIDE_2, script, str(remote.folder))
    assert job.process.returncode != 0, job.said()  # MPI cannot end in order when a call was given up
    facts = {**known_of(remote.folder, script, MISTAKES_OVER_MPI, 3), "host": "h1"}
    for row in MISTAKES_FOR_ALL:
        for told in told_by(remote.folder, row, [0, 1, 2]):
            check_told(row, told, facts)
    (of_other_host,), (of_same_host,) = told_by(remote.folder, "late", [0]), told_by(remote.folder, "late", [2])
    check_told("late.mpi.hosts", of_other_host, facts)
    check_told("late.mpi", of_same_host, facts)


@pytest.mark.parametrize("row", ["swapped", "skipped"])
@pytest.mark.parametrize("where", [BESIDE_2, BESIDE_0])
def test_equal_calls_that_do_not_belong_together_are_warned_of(remote: RemoteLauncher, row: str, where: str) -> None:
    script = remote.script(PASSES)
    job = remote.run("-H", where, "-q", "--warn-after", "0", script, str(remote.folder), "mpi", row)
    assert job.process.returncode == 0, job.said()
    (warning,) = warnings_of(job.err).values()
    check_told(f"{row}.run.warning", warning, known_of(remote.folder, script, PASSES, 3))


@pytest.mark.parametrize("row", ["swapped", "skipped"])
def test_with_strict_the_job_fails_with_both_calls(remote: RemoteLauncher, row: str) -> None:
    script = remote.script(PASSES)
    job = remote.run("-H", BESIDE_2, "-q", "--strict", script, str(remote.folder), "mpi", row)
    assert job.process.returncode == 1, job.said()
    block = without_frames(block_of(job.err))
    first = re.match(r"phalanx: rank (\d)", block)
    assert first is not None, block
    facts = {**known_of(remote.folder, script, PASSES, 3), "host": "h0" if first[1] == "0" else "h1"}
    check_told(f"{row}.strict.launcher", block, facts)


def test_parameters_that_a_rank_leaves_unused_are_named(remote: RemoteLauncher) -> None:
    script = remote.script(UNUSED)
    job = remote.run("-H", BESIDE_2, script, str(remote.folder), "mpi")
    assert job.process.returncode == 1, job.said()
    facts = {**known_of(remote.folder, script, UNUSED, 3), "host": "h1"}
    check_told("unused.rank-1", told_by(remote.folder, "unused", [1])[0], facts)


@pytest.mark.parametrize("where", [BESIDE_2, BESIDE_0])
def test_at_the_timeout_a_rank_beside_a_stopped_one_says_that_it_is(remote: RemoteLauncher, where: str) -> None:
    """The first rank that fails ends the job; one on the other host cannot see why the stopped one does not come."""
    script = remote.script(ENDS)
    job = remote.run("-H", where, script, str(remote.folder), "mpi", "stopped")
    assert job.process.returncode == 1, job.said()
    facts = {**known_of(remote.folder, script, ENDS, 3), "host": host_of_1(where)}
    beside, elsewhere = (2, 0) if where == BESIDE_2 else (0, 2)
    of_beside, of_elsewhere = (told_by(remote.folder, "stopped", [rank])[0] for rank in (beside, elsewhere))
    assert of_beside or of_elsewhere, job.said()
    if of_beside:
        check_told("stopped.mpi", of_beside, facts)
    if of_elsewhere:
        check_told("stopped.mpi.hosts", of_elsewhere, facts)


@pytest.mark.parametrize("where", [BESIDE_2, BESIDE_0])
def test_a_rank_that_computes_or_is_stopped_is_named_with_its_host(remote: RemoteLauncher, where: str) -> None:
    script = remote.script(LATE)
    job = remote.start("-H", where, "-q", "--warn-after", "0.5", script, str(remote.folder), "mpi")

    def await_line(golden: str) -> None:
        facts = lambda: {**known_of(remote.folder, script, LATE, 3), "on host": f" on {host_of_1(where)}"}  # noqa: E731
        await_told(golden, lambda: job.err, facts, lambda: job.process.poll() is not None)

    await_line("waits-computes")
    (remote.folder / "go").touch()
    await_line("waits-stopped")
    os.kill(remote.wait_for_process(int(host_of_1(where)[1]), "rank-1"), signal.SIGCONT)
    assert job.finish() == 0, job.said()


def test_a_rank_that_does_not_join_is_named_with_its_host(remote: RemoteLauncher) -> None:
    script = remote.script(MISSING)
    arguments = ("--warn-after", "0.5", "--grace", "60", script, str(remote.folder), "mpi", str(GIVEN_UP_S))
    job = remote.start("-H", BESIDE_2, "-q", *arguments)
    where = {"on host": " on h1 (local rank 1)", "where": " (h1, local rank 1)", "timeout": GIVEN_UP_S}
    facts = lambda: {**known_of(remote.folder, script, MISSING, 3), **where}  # noqa: E731
    await_told("waits-join", lambda: job.err, facts, lambda: job.process.poll() is not None)
    assert job.finish() == 1, job.said()
    for told in told_by(remote.folder, "missing", [0, 1]):
        check_told("missing.run", told, facts())


@pytest.mark.parametrize("where", [BESIDE_2, BESIDE_0])
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_the_launcher_names_the_rank_that_ended_and_its_host(
    remote: RemoteLauncher, mpi: MpiEnvironment, how: str, where: str
) -> None:
    script = remote.script(ENDS)
    job = remote.run("-H", where, script, str(remote.folder), "mpi", how)
    assert job.process.returncode == (1 if how == "raises" else 128 + signal.SIGKILL), job.said()
    check_block_of_1(mpi, how, where, block_of(job.err), known_of(remote.folder, script, ENDS, 3))


@pytest.mark.parametrize("where", [BESIDE_2, BESIDE_0])
def test_the_launcher_says_what_a_rank_was_in_when_it_was_killed(
    remote: RemoteLauncher, mpi: MpiEnvironment, where: str
) -> None:
    script = remote.script(KILLED_WITHIN)
    job = remote.run("-H", where, script, str(remote.folder), "mpi")
    assert job.process.returncode == 128 + signal.SIGKILL, job.said()
    check_block_of_1(mpi, "within", where, block_of(job.err), known_of(remote.folder, script, KILLED_WITHIN, 3))


@pytest.mark.parametrize("cut", [1, 0])
def test_a_link_that_is_cut_is_said_with_the_host_behind_it(remote: RemoteLauncher, cut: int) -> None:
    """Of all ranks there, although the launcher hears of the ranks' keepers one by one."""
    cut_and_check(remote, cut)


@pytest.mark.fault
@pytest.mark.parametrize("warn_after_s", ["5", "1"])
def test_a_link_that_is_cut_is_said_in_time(remote: RemoteLauncher, warn_after_s: str) -> None:
    """Also if the launcher asks that host meanwhile why ranks wait."""
    with Lateness() as lateness:
        taken_s = cut_and_check(remote, 1, "--warn-after", warn_after_s)
    print(f"{taken_s:.2f} s after the cut the job had ended")
    assert taken_s <= 5.0 * lateness.factor(0.99)


@pytest.mark.fault
def test_a_host_of_which_all_processes_are_stopped_is_said_in_time(remote: RemoteLauncher) -> None:
    """The job can be ended all the same; what MPI has started there ends when somebody lets it go on."""
    script = remote.script(CUT_OVER_TORCHS)
    job = remote.start("-H", BESIDE_2, "-q", script, str(remote.folder), "mpi")
    wait_for(lambda: is_ready(remote.folder) or job.process.poll() is not None, complaint=job.said)
    there = [pid for pid in remote.hosts.processes(1) if pid != remote.hosts.holder(1)]
    with Lateness() as lateness:
        for pid in there:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        line = re.compile(r"^phalanx: ranks 1-2 on h1 are stopped \(state T\)[,;] .*rank 0 waits for them in .*", re.M)
        wait_for(lambda: line.search(job.err) is not None or job.process.poll() is not None, complaint=job.said)
        taken_s = time.monotonic() - began
    assert line.search(job.err), job.said()
    print(f"{taken_s:.2f} s after the stop it was said")
    assert taken_s <= 5.0 * lateness.factor(0.99)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 128 + signal.SIGTERM, job.said()
    for pid in there:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def cut_and_check(remote: RemoteLauncher, cut: int, *options: str) -> float:
    """Cut off a host with two of three ranks, and check what is said; how long it took until the job had ended."""
    where, alone = (BESIDE_2, 0) if cut == 1 else (BESIDE_0, 2)
    script = remote.script(CUT_OVER_TORCHS)
    job = remote.start("-H", where, *options, script, str(remote.folder), "mpi")
    wait_for(lambda: is_ready(remote.folder) or job.process.poll() is not None, complaint=job.said)
    remote.hosts.cut(cut)
    began = time.monotonic()
    assert job.finish() == 1, job.said()
    taken_s = time.monotonic() - began
    remote.hosts.mend(cut)
    first, second = (rank for rank in range(3) if rank != alone)
    known = known_of(remote.folder, script, CUT_OVER_TORCHS, 3)
    facts = {"host": f"h{cut}", "first": first, "second": second, "alone": alone, "pid first": known[f"pid {first}"]}
    check_told("cut.mpi.launcher", block_of(job.err), facts)
    assert "ended (signal" not in job.err, job.said()  # nobody can know that
    return taken_s


def is_ready(folder: Path) -> bool:
    return len(list(folder.glob("ready-*"))) == 3
