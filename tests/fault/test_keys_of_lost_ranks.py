"""What groups leave in the job's store when ranks of them end: nothing, once the ranks that are left have gone too."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import pretend_host
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import soon
from torch._C._distributed_c10d import TCPStore

from phalanx.errors import PeerLost
from phalanx.system import exit_order

TIMEOUT = timedelta(seconds=120)


def keep_store(member: Member) -> list[str]:
    """Keep the store in a process that outlives every rank, and say which keys of Phalanx's are left in it."""
    store: Any = TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
    port = member.folder / "port"
    port.with_suffix(".part").write_text(str(store.port))
    port.with_suffix(".part").rename(port)
    member.await_said(*(f"left-{rank}" for rank in range(member.size - 1)))
    # But for what a rank's pretending to be on another host leaves.
    own = ("/pretended/",)
    return sorted(key for key in store.list_keys() if "phalanx" in key and not any(each in key for each in own))


def be_program(*arguments: Any) -> None:
    """Be a rank, and end as a program does: a process of multiprocessing's leaves that out."""
    try:
        be_rank(*arguments)
    finally:
        exit_order._run()


def be_rank(member: Member, size: int, lost: int, way: str, then: str) -> None:
    store = TCPStore("127.0.0.1", int((member.folder / "port").read_text()), None, False, TIMEOUT)
    dist.init_process_group("phalanx", store=store, rank=member.rank, world_size=size, timeout=TIMEOUT)
    groups: list[Any] = [dist.new_group() for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
    if way == "killed with Gloo":
        groups[1].attach()
        groups[1]._gloo.get().allreduce([torch.ones(2)]).wait()  # its address is in the store
    member.say(f"called-{member.rank}")
    member.await_said(*(f"called-{rank}" for rank in range(size)))  # one that is still in the call would raise there
    if member.rank == lost:
        if way == "raises":
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the traceback is expected
            raise RuntimeError("the script fails")
        if "killed" in way:
            os.kill(os.getpid(), signal.SIGKILL)
        return
    if then == "late":
        member.await_said(f"left-{lost}")
    for group in groups:
        with pytest.raises(PeerLost):
            dist.all_reduce(torch.ones(4), group=group)
        if then == "destroy":
            dist.destroy_process_group(group)
    if then == "destroy":
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "lost", "way", "then"),
    [
        ([0, 0, 1], 0, "killed with Gloo", "destroy"),
        ([0, 1, 2], 0, "raises", "late"),
        pytest.param([0, 0, 0], 1, "killed", "destroy", marks=pytest.mark.long),
        pytest.param([0, 1, 1], 1, "ends", "end", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_groups_that_lost_a_rank_leave_no_keys(hosts: list[int], lost: int, way: str, then: str) -> None:
    """The others destroy their groups, or end without that, or only then make a call."""
    size = len(hosts)

    def body(member: Member) -> Any:
        if member.rank == size:
            return keep_store(member)
        assert soon((member.folder / "port").exists)
        pretend_host(hosts[member.rank])
        process = multiprocessing.get_context("fork").Process(target=be_program, args=(member, size, lost, way, then))
        process.start()
        process.join()
        member.say(f"left-{member.rank}")
        return process.exitcode

    *codes, keys = values(run_ranks(body, size + 1))
    ends = {"raises": 1, "ends": 0, "killed": -9, "killed with Gloo": -9}
    assert codes == [ends[way] if rank == lost else 0 for rank in range(size)]
    assert keys == []
