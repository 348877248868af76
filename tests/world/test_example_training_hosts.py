"""The example on two hosts, with ranks killed on both: its model ends with the same bits as if none had been."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteJob, RemoteLauncher, hosts, remote
from tests.world.test_example_training import DYING, EXAMPLE, SMALL

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = [
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts"),
    pytest.mark.long,
]

PATIENCE_S = 1200  # no busy machine needs as long


def results(job: RemoteJob) -> dict[str, Any]:
    assert job.process.wait(PATIENCE_S) == 0, job.said()
    found: dict[str, Any] = json.loads(job.out.splitlines()[-1])
    return found


# Over Gloo with two ranks only: with more, its sums depend on where in a bucket of DDP a gradient lies, and DDP forms
# its buckets anew in each process after the first step.
@pytest.mark.parametrize(("where", "backend"), [("h0:1,h1:2", "phalanx"), ("h0:1,h1:1", "gloo")])
def test_a_job_whose_ranks_are_killed_ends_as_one_that_was_left_alone(
    remote: RemoteLauncher, where: str, backend: str
) -> None:
    settings = (*SMALL, "--epochs", "2", "--save-every", "3", "--backend", backend)
    threads = {"OMP_NUM_THREADS": "1"}
    whole = results(
        remote.start(
            "-H", where, "-q", "--no-prefix", str(EXAMPLE), *settings, "--checkpoint", "whole.pt", environment=threads
        )
    )
    script = remote.script(DYING, "dying.py")
    arguments = ("-q", "--no-prefix", "--restarts", "3", script, *settings)
    ended = results(remote.start("-H", where, *arguments, environment=threads))
    assert (whole["attempt"], ended["attempt"]) == (0, 3)
    for name in ("parameters_sha256", "accuracy", "loss"):
        assert ended[name] == whole[name]
