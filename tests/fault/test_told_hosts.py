"""What every rank and the launcher say when something breaks in a job on two hosts, on our backend and on Gloo."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch_support import wait_for
from tests.support.faults import (
    CUT,
    CUT_OVER_TORCHS,
    ENDS,
    KILLED_WITHIN,
    LATE,
    LEAVES,
    MISTAKES,
    PASSES,
    PASSES_RIGHTLY,
    known_of,
    told_by,
)
from tests.support.golden import (
    await_facts,
    block_of,
    check_facts,
    check_mistakes,
    check_told,
    ending_of,
    warnings_of,
    without_frames,
)
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteJob, RemoteLauncher, hosts, remote

from phalanx.system.processes import state_of

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

HOSTS = "h0:1,h1:2"  # rank 1 has a survivor beside it, and one on the other host


def known(remote: RemoteLauncher, script: str, text: str) -> dict[str, object]:
    return {**known_of(remote.folder, script, text, 3), "host": "h1"}


def has_ended(job: RemoteJob) -> Callable[[], bool]:
    return lambda: job.process.poll() is not None


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
    check_mistakes(remote.folder, facts, 3)
    for told in told_by(remote.folder, "late", [0, 2]):
        check_facts(told, r"which was at wait_for \(script\.py:\d+\)")


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_every_survivor_names_the_rank_that_ended(remote: RemoteLauncher, how: str) -> None:
    script = remote.script(ENDS)
    job = remote.run("-H", HOSTS, "--grace", "60", script, str(remote.folder), "phalanx", how)
    assert job.process.returncode != 0
    facts = known(remote, script, ENDS)
    check_told(f"{how}.hosts.launcher", block_of(job.err), facts)
    signalled = r" by signal 9 \(SIGKILL\)\. Its last operation was all_reduce #1 .*"
    for rank in (0, 2):
        # A rank beside it knows more of one that cannot say it any more.
        ended = rf"has ended({signalled}){'?' if rank == 0 else ''}"
        if how == "raises":
            ended = rf"has failed \(ValueError: no item 12 in data\.bin at script\.py:{facts['line raise']}\)"
        check_facts(
            told_by(remote.folder, how, [rank])[0],
            rf"^phalanx\.errors\.PeerLost: rank 1 of the group \(pid {facts['pid 1']} on h1\) {ended}\. "
            rf"Rank {rank} was in all_reduce\(float32\[4\], sum\) at script\.py:{facts['line call']}\. ",
        )


def test_a_rank_that_was_killed_within_a_call_is_said_with_it(remote: RemoteLauncher) -> None:
    script = remote.script(KILLED_WITHIN)
    job = remote.run("-H", HOSTS, "--grace", "60", script, str(remote.folder), "phalanx")
    assert job.process.returncode != 0
    facts = known(remote, script, KILLED_WITHIN)
    call = rf"t was in all_reduce #2 \(float32, 16\.0 MiB, sum\) at script\.py:{facts['line call']}"
    of_other_host, beside = told_by(remote.folder, "within", [0, 2])
    who = rf"^phalanx\.errors\.PeerLost: rank 1 of the group \(pid {facts['pid 1']} on h1\) has ended"
    check_facts(of_other_host, who, "Rank 0 was in all_reduce")
    check_facts(beside, rf"{who} by signal 9 \(SIGKILL\)\. I{call}\. Rank 2 was in all_reduce")
    check_facts(block_of(job.err), "^phalanx: rank 1 of 3 failed$", ending_of(facts), rf"^  i{call}, for [\d.]+ s$")


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_at_the_timeout_it_is_said_that_a_rank_is_stopped(remote: RemoteLauncher, backend: str) -> None:
    script = remote.script(ENDS)
    job = remote.run("-H", HOSTS, "--grace", "60", script, str(remote.folder), backend, "stopped")
    assert job.process.returncode == 1, job.said()
    facts = known(remote, script, ENDS)
    if backend == "gloo":
        check_facts(
            block_of(job.err),
            r"^  rank 1, which was stopped \(state T\), had not come to all_reduce #2 at "
            rf"script\.py:{facts['line call']}; its last operation was all_reduce #1 ",
        )
        return
    for rank in (0, 2):
        check_facts(
            told_by(remote.folder, "stopped", [rank])[0],
            rf"CollectiveTimeout: rank 1 of the group \(pid {facts['pid 1']} on h1\), which was stopped \(state T\), "
            rf"did not come within 5 s while rank {rank} was in all_reduce.* at script\.py:{facts['line call']}\. ",
            rf"kill -CONT {facts['pid 1']}\)",
        )


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_rank_that_computes_or_is_stopped_is_named_with_its_host(remote: RemoteLauncher, backend: str) -> None:
    script = remote.script(LATE)
    job = remote.start("-H", HOSTS, "-q", "--warn-after", "0.5", script, str(remote.folder), backend)
    lines = known(remote, script, LATE)
    waits = r"; ranks 0, 2 wait for it in all_reduce #{} at script\.py:{}, for [\d.]+ s now"
    at = rf"is at script\.py:({lines['line here']}|{lines['line looks']}) .*, in no operation"
    advice = rf"; look at the `if` in line {lines['line branch']}$"
    computes = rf"^phalanx: rank 1 on h1 {at}{waits.format(2, lines['line call'])}{advice}"
    await_facts(lambda: job.err, has_ended(job), lambda: computes)
    (remote.folder / "go").touch()
    is_stopped = rf"is stopped \(state T\), after all_reduce #2 at script\.py:{lines['line call']}"
    stopped = rf"^phalanx: rank 1 on h1 {is_stopped}{waits.format(3, lines['line last call'])}$"
    await_facts(lambda: job.err, has_ended(job), lambda: stopped)
    (pid,) = [pid for pid in remote.hosts.processes(1) if state_of(pid) == "T"]
    os.kill(pid, signal.SIGCONT)
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


def are_there(remote: RemoteLauncher, job: RemoteJob, name: str) -> None:
    wait_for(
        lambda: len(list(remote.folder.glob(f"{name}-?"))) == 3 or job.process.poll() is not None, complaint=job.said
    )


def test_both_sides_of_a_cut_name_the_other_host(remote: RemoteLauncher) -> None:
    """The launcher reaches both: an agent that loses it ends its ranks, on a busy machine before they say anything."""
    script = remote.script(CUT)
    job = remote.start("-H", HOSTS, "--grace", "60", script, str(remote.folder))
    are_there(remote, job, "ready")
    remote.hosts.part()
    are_there(remote, job, "cut")
    remote.hosts.mend()
    job.finish()
    facts = known(remote, script, CUT)
    lost = [
        rf"PeerLost: Nothing comes from h{away}, for 3 s not even acknowledgements: it is down, or the network between "
        rf"it and h{here} is cut\. On h{away}: {on}\. Rank {rank} was in all_reduce\(float32\[4\], sum\) at "
        rf"script\.py:{facts['line call']}\. Look at the console of h{away} and its links$"
        for rank, here, away in ((0, 0, 1), (1, 1, 0), (2, 1, 0))
        for on in [
            " and ".join(
                rf"rank {peer} of the group \(pid {facts[f'pid {peer}']} on h{away}\)"
                for peer in ((1, 2) if away else (0,))
            )
        ]
    ]
    for rank, expected in enumerate(lost):
        check_facts(told_by(remote.folder, "cut", [rank])[0], rf"^phalanx\.errors\.{expected}")
    block = block_of(job.err)
    failed = re.match(r"phalanx: rank (\d) of 3 failed: ", block)
    assert failed is not None, block
    first = int(failed[1])  # which rank is the first to say it, the moment decides
    check_facts(
        block,
        rf"failed: phalanx\.errors\.{lost[first]}",
        rf"^  host h{int(first > 0)}, pid {facts[f'pid {first}']}, [\d.]+ s after the start, exit code 1$",
        r"^  ranks [\d, -]+ then failed",
    )


# -- over Gloo ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["size", "killed"])
def test_the_launcher_says_of_a_job_over_gloo_what_its_hosts_see(remote: RemoteLauncher, how: str) -> None:
    script = remote.script(ENDS)
    job = remote.run("-H", HOSTS, "--grace", "60", script, str(remote.folder), "gloo", how)
    assert job.process.returncode != 0, job.said()
    facts = known(remote, script, ENDS)
    if how == "killed":
        check_told("killed.gloo.launcher", block_of(job.err), facts)
        return
    at = rf"at script\.py:{facts['line call']}$"
    usual, odd = (rf"all_reduce #2 \(float32, {nbytes} B, sum\) {at}" for nbytes in (16, 32))
    check_facts(block_of(job.err), rf"^    ranks 0, 2: {usual}", rf"^    rank 1: {odd}")


@pytest.mark.parametrize("cut", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_link_that_is_cut_is_said_with_the_host_behind_it(remote: RemoteLauncher, cut: int) -> None:
    """The launcher is on neither host: it names the one that it cannot reach."""
    script = remote.script(CUT_OVER_TORCHS)
    job = remote.start("-H", HOSTS, script, str(remote.folder), "gloo")
    are_there(remote, job, "ready")
    remote.hosts.cut(cut)
    assert job.finish() == 1, job.said()
    remote.hosts.mend(cut)
    pid = known(remote, script, CUT_OVER_TORCHS)[f"pid {cut}"]
    check_facts(
        block_of(job.err),
        rf"^phalanx: rank {cut} of 3 failed: host h{cut} is lost: it has failed, its network has, or Phalanx's process",
        rf"^  host h{cut}, pid {pid}, [\d.]+ s after the start, exit code 1$",
        "^  rank 2 then failed with the same error\n  rank 0 ended" if cut else "^  ranks 1-2 ended by the launcher$",
    )


def own_lines(job: RemoteJob) -> str:
    """What the launcher has said: torch's own warnings have a prefix."""
    return "\n".join(line for line in job.err.splitlines() if not line.startswith("[rank "))


