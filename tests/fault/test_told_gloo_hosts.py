"""What ``phalanx run`` says of mistakes that Gloo lets pass between hosts: the calls of all hosts are compared."""

from __future__ import annotations

import re
import signal

import pytest
from tests.launch_support import wait_for
from tests.support.faults import CUT_OVER_TORCHS, ENDS, PASSES, PASSES_RIGHTLY, UNUSED, known_of, told_by
from tests.support.golden import await_told, block_of, check_told, without_frames
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteJob, RemoteLauncher, hosts, remote

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

UNEVEN = ["h0:1,h1:2", "h0:2,h1:1"]  # rank 1 differs, and has another rank beside it on one host or the other
THEN_SLEEPS = PASSES + "time.sleep(600)\n"


def said(job: RemoteJob) -> str:
    """What the launcher has said: torch's own warnings have a prefix."""
    return "\n".join(line for line in job.err.splitlines() if not line.startswith("[rank "))


@pytest.mark.parametrize("where", UNEVEN)
@pytest.mark.parametrize("row", ["dtype", "shape", "operation", "swapped", "skipped"])
def test_a_mistake_that_passes_between_hosts_is_said_once(remote: RemoteLauncher, row: str, where: str) -> None:
    script = remote.script(PASSES)
    job = remote.run("-H", where, "-q", "--warn-after", "0", script, str(remote.folder), "gloo", row)
    assert job.process.returncode == 0, job.said()
    facts = {**known_of(remote.folder, script, PASSES, 3), "warning": "warning: "}
    check_told(f"{row}.gloo", said(job), facts)


@pytest.mark.parametrize("where", ["h0:1,h1:1", "h0:2,h1:2"])
def test_swapped_calls_are_said_while_the_job_goes_on(remote: RemoteLauncher, where: str) -> None:
    """The only one that differs is rank 1, which is alone on its host, or beside one that it differs from."""
    script = remote.script(THEN_SLEEPS)
    job = remote.start("-H", where, "-q", script, str(remote.folder), "gloo", "swapped")
    size = 2 if where == "h0:1,h1:1" else 4
    facts = lambda: {**known_of(remote.folder, script, THEN_SLEEPS, size), "warning": "warning: "}  # noqa: E731
    await_told("swapped.gloo", lambda: job.err, facts, lambda: job.process.poll() is not None)
    job.process.send_signal(signal.SIGINT)
    job.finish()


@pytest.mark.parametrize(("row", "where"), [("dtype", "h0:2,h1:1"), ("shape", "h0:1,h1:2"), ("swapped", "h0:1,h1:2")])
def test_strict_ends_the_job_on_all_hosts_with_the_mistake(remote: RemoteLauncher, row: str, where: str) -> None:
    script = remote.script(THEN_SLEEPS)
    arguments = ("-q", "--strict", "--restarts", "1", script, str(remote.folder), "gloo", row)
    job = remote.run("-H", where, *arguments)
    assert job.process.returncode == 1, job.said()
    facts = {**known_of(remote.folder, script, THEN_SLEEPS, 3), "warning": ""}
    check_told(f"{row}.gloo", said(job), facts)


@pytest.mark.parametrize("row", ["root", "kind", "batches"])
def test_calls_that_differ_between_hosts_are_listed_while_the_ranks_wait(remote: RemoteLauncher, row: str) -> None:
    script = remote.script(PASSES)
    job = remote.start("-H", UNEVEN[0], "-q", "--warn-after", "0.5", script, str(remote.folder), "gloo", row)
    await_told(
        f"waits-{row}.gloo.hosts",
        lambda: job.err,
        lambda: known_of(remote.folder, script, PASSES, 3),
        lambda: job.process.poll() is not None,
    )
    job.process.send_signal(signal.SIGINT)
    job.finish()


