"""What is said of a mistake or a fault on backend mpi whose ranks are on two hosts.

The launcher is on neither host, and knows both by the connections of the ranks' keepers.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from tests.launch_support import wait_for
from tests.mpi.over_hosts import hosts, remote
from tests.mpi.test_told_mpi import GIVEN_UP_S, MISTAKES_OVER_MPI
from tests.support.faults import CUT_OVER_TORCHS, ENDS, KILLED_WITHIN, LATE, MISSING, PASSES, known_of, told_by
from tests.support.golden import await_facts, block_of, check_facts, check_mistakes, ending_of, warnings_of
from tests.support.hosts import why_no_hosts
from tests.support.lateness import Lateness
from tests.support.remote import RemoteLauncher

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

BESIDE_2, BESIDE_0 = "h0:1,h1:2", "h0:2,h1:1"  # rank 1 differs, and has another rank beside it on one host or the other


def host_of_1(where: str) -> str:
    return "h1" if where == BESIDE_2 else "h0"


def known(remote: RemoteLauncher, script: str, text: str, where: str = BESIDE_2) -> dict[str, object]:
    return {**known_of(remote.folder, script, text, 3), "host": host_of_1(where)}


def test_every_rank_says_which_calls_differ_or_who_did_not_come(remote: RemoteLauncher) -> None:
    script = remote.script(MISTAKES_OVER_MPI)
    job = remote.run("-H", BESIDE_2, script, str(remote.folder))
    assert job.process.returncode != 0, job.said()  # MPI cannot end in order when a call was given up
    check_mistakes(remote.folder, known(remote, script, MISTAKES_OVER_MPI), 3)
    check_facts(told_by(remote.folder, "late", [2])[0], r"which is at wait_for \(script\.py:\d+\)")


@pytest.mark.parametrize("where", [BESIDE_2, pytest.param(BESIDE_0, marks=pytest.mark.long)])
@pytest.mark.parametrize("strict", [False, True])
def test_equal_calls_that_do_not_belong_together_are_told(remote: RemoteLauncher, strict: bool, where: str) -> None:
    script = remote.script(PASSES)
    option = ("--strict",) if strict else ("--warn-after", "0")
    job = remote.run("-H", where, "-q", *option, script, str(remote.folder), "mpi", "skipped")
    assert job.process.returncode == strict, job.said()
    facts = known(remote, script, PASSES, where)
    lines = (facts["line often"], facts["line always"])
    pairs = [rf"script\.py:{line} was call #\d of rank \d and #\d of rank \d" for line in lines]
    if strict:
        check_facts(block_of(job.err), "^phalanx: rank [012] of 3 failed: phalanx.errors.CollectiveMismatch: ", *pairs)
    else:
        (warning,) = warnings_of(job.err).values()
        check_facts(warning, *pairs)


@pytest.mark.parametrize("where", [BESIDE_2, pytest.param(BESIDE_0, marks=pytest.mark.long)])
def test_at_the_timeout_a_rank_beside_a_stopped_one_says_that_it_is(remote: RemoteLauncher, where: str) -> None:
    """The first rank that fails ends the job; one on the other host cannot see why the stopped one does not come."""
    script = remote.script(ENDS)
    job = remote.run("-H", where, script, str(remote.folder), "mpi", "stopped")
    assert job.process.returncode == 1, job.said()
    facts = known(remote, script, ENDS, where)
    who = rf"^phalanx\.errors\.CollectiveTimeout: rank 1 of the group \(pid {facts['pid 1']} on {facts['host']}\)"
    beside, elsewhere = (2, 0) if where == BESIDE_2 else (0, 2)
    of_beside, of_elsewhere = (told_by(remote.folder, "stopped", [rank])[0] for rank in (beside, elsewhere))
    assert of_beside or of_elsewhere, job.said()
    if of_beside:
        check_facts(of_beside, rf"{who}, which was stopped \(state T\), did not", rf"kill -CONT {facts['pid 1']}\)")
    if of_elsewhere:
        check_facts(of_elsewhere, f"{who} did not come within 5 s while rank [02] was in all_reduce")


@pytest.mark.parametrize("where", [BESIDE_2, pytest.param(BESIDE_0, marks=pytest.mark.long)])
def test_a_rank_that_computes_or_is_stopped_is_named_with_its_host(remote: RemoteLauncher, where: str) -> None:
    script = remote.script(LATE)
    job = remote.start("-H", where, "-q", "--warn-after", "0.5", script, str(remote.folder), "mpi")
    who = f"^phalanx: rank 1 on {host_of_1(where)} is "
    computes = rf"{who}at script\.py:\d+ .*, in no operation; ranks 0, 2 wait for it in all_reduce #2 at "
    await_facts(lambda: job.err, lambda: job.process.poll() is not None, lambda: computes)
    (remote.folder / "go").touch()
    stopped = rf"{who}stopped \(state T\), after all_reduce #2 at .*; ranks 0, 2 wait for it in all_reduce #3 at "
    await_facts(lambda: job.err, lambda: job.process.poll() is not None, lambda: stopped)
    os.kill(remote.wait_for_process(int(host_of_1(where)[1]), "rank-1"), signal.SIGCONT)
    assert job.finish() == 0, job.said()


def test_rank_that_does_not_join_is_named_meanwhile_and_at_the_timeout(remote: RemoteLauncher) -> None:
    script = remote.script(MISSING)
    arguments = ("--warn-after", "0.5", "--grace", "60", script, str(remote.folder), "mpi", str(GIVEN_UP_S))
    job = remote.start("-H", BESIDE_2, "-q", *arguments)
    line = r"^phalanx: rank 2 on h1 .* is at script\.py:\d+ .*, in no operation yet; ranks 0-1 wait for it in init at "
    await_facts(lambda: job.err, lambda: job.process.poll() is not None, lambda: line)
    assert job.finish() == 1, job.said()
    for told in told_by(remote.folder, "missing", [0, 1]):
        check_facts(told, rf"after {GIVEN_UP_S} s rank 2 of 3 \(h1, local rank 1\) had not come; ")


@pytest.mark.parametrize("within", [False, True])
def test_the_launcher_names_the_rank_that_was_killed_and_its_host(remote: RemoteLauncher, within: bool) -> None:
    """Open MPI itself ends a rank whose connection to another breaks, so of the others nothing is asked here."""
    text = KILLED_WITHIN if within else ENDS
    script = remote.script(text)
    job = remote.run("-H", BESIDE_2, script, str(remote.folder), "mpi", "killed")
    assert job.process.returncode == 128 + signal.SIGKILL, job.said()
    facts = known(remote, script, text)
    call = rf"its last operation, all_reduce #1 \(float32, 16 B, sum\) at script\.py:{facts['line before']}, was done"
    if within:
        call = rf"it was in all_reduce #2 \(float32, 16\.0 MiB, sum\) at script\.py:{facts['line call']}, for "
    check_facts(block_of(job.err), "^phalanx: rank 1 of 3 failed$", ending_of(facts), f"^  {call}")


def test_the_launcher_names_the_rank_that_raised_and_its_host(remote: RemoteLauncher) -> None:
    script = remote.script(ENDS)
    job = remote.run("-H", BESIDE_2, script, str(remote.folder), "mpi", "raises")
    assert job.process.returncode == 1, job.said()
    facts = known(remote, script, ENDS)
    host = rf"^  host h1, pid {facts['pid 1']}, [\d.]+ s after the start, exit code 1$"
    check_facts(block_of(job.err), "^phalanx: rank 1 of 3 failed: ValueError: no item 12", host)


@pytest.mark.parametrize("cut", [1, pytest.param(0, marks=pytest.mark.long)])
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
    pid = known_of(remote.folder, script, CUT_OVER_TORCHS, 3)[f"pid {first}"]
    check_facts(
        block_of(job.err),
        f"^phalanx: rank {first} of 3 failed: host h{cut} is lost: it has failed, or its network has$",
        rf"^  host h{cut}, pid {pid}, [\d.]+ s after the start, ",
        f"^  rank {second} then failed with the same error\n  rank {alone} ended by the launcher$",
    )
    assert "ended (signal" not in job.err, job.said()  # nobody can know that
    return taken_s


def is_ready(folder: Path) -> bool:
    return len(list(folder.glob("ready-*"))) == 3
