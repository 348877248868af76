"""What is said of equal calls that do not belong together in a job on two hosts, held against golden texts.

The ranks say it over every transport in the same words: tests/mpi/test_told_mpi.py holds MPI against the same texts.
"""

from __future__ import annotations

import pytest
from tests.support.faults import PASSES, known_of
from tests.support.golden import block_of, check_told, warnings_of, without_frames
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

# Rank 1 differs: it is alone on its host, or beside a rank that it differs from on one host or the other.
PLACES = {"h0:1,h1:1": 2, "h0:1,h1:2": 3, "h0:2,h1:1": 3}
ROWS = ["swapped", "skipped"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("row", ROWS)
def test_a_rank_or_two_warn_of_both_calls_and_their_numbers(remote: RemoteLauncher, row: str, where: str) -> None:
    script = remote.script(PASSES)
    job = remote.run("-H", where, "-q", "--warn-after", "0", script, str(remote.folder), "phalanx", row)
    assert job.process.returncode == 0, job.said()
    told = warnings_of(job.err)
    assert 1 <= len(told) <= 2, job.said()
    for warning in told.values():
        check_told(f"{row}.run.warning", warning, known_of(remote.folder, script, PASSES, PLACES[where]))


@pytest.mark.parametrize("where", [where for where, size in PLACES.items() if size == 3])
@pytest.mark.parametrize("row", ROWS)
def test_with_strict_the_job_fails_with_both_calls_and_no_others(remote: RemoteLauncher, row: str, where: str) -> None:
    """Within a host an all_reduce over hosts is a reduce, of which the script knows nothing."""
    script = remote.script(PASSES)
    arguments = ("-H", where, "-q", "--strict", "--grace", "60", script, str(remote.folder), "phalanx", row)
    job = remote.run(*arguments)
    assert job.process.returncode == 1, job.said()
    block = without_frames(block_of(job.err))
    facts = known_of(remote.folder, script, PASSES, 3)
    first = int(where[3])
    host = "h0" if int(block.removeprefix("phalanx: rank ")[0]) < first else "h1"
    check_told(f"{row}.strict.launcher", block, {**facts, "host": host})