@pytest.mark.parametrize(
    ("how", "where"),
    [("size", "h0:2,h1:1"), ("killed", "h0:1,h1:2"), ("raises", "h0:1,h1:2"), ("raises", "h0:2,h1:1")],
)
def test_the_block_of_a_failure_says_how_the_calls_of_hosts_differed(
    remote: RemoteLauncher, how: str, where: str
) -> None:
    script = remote.script(ENDS)
    job = remote.run("-H", where, "--grace", "60", script, str(remote.folder), "gloo", how)
    assert job.process.returncode != 0, job.said()
    block = block_of(job.err)
    failed = re.match(r"phalanx: rank (\d)", block)
    assert failed is not None
    first = int(where.partition(",")[0].partition(":")[2])
    host = "h0" if int(failed[1]) < first else "h1"
    check_told(f"{how}.gloo.launcher", block, {**known_of(remote.folder, script, ENDS, 3), "host": host})


@pytest.mark.parametrize(("how", "state"), [("absent", ""), ("stopped", ", which was stopped (state T),")])
@pytest.mark.parametrize("where", UNEVEN)
def test_the_block_of_a_failure_names_the_rank_of_another_host_that_had_not_come(
    remote: RemoteLauncher, where: str, how: str, state: str
) -> None:
    script = remote.script(ENDS)
    job = remote.run("-H", where, script, str(remote.folder), "gloo", how)
    assert job.process.returncode == 1, job.said()
    lines = known_of(remote.folder, script, ENDS, 3)
    expected = (
        f"  rank 1{state} had not come to all_reduce #2 at script.py:{lines['line call']}; its last operation was "
        f"all_reduce #1 (float32, 16 B, sum) at script.py:{lines['line before']}"
    )
    assert expected in block_of(job.err).splitlines(), job.said()


@pytest.mark.parametrize("cut", [1, 0])
def test_a_link_that_is_cut_is_said_with_the_host_behind_it(remote: RemoteLauncher, cut: int) -> None:
    """The launcher is on neither host: it names the one that it cannot reach."""
    script = remote.script(CUT_OVER_TORCHS)
    job = remote.start("-H", "h0:1,h1:2", script, str(remote.folder), "gloo")
    wait_for(
        lambda: len(list(remote.folder.glob("ready-*"))) == 3 or job.process.poll() is not None, complaint=job.said
    )
    remote.hosts.cut(cut)
    assert job.finish() == 1, job.said()
    remote.hosts.mend(cut)
    facts = {**known_of(remote.folder, script, CUT_OVER_TORCHS, 3), "host": f"h{cut}"}
    check_told(f"cut.gloo.launcher.h{cut}", block_of(job.err), facts)


@pytest.mark.parametrize("where", UNEVEN)
def test_parameters_that_a_rank_leaves_unused_are_named(remote: RemoteLauncher, where: str) -> None:
    script = remote.script(UNUSED)
    job = remote.run("-H", where, "--grace", "60", script, str(remote.folder), "gloo")
    assert job.process.returncode == 1, job.said()
    facts = {**known_of(remote.folder, script, UNUSED, 3), "host": "h1" if where == UNEVEN[0] else "h0"}
    check_told("unused.rank-1", told_by(remote.folder, "unused", [1])[0], facts)
    check_told("unused.gloo.launcher", without_frames(block_of(job.err)), facts)


@pytest.mark.parametrize("where", UNEVEN)
def test_a_program_that_is_right_is_not_warned_of_between_hosts(remote: RemoteLauncher, where: str) -> None:
    script = remote.script(PASSES_RIGHTLY)
    job = remote.run("-H", where, "-q", "--warn-after", "0", script, str(remote.folder / "cache"))
    assert (job.process.returncode, re.search("^phalanx: ", job.err, re.MULTILINE)) == (0, None), job.said()


def test_nothing_is_said_of_lines_between_hosts_if_the_user_wants_that(remote: RemoteLauncher) -> None:
    script = remote.script(PASSES)
    arguments = ("-H", UNEVEN[0], "-q", "--warn-after", "0", script, str(remote.folder), "gloo", "swapped")
    job = remote.run(*arguments, environment={"PHALANX_CALL_SITES": "ignore"})
    assert (job.process.returncode, said(job)) == (0, ""), job.said()
