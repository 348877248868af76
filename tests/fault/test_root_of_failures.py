"""A rank that ends while others need it: every survivor names that rank, and not another that has failed for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

__all__ = ["hosts", "launcher", "remote"]  # fixtures

# So long every rank has to learn of it by itself, and to print that; it ignores the request to end.
GRACE = ("--grace", "250")
# The last rank ends, so that only rank 0 learns of it, which waits for a message of it; each of the others waits for
# the rank before itself, in a message or in a collective.
CHAIN = """
    import json, os, signal, sys
    import torch
    import torch.distributed as dist
    import phalanx

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code, wraps, waits_in = int(sys.argv[1]), sys.argv[2] == "wrapped", sys.argv[3]
    world = phalanx.init(timeout_s=600)
    try:
        dist.barrier()
        if world.rank == world.world_size - 1:
            sys.exit(code)
        if world.rank and waits_in == "barrier":
            dist.barrier(group=dist.group.WORLD)
        else:
            dist.recv(torch.ones(8), (world.rank - 1) % world.world_size)
    except phalanx.errors.PeerLost as error:
        told = {"rank": world.rank, "named": error.group_rank, "text": str(error)}
        print("told", json.dumps(told), flush=True)
        if wraps:
            raise RuntimeError("the step failed") from error
        raise
"""


def told(out: str) -> dict[int, Any]:
    lines = [json.loads(line.removeprefix("told ")) for line in out.splitlines() if line.startswith("told ")]
    return {line["rank"]: line for line in lines}


@pytest.mark.parametrize("waits_in", ["message", "barrier"])
@pytest.mark.parametrize("how", ["plain", "wrapped"])
def test_on_one_host_all_name_the_rank_that_left(launcher: Launcher, how: str, waits_in: str) -> None:
    outcome = launcher.run("-n", "4", "-q", "--no-prefix", *GRACE, launcher.script(CHAIN), "0", how, waits_in)
    found = told("\n".join(outcome.out_lines))
    assert sorted(found) == [0, 1, 2], outcome.err_text
    assert [found[rank]["named"] for rank in range(3)] == [3] * 3, found
    assert all("rank 3 of the group" in line["text"] and "left the group" in line["text"] for line in found.values())


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize("placed", ["h0:3,h1:1", "h0:2,h1:2", "h0:1,h1:3"])
@pytest.mark.parametrize(("how", "waits_in"), [("plain", "message"), ("wrapped", "message"), ("plain", "barrier")])
def test_on_two_hosts_all_name_the_rank_that_left(remote: RemoteLauncher, placed: str, how: str, waits_in: str) -> None:
    job = remote.run("-H", placed, "-q", "--no-prefix", *GRACE, remote.script(CHAIN), "0", how, waits_in)
    found = told(job.out)
    assert sorted(found) == [0, 1, 2], job.said()
    assert [found[rank]["named"] for rank in range(3)] == [3] * 3, job.said()
    assert all("rank 3 of the group" in line["text"] and "left the group" in line["text"] for line in found.values())


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize("placed", ["h0:3,h1:1", "h0:2,h1:2"])
@pytest.mark.parametrize("waits_in", ["message", "barrier"])
def test_a_rank_that_exits_with_a_code_has_not_left_in_order(
    remote: RemoteLauncher, placed: str, waits_in: str
) -> None:
    job = remote.run("-H", placed, "-q", "--no-prefix", *GRACE, remote.script(CHAIN), "7", "plain", waits_in)
    assert job.process.returncode == 7, job.said()
    found = told(job.out)
    assert sorted(found) == [0, 1, 2], job.said()
    assert [found[rank]["named"] for rank in range(3)] == [3] * 3, job.said()
    for line in found.values():
        assert "rank 3 of the group" in line["text"]
        assert "has failed (exit code 7)" in line["text"]
        assert "in order" not in line["text"]


def test_on_one_host_an_exit_code_is_named(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "3", "-q", "--no-prefix", *GRACE, launcher.script(CHAIN), "7", "plain", "barrier")
    found = told("\n".join(outcome.out_lines))
    assert outcome.code == 7
    assert sorted(found) == [0, 1], outcome.err_text
    assert [line["named"] for line in found.values()] == [2, 2]
    assert all("has failed (exit code 7)" in line["text"] for line in found.values()), found
