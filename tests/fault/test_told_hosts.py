"""What every rank and the launcher say when something breaks in a job on two hosts, held against golden texts."""

from __future__ import annotations

import time

import pytest
from tests.support.faults import CUT, ENDS, MISTAKES, MISTAKES_FOR_ALL, known_of, told_by
from tests.support.golden import block_of, check_told
from tests.support.hosts import why_no_hosts
from tests.support.remote import PATIENCE_S, RemoteLauncher, hosts, remote

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

HOSTS = "h0:1,h1:2"  # rank 1 has a survivor beside it, and one on the other host


def known(remote: RemoteLauncher, script: str, text: str) -> dict[str, object]:
    return {**known_of(remote.folder, script, text, 3), "host": "h1"}


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
        check_told(f"{how}.hosts", told, {**facts, "rank": rank})


def test_both_sides_of_a_cut_name_the_other_host(remote: RemoteLauncher) -> None:
    script = remote.script(CUT)
    job = remote.start("-H", HOSTS, "--grace", "60", script, str(remote.folder))
    until = time.monotonic() + PATIENCE_S
    while len(list(remote.folder.glob("ready-*"))) < 3:
        assert time.monotonic() < until, job.said()
        time.sleep(0.01)
    remote.hosts.cut(1)
    while not all((remote.folder / f"cut-{rank}").exists() for rank in range(3)):
        assert time.monotonic() < until, job.said()
        time.sleep(0.01)
    remote.hosts.mend(1)
    job.finish()
    facts = known(remote, script, CUT)
    check_told("cut", told_by(remote.folder, "cut", [0])[0], facts)
    for rank in (1, 2):
        check_told("cut.other-side", told_by(remote.folder, "cut", [rank])[0], {**facts, "rank": rank})
