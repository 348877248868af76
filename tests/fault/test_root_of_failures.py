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


def check(out: str, code: int, ended: int | None, err: str) -> None:
    found = told(out)
    assert sorted(found) == [0, 1, 2], err
    assert [found[rank]["named"] for rank in range(3)] == [3] * 3, found
    for line in found.values():
        assert "rank 3 of the group" in line["text"]
        assert ("left the group" if code == 0 else "has failed (exit code 7)") in line["text"]
        assert "in order" not in line["text"] or code == 0
    assert ended == 7 or not code, err


# The code with which the last rank exits, how the others raise, and in what all but one wait.
MORE = [(0, "plain", "message"), (0, "wrapped", "barrier"), (7, "plain", "message")]


@pytest.mark.parametrize(
    ("code", "how", "waits_in"),
    [
        (0, "plain", "message"),
        (7, "wrapped", "barrier"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in MORE),
    ],
)
def test_on_one_host_all_name_the_rank_that_ended(launcher: Launcher, code: int, how: str, waits_in: str) -> None:
    words = ("-q", "--no-prefix", *GRACE)
    outcome = launcher.run("-n", "4", *words, launcher.script(CHAIN), str(code), how, waits_in)
    check("\n".join(outcome.out_lines), code, outcome.code, outcome.err_text)


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize(
    ("placed", "code", "how", "waits_in"),
    [
        ("h0:3,h1:1", 0, "wrapped", "message"),
        ("h0:2,h1:2", 7, "plain", "barrier"),
        ("h0:1,h1:3", 0, "plain", "barrier"),
        *(
            pytest.param(placed, *each, marks=pytest.mark.long)
            for placed in ("h0:3,h1:1", "h0:2,h1:2", "h0:1,h1:3")
            for each in MORE
        ),
    ],
)
def test_on_two_hosts_all_name_the_rank_that_ended(
    remote: RemoteLauncher, placed: str, code: int, how: str, waits_in: str
) -> None:
    job = remote.run("-H", placed, "-q", "--no-prefix", *GRACE, remote.script(CHAIN), str(code), how, waits_in)
    check(job.out, code, job.process.returncode, job.said())