def test_a_mistake_that_gloo_lets_pass_between_hosts_is_said_once(remote: RemoteLauncher) -> None:
    script = remote.script(PASSES)
    job = remote.run("-H", HOSTS, "-q", "--warn-after", "0", script, str(remote.folder), "gloo", "dtype")
    assert job.process.returncode == 0, job.said()
    at = rf" at script\.py:{known(remote, script, PASSES)['line dtype']}$"
    check_facts(
        own_lines(job),
        "^phalanx: warning: the ranks called different operations, and the backend gloo has let that pass",
        rf"^  ranks 0, 2: all_reduce #2 \(float32, 16 B, sum\){at}",
        rf"^  rank 1: all_reduce #2 \(int32, 16 B, sum\){at}",
    )
    assert own_lines(job).count("phalanx: ") == 1, job.said()


def test_a_program_over_gloo_that_is_right_is_not_warned_of(remote: RemoteLauncher) -> None:
    script = remote.script(PASSES_RIGHTLY)
    job = remote.run("-H", HOSTS, "-q", "--warn-after", "0", script, str(remote.folder / "cache"))
    assert (job.process.returncode, re.search("^phalanx: ", job.err, re.MULTILINE)) == (0, None), job.said()


def test_calls_over_gloo_that_differ_are_listed_while_the_ranks_wait(remote: RemoteLauncher) -> None:
    script = remote.script(PASSES)
    job = remote.start("-H", HOSTS, "-q", "--warn-after", "0.5", script, str(remote.folder), "gloo", "kind")
    at = r"at script\.py:\d+"
    usual, odd = r"all_reduce #2 \(float32, 16 B, sum\)", r"broadcast #2 \(float32, 16 B, src=0\)"
    waits = rf"^phalanx: ranks 0-2 wait for each other: .*rank 1 on h1 is in broadcast #2 {at}, .*\n"
    listed = rf"{waits}  the ranks called different operations:\n    ranks 0, 2: {usual} {at}\n    rank 1: {odd} {at}$"
    await_facts(lambda: job.err, has_ended(job), lambda: listed)
    job.process.send_signal(signal.SIGINT)
    job.finish()


