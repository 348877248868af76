"""What every rank and the launcher say when something breaks in a job on two hosts, held against golden texts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from tests.launch_support import wait_for
from tests.support.faults import (
    CUT,
    ENDS,
    KILLED_WITHIN,
    LATE,
    LEAVES,
    MISTAKES,
    MISTAKES_FOR_ALL,
    UNUSED,
    known_of,
    told_by,
)
from tests.support.golden import await_told, block_of, check_told
from tests.support.hosts import why_no_hosts
from tests.support.remote import PATIENCE_S, RemoteLauncher, hosts, remote

from phalanx.system.processes import state_of

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

HOSTS = "h0:1,h1:2"  # rank 1 has a survivor beside it, and one on the other host


def known(remote: RemoteLauncher, script: str, text: str) -> dict[str, object]:
    return {**known_of(remote.folder, script, text, 3), "host": "h1"}


def names_on(remote: RemoteLauncher, host: int) -> list[str]:
    """The names of the processes that run on a host."""
    names = []
    for pid in remote.hosts.processes(host):
        with contextlib.suppress(OSError):  # it has ended
            names.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return names


def test_every_rank_says_which_calls_differ_or_who_did_not_come(remote: RemoteLauncher) -> None:
    script = remote.script(MISTAKES)
    job = remote.run("-H", HOSTS, script, str(remote.folder))
    assert job.process.returncode == 0, job.said()
    facts = known(remote, script, MISTAKES)
    for row in MISTAKES_FOR_ALL:
        for told in told_by(remote.folder, row, [0, 1, 2]):
            check_told(row, told, facts)
    for rank in (0, 2):
        (told,) = told_by(remote.folder, "late", [rank])
        check_told("late.hosts", told, {**facts, "rank": rank})


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_every_survivor_names_the_rank_that_ended(remote: RemoteLauncher, how: str) -> None:
    script = remote.script(ENDS)
    job = remote.run("-H", HOSTS, "--grace", "60", script, str(remote.folder), "phalanx", how)
    assert job.process.returncode != 0
    facts = known(remote, script, ENDS)
    check_told(f"{how}.hosts.launcher", block_of(job.err), facts)
    for rank in (0, 2):
        (told,) = told_by(remote.folder, how, [rank])
        beside = ".beside" if how == "killed" and rank == 2 else ""  # it knows more of one that cannot say it any more
        check_told(f"{how}.hosts{beside}", told, {**facts, "rank": rank})


@pytest.mark.parametrize("where", ["h0:1,h1:1", HOSTS])
def test_every_survivor_names_a_rank_that_was_killed_within_their_call(remote: RemoteLauncher, where: str) -> None:
    script = remote.script(KILLED_WITHIN)
    job = remote.run("-H", where, "--grace", "60", script, str(remote.folder), "phalanx")
    assert job.process.returncode != 0
    size = 3 if where == HOSTS else 2
    facts = {**known_of(remote.folder, script, KILLED_WITHIN, size), "host": "h1"}
    for rank in (0, 2)[: size - 1]:
        (told,) = told_by(remote.folder, "within", [rank])
        check_told(f"within.hosts{'.beside' if rank == 2 else ''}", told, {**facts, "rank": rank})
    check_told("within.hosts.launcher", block_of(job.err), facts)


def test_every_survivor_says_at_the_timeout_that_a_rank_is_stopped(remote: RemoteLauncher) -> None:
    script = remote.script(ENDS)
    job = remote.run("-H", HOSTS, "--grace", "60", script, str(remote.folder), "phalanx", "stopped")
    assert job.process.returncode == 1, job.said()
    for rank in (0, 2):
        (told,) = told_by(remote.folder, "stopped", [rank])
        check_told("stopped.hosts", told, {**known(remote, script, ENDS), "rank": rank})


def test_parameters_that_a_rank_leaves_unused_are_named_on_every_rank(remote: RemoteLauncher) -> None:
    script = remote.script(UNUSED)
    job = remote.run("-H", HOSTS, "--grace", "60", script, str(remote.folder), "phalanx")
    assert job.process.returncode == 1, job.said()
    facts = known(remote, script, UNUSED)
    for rank in (0, 2):
        (told,) = told_by(remote.folder, "unused", [rank])
        assert told, job.said()
        check_told("unused.hosts", told, {**facts, "rank": rank})
    check_told("unused.rank-1", told_by(remote.folder, "unused", [1])[0], facts)


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_rank_that_computes_or_is_stopped_is_named_with_its_host(remote: RemoteLauncher, backend: str) -> None:
    script = remote.script(LATE)
    job = remote.start("-H", HOSTS, "-q", "--warn-after", "0.5", script, str(remote.folder), backend)

    def await_line(golden: str) -> None:
        facts = lambda: {**known(remote, script, LATE), "on host": " on h1"}  # noqa: E731
        await_told(golden, lambda: job.err, facts, lambda: job.process.poll() is not None)

    await_line("waits-computes")
    (remote.folder / "go").touch()
    await_line("waits-stopped")
    (stopped,) = [pid for pid in remote.hosts.processes(1) if state_of(pid) == "T"]
    os.kill(stopped, signal.SIGCONT)
    assert job.finish() == 0, job.said()


def test_a_process_that_a_rank_leaves_is_ended_with_it_and_nothing_is_said(remote: RemoteLauncher) -> None:
    script = remote.script(LEAVES)
    job = remote.start("-H", HOSTS, "-q", script, str(remote.folder))
    wait_for(lambda: (remote.folder / "left").exists() or job.process.poll() is not None, complaint=job.said)
    # Rank 0 stays until it is gone, so it is the rank's end that ends it, not the job's.
    wait_for(lambda: "left-behind" not in names_on(remote, 1), complaint=job.said)
    assert job.process.poll() is None, job.said()
    (remote.folder / "gone").touch()
    assert job.finish() == 0, job.said()
    assert job.err == ""


def test_both_sides_of_a_cut_name_the_other_host(remote: RemoteLauncher) -> None:
    """The launcher reaches both: an agent that loses it ends its ranks, on a busy machine before they say anything."""
    script = remote.script(CUT)
    job = remote.start("-H", HOSTS, "--grace", "60", script, str(remote.folder))
    until = time.monotonic() + PATIENCE_S
    while len(list(remote.folder.glob("ready-*"))) < 3:
        assert time.monotonic() < until, job.said()
        time.sleep(0.01)
    remote.hosts.part()
    while not all((remote.folder / f"cut-{rank}").exists() for rank in range(3)):
        assert time.monotonic() < until, job.said()
        time.sleep(0.01)
    remote.hosts.mend()
    job.finish()
    facts = known(remote, script, CUT)
    check_told("cut", told_by(remote.folder, "cut", [0])[0], facts)
    for rank in (1, 2):
        check_told("cut.other-side", told_by(remote.folder, "cut", [rank])[0], {**facts, "rank": rank})
    block = block_of(job.err)
    told = re.match(r"phalanx: rank (\d) (?s:.*)^  ranks .*, rank (\d) with ", block, re.MULTILINE)
    assert told is not None, block
    first, then = map(int, told.groups())
    # Which rank is the first to say it, and which of the others is quoted, the moment decides.
    of_first = {"first": first, "pid": facts[f"pid {first}"], "others": ["1-2", "0, 2", "0-1"][first], "then": then}
    golden = "cut.launcher.h0" if first == 0 else "cut.launcher.h1"
    check_told(golden, block, {**facts, **of_first})
