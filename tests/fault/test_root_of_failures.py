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


CASES = [
    # where the ranks are, the code with which the last one exits, how the others raise, in what all but one wait
    ("here", 0, "plain", "message"),
    ("here", 7, "wrapped", "barrier"),
    ("h0:3,h1:1", 0, "wrapped", "message"),
    ("h0:2,h1:2", 7, "plain", "barrier"),
    ("h0:1,h1:3", 0, "plain", "barrier"),
    *(
        pytest.param(place, code, how, waits_in, marks=pytest.mark.long)
        for place in ("here", "h0:3,h1:1", "h0:2,h1:2", "h0:1,h1:3")
        for code, how, waits_in in ((0, "plain", "message"), (0, "wrapped", "barrier"), (7, "plain", "message"))
    ),
]


@pytest.mark.parametrize(("place", "code", "how", "waits_in"), CASES)
def test_all_name_the_rank_that_ended(
    request: pytest.FixtureRequest, place: str, code: int, how: str, waits_in: str
) -> None:
    words = ("-q", "--no-prefix", *GRACE), (str(code), how, waits_in)
    if place == "here":
        launcher: Launcher = request.getfixturevalue("launcher")
        outcome = launcher.run("-n", "4", *words[0], launcher.script(CHAIN), *words[1])
        ended, out, err = outcome.code, "\n".join(outcome.out_lines), outcome.err_text
    elif why_no_hosts():
        pytest.skip(why_no_hosts())
    else:
        remote: RemoteLauncher = request.getfixturevalue("remote")
        job = remote.run("-H", place, *words[0], remote.script(CHAIN), *words[1])
        ended, out, err = job.process.returncode, job.out, job.said()
    found = told(out)
    assert sorted(found) == [0, 1, 2], err
    assert [found[rank]["named"] for rank in range(3)] == [3] * 3, found
    for line in found.values():
        assert "rank 3 of the group" in line["text"]
        assert ("left the group" if code == 0 else "has failed (exit code 7)") in line["text"]
        assert "in order" not in line["text"] or code == 0
    if code:
        assert ended == 7, err