# -- equal calls that do not belong together ---------------------------------------------------------------------------


def test_a_rank_or_two_warn_of_both_calls_and_their_numbers(remote: RemoteLauncher) -> None:
    script = remote.script(PASSES)
    job = remote.run("-H", HOSTS, "-q", "--warn-after", "0", script, str(remote.folder), "phalanx", "skipped")
    assert job.process.returncode == 0, job.said()
    told = warnings_of(job.err)
    assert 1 <= len(told) <= 2, job.said()
    facts = known(remote, script, PASSES)
    of_1, of_2 = "of rank 0 and ", "of rank 1 and "
    for warning in told.values():
        check_facts(
            warning,
            "^phalanx: warning: ranks (0 and 1|1 and 2) of a group make the same calls in different orders",
            rf"at script\.py:{facts['line often']} was call #(6 {of_1}#7|7 {of_2}#6) of rank",
            rf"at script\.py:{facts['line always']} was call #(7 {of_1}#6|6 {of_2}#7) of rank",
            "PHALANX_CALL_SITES=error .*--strict.* PHALANX_CALL_SITES=ignore",
        )


def test_with_strict_the_job_fails_with_both_calls_and_no_others(remote: RemoteLauncher) -> None:
    """Within a host an all_reduce over hosts is a reduce, of which the script knows nothing."""
    script = remote.script(PASSES)
    arguments = ("-q", "--strict", "--grace", "60", script, str(remote.folder), "phalanx", "swapped")
    job = remote.run("-H", "h0:2,h1:1", *arguments)
    assert job.process.returncode == 1, job.said()
    facts = known(remote, script, PASSES)
    block = without_frames(block_of(job.err))
    check_facts(
        block,
        r"^phalanx\.errors\.CollectiveMismatch: the ranks of a group called different operations:$",
        rf"^  ranks? 0.*: all_reduce\(float32\[4\], sum\) at script\.py:{facts['line second']}",
        rf"^  rank 1: all_reduce\(float32\[4\], sum\) at script\.py:{facts['line first']}",
        rf"script\.py:{facts['line first']} was call #\d of rank \d and #\d of rank \d",
        rf"script\.py:{facts['line second']} was call #\d of rank \d and #\d of rank \d",
    )
    assert set(re.findall(r"\b[a-z_]+(?=\(float32)", block)) == {"all_reduce"}, block
