"""What groups leave in the job's store when ranks of them end: nothing, once the ranks that are left have gone too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import pretend_host
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import soon
from torch._C._distributed_c10d import TCPStore

from phalanx.errors import PeerLost
from phalanx.transports.hosts import asking

TIMEOUT = timedelta(seconds=120)
GROUPS = 3


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


def join(member: Member, hosts: list[int]) -> None:
    size = sum(hosts)
    if len(hosts) > 1:
        pretend_host(host_of(member.rank, hosts))
    port = member.folder / "port"
    assert soon(port.exists)
    store = TCPStore("127.0.0.1", int(port.read_text()), None, False, TIMEOUT)
    dist.init_process_group("phalanx", store=store, rank=member.rank, world_size=size, timeout=TIMEOUT)


def is_lost(group: Any) -> bool:
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except PeerLost:
        return True
    return False


def leave(member: Member) -> None:
    dist.destroy_process_group()
    asking._at_exit()  # as the interpreter's end does, which a rank of a test skips
    member.say(f"left-{member.rank}")


CASES = [([2, 1], [0]), ([2, 1], [1]), ([2, 1], [2]), ([1, 2], [0]), ([1, 2], [2]), ([2, 3], [1]), ([2, 3], [3])]
ONE_HOST = [([3], [1])]


@pytest.mark.parametrize(("hosts", "lost"), CASES + ONE_HOST, ids=str)
def test_groups_that_lost_a_rank_leave_no_keys(hosts: list[int], lost: list[int]) -> None:
    """Those in which the others learn of the loss, and the one that they only leave; and the world."""
    size = sum(hosts)
    others = [rank for rank in range(size) if rank not in lost]

    def body(member: Member) -> Any:
        if member.rank == size:
            return keep_store(member, others)
        join(member, hosts)
        groups: list[Any] = [dist.new_group() for _ in range(GROUPS)]
        for group in groups:
            dist.all_reduce(torch.ones(4), group=group)
            if len(hosts) > 1:
                group.attach()
                group._gloo.get().allreduce([torch.ones(2)]).wait()
        dist.barrier()
        member.say(f"joined-{member.rank}")
        member.await_said(*(f"joined-{rank}" for rank in range(size)))  # one still in the barrier would raise there
        if member.rank in lost:
            os.kill(os.getpid(), signal.SIGKILL)
        found = [is_lost(group) for group in groups[1:]]
        for group in groups:
            dist.destroy_process_group(group)
        leave(member)
        return found

    outcomes = run_ranks(body, size + 1)
    found = {rank: outcomes[rank].value or outcomes[rank].traceback for rank in others}
    assert found == dict.fromkeys(others, [True] * (GROUPS - 1))
    assert outcomes[size].value == []


SCRIPT = """
    import sys, time
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
    Path(sys.argv[8], f"called-{rank}").touch()
    while len(list(Path(sys.argv[8]).glob("called-*"))) < size:  # one that is still in the call would raise there
        time.sleep(0.01)
    if rank == lost and sys.argv[6] == "raises":
        raise RuntimeError("the script fails")
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
        ([2, 1], 2, "raises", "destroy"),
        ([1, 2], 1, "ends", "end"),
        ([1, 2], 1, "ends", "late"),
        ([1, 1, 1], 0, "ends", "late"),
    ],
    ids=str,
)
def test_ranks_whose_script_ends_while_others_wait_leave_no_keys(
    hosts: list[int], lost: int, way: str, then: str
) -> None:
    """It fails, or it is over; and the others destroy their groups, or end without that, or only then make a call."""
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
        expected = (int(way == "raises"), "") if rank == lost else (0, "lost " * 3)
        assert (code, out) == expected, errors
    assert keys == []
