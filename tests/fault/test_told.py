"""What ranks and the launcher say when something breaks: on one host and two, on our backend and on Gloo."""

from __future__ import annotations

import os
import platform
import signal

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.faults import ENDS, told_by
from tests.support.golden import FOLDER, MOST_LINES, Job, block_of, check_facts, check_told, without_frames
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote
from tests.support.waiting import stop

__all__ = ["hosts", "launcher", "remote"]  # fixtures

HOST = platform.node()
PATIENT = "--grace 60"  # every rank has the time to say what it found
# The first line on ranks that wait is one of a stopped rank, which does not wait for this.
LATE = f"{PATIENT} --warn-after 600"


def test_no_golden_text_is_longer_than_a_user_reads() -> None:
    texts = {path.name: path.read_text() for path in FOLDER.glob("*.txt")}
    assert {name: text for name, text in texts.items() if len(without_frames(text).splitlines()) > MOST_LINES} == {}


def check_stopped_and_killed(job: Job, on: str) -> None:
    """Rank 1 is stopped, and named at once; then it is killed."""
    while not all((job.folder / f"done-{rank}").exists() for rank in range(3)):
        assert job.process.poll() is None, job.said()
    stop(job.pid(1))
    waits = rf"ranks 0, 2 wait for it in all_reduce #2 at {job.at('call')}, for \d+ s now$"
    job.await_said(rf"^phalanx: rank 1{on} is stopped \(state T\), after all_reduce #1 at {job.at('before')}; {waits}")
    os.kill(job.pid(1), signal.SIGCONT)
    job.go()
    assert job.end() == 128 + signal.SIGKILL, job.said()
    assert job.said().count(" wait for it ") == 1, job.said()


def test_a_rank_that_is_stopped_and_then_killed_is_named(launcher: Launcher) -> None:
    """At once when it is stopped; and by every survivor, and by the launcher, when it has been killed."""
    job = Job(launcher, ENDS, "phalanx", "killed", options=LATE)
    check_stopped_and_killed(job, "")
    for told in told_by(job.folder, [0, 2]):
        check_facts(
            told,
            rf"PeerLost: rank 1 of the group \(pid {job.pid(1)} on {HOST}\) has ended by signal 9 \(SIGKILL\) "
            rf"while rank [02] was in all_reduce\(float32\[4\], sum\) at {job.at('call')}\. ",
            rf"last operation was all_reduce #1 \(float32, 16 B, sum\) at {job.at('before')}\. ",
        )
    check_told("killed.launcher", block_of(job.said()), job.known(HOST))


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
def test_a_rank_of_another_host_that_was_killed_is_named_with_it(remote: RemoteLauncher) -> None:
    """Rank 1 has a survivor beside it, which knows more of its end than the one on the other host."""
    job = Job(remote, ENDS, "phalanx", "killed", options=f"{PATIENT} -H h0:1,h1:2")
    job.go()
    assert job.end() == 128 + signal.SIGKILL, job.said()
    known = job.known("h1")
    signalled, did = r" by signal 9 \(SIGKILL\)", r"Its last operation was all_reduce #1 .*"
    for rank, told in zip((0, 2), told_by(job.folder, [0, 2]), strict=True):
        check_facts(
            told,
            rf"^phalanx\.errors\.PeerLost: rank 1 of the group \(pid {known['pid 1']} on h1\) has ended"
            rf"({signalled}){'?' if rank == 0 else ''} "
            rf"while rank {rank} was in all_reduce\(float32\[4\], sum\) at {job.at('call')}\. "
            rf"({did}){'?' if rank == 0 else ''}",
        )
    check_told("killed.hosts.launcher", block_of(job.said()), known)


def test_a_rank_that_raised_is_named_with_its_line(launcher: Launcher) -> None:
    job = Job(launcher, ENDS, "phalanx", "raises", options=PATIENT)
    assert job.end() == 1
    for told in told_by(job.folder, [0, 2]):
        where = rf"PeerLost: rank 1 of the group \(pid {job.pid(1)} on {HOST}\) "
        check_facts(
            told,
            rf"{where}has failed \(ValueError: no item 12 in data\.bin at {job.at('raise')}\) while rank [02] was in",
        )
    check_told("raises.launcher", block_of(job.said()), job.known(HOST))


def test_calls_that_differ_are_told_once_with_the_launchers_paths(launcher: Launcher) -> None:
    """Also after the script has left the folder of the launch for one that has a file of the same name."""
    elsewhere = launcher.directory / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "script.py").write_text("")
    text = ENDS.replace("dist.init_process_group(", f"os.chdir({str(elsewhere)!r}); dist.init_process_group(")
    job = Job(launcher, text, "phalanx", "size", options=PATIENT)
    assert job.end() == 1
    for told in told_by(job.folder, [0, 1, 2]):
        check_facts(told, rf"^  rank 1: all_reduce\(float32\[8\], sum\) at {job.at('call')}$")
    check_told("size.launcher", block_of(job.said()), job.known(HOST))


def test_a_rank_killed_within_a_call_over_gloo_is_told_with_it(launcher: Launcher) -> None:
    job = Job(launcher, ENDS, "gloo", "within", options=PATIENT)
    assert job.end() == 128 + signal.SIGKILL, job.said()
    check_facts(
        block_of(job.said()),
        "^phalanx: rank 1 of 3 failed$",
        rf"^  host {HOST}, pid {job.pid(1)}, [\d.]+ s after the start, ended by signal 9 \(SIGKILL\)$",
        rf"^  it was in all_reduce #2 \(float32, 16 B, sum\) at {job.at('call')}, for [\d.]+ s$",
        "^  another process killed it; if none did, look for an out-of-memory kill with: dmesg",
    )


@pytest.mark.parametrize("how", ["stopped", pytest.param("leaves", marks=pytest.mark.long)])
def test_the_launcher_says_what_a_missing_rank_over_gloo_did(launcher: Launcher, how: str) -> None:
    """All that the others know is that a connection has ended, or a timeout is over."""
    job = Job(launcher, ENDS, "gloo", how, options=f"{PATIENT} --warn-after 0.8")
    assert job.end() == 1, job.said()
    state = r"was stopped \(state T\)" if how == "stopped" else r"ended \(exit code 0\)"
    check_facts(
        block_of(job.said()),
        "^phalanx: rank [02] of 3 failed: RuntimeError: ",
        rf"^  rank 1, which {state}, had not come to all_reduce #2 at {job.at('call')}; "
        rf"its last operation was all_reduce #1 \(float32, 16 B, sum\) at {job.at('before')}$",
    )
