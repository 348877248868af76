"""What groups leave in the job's store when ranks of them end: nothing, once the ranks that are left have gone too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import soon
from torch._C._distributed_c10d import TCPStore

TIMEOUT = timedelta(seconds=120)


def keep_store(member: Member, leaving: Collection[int]) -> list[str]:
    """Keep the store in a process that outlives every rank, and say which keys of Phalanx's are left in it."""
    store: Any = TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
    port = member.folder / "port"
    port.with_suffix(".part").write_text(str(store.port))
    port.with_suffix(".part").rename(port)
    member.await_said(*(f"left-{rank}" for rank in leaving))
    # But for what a rank's pretending to be on another host leaves.
    return sorted(key for key in store.list_keys() if "phalanx" in key and "/pretended/" not in key)


def host_of(rank: int, hosts: list[int]) -> int:
    return next(host for host in range(len(hosts)) if rank < sum(hosts[: host + 1]))


SCRIPT = """
    import os, sys, time
    from pathlib import Path
    from datetime import timedelta
    import torch, torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore
    from tests.support.islands import pretend_host
    from phalanx.errors import PeerLost

    rank, host, size, port, lost = map(int, sys.argv[1:6])
    pretend_host(host)
    store, timeout = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=120)), timedelta(seconds=120)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timeout)
    groups = [dist.new_group() for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
    if sys.argv[6] == "killed with Gloo":
        groups[1].attach()
        groups[1]._gloo.get().allreduce([torch.ones(2)]).wait()  # its address is in the store
    Path(sys.argv[8], f"called-{rank}").touch()
    while len(list(Path(sys.argv[8]).glob("called-*"))) < size:  # one that is still in the call would raise there
        time.sleep(0.01)
    if rank == lost and sys.argv[6] == "raises":
        raise RuntimeError("the script fails")
    elif rank == lost and "killed" in sys.argv[6]:
        os.kill(os.getpid(), 9)
    elif rank != lost:
        if sys.argv[7] == "late":
            time.sleep(3)  # the lost one has come to the end of the interpreter, or is gone
        for group in groups:
            try:
                dist.all_reduce(torch.ones(4), group=group)
            except PeerLost:
                print("lost", end=" ")
            if sys.argv[7] == "destroy":
                dist.destroy_process_group(group)
        if sys.argv[7] == "destroy":
            dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("hosts", "lost", "way", "then"),
    [
        ([3], 1, "killed", "destroy"),
        ([2, 1], 0, "killed with Gloo", "destroy"),
        ([1, 2], 1, "ends", "end"),
        ([1, 1, 1], 0, "raises", "late"),
    ],
    ids=str,
)
def test_groups_that_lost_a_rank_leave_no_keys(hosts: list[int], lost: int, way: str, then: str) -> None:
    """The others destroy their groups, or end without that, or only then make a call."""
    size = sum(hosts)

    def body(member: Member) -> Any:
        if member.rank == size:
            return keep_store(member, range(size))
        port = member.folder / "port"
        assert soon(port.exists)
        place = [member.rank, host_of(member.rank, hosts), size, port.read_text(), lost]
        command = [sys.executable, "-c", dedent(SCRIPT), *map(str, place), way, then, str(member.folder)]
        ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
        member.say(f"left-{member.rank}")
        return ended.returncode, ended.stdout, ended.stderr

    *ranks, keys = values(run_ranks(body, size + 1))
    for rank, (code, out, errors) in enumerate(ranks):
        ends = {"raises": 1, "ends": 0, "killed": -9, "killed with Gloo": -9}
        expected = (ends[way], "") if rank == lost else (0, "lost " * 3)
        assert (code, out) == expected, errors
    assert keys == []
