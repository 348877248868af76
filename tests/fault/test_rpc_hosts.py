"""Workers on two hosts: one that is stopped is not lost, and is told of; a host that is cut off is lost in seconds."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rpc import workers
from tests.support.hosts import TestHosts
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import await_stop, soon

from phalanx import rpc
from phalanx.errors import CallTimeout, WorkerLost
from phalanx.rpc import session

LONG_S = 200.0
ENDLESS_S = 1000.0
LARGE = torch.zeros(1 << 23)  # more than the connection holds


def stop_here(folder: Path) -> None:
    """Stop this process until there is a file ``go on``."""
    own = os.getpid()
    if os.fork() == 0:
        await_stop(own)
        (folder / f"stopped-{session.worker().me.rank}").touch()
        soon((folder / "go on").exists, LONG_S)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    os.kill(own, signal.SIGSTOP)


def timeout_of(rank: int, enough: Callable[[CallTimeout], bool]) -> CallTimeout:
    """The first timeout of a call that says enough: a busy machine may be late with what it finds out."""
    until = time.monotonic() + LONG_S
    while True:
        with pytest.raises(CallTimeout) as caught:
            rpc.call(rank, workers.add, 1, 2, timeout_s=0.5)
        if enough(caught.value) or time.monotonic() > until:
            return caught.value


def two_that_are_stopped(member: Member) -> None:
    stopping = [rpc.start(0, stop_here, member.folder, timeout_s=LONG_S)]
    member.await_said("stopped-0")
    since = time.monotonic()
    stopping.append(rpc.start(1, stop_here, member.folder, timeout_s=LONG_S))
    member.await_said("stopped-1")
    told = timeout_of(0, lambda error: error.cause == "silent")
    assert (told.cause, told.at) == ("silent", "")
    assert "though its host answers" in str(told)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        large = pool.submit(rpc.call, 0, torch.numel, LARGE, timeout_s=LONG_S)
        while time.monotonic() - since < 3.0:  # a host that acknowledges nothing is lost after 2 s
            timeout_of(1, lambda error: True)
        member.say("go on")
        assert large.result() == LARGE.numel()
    for stopped in stopping:
        stopped.wait()


def two_that_are_cut_off(member: Member, folder: Path) -> None:
    futures = [rpc.start(rank, time.sleep, ENDLESS_S, timeout_s=ENDLESS_S) for rank in (0, 1)]
    (folder / "cut").touch()
    assert soon((folder / "is cut").exists)
    began = time.monotonic()
    futures.append(rpc.start(1, workers.add, 1, torch.ones(1000), timeout_s=ENDLESS_S))
    lost = []
    for future in futures:
        with pytest.raises(WorkerLost) as caught:
            future.wait()
        lost.append((caught.value.worker, caught.value.host))
    assert lost == [("worker0", "h0"), ("worker1", "h0"), ("worker1", "h0")]
    assert time.monotonic() - began < 20  # about 4 s on a quiet machine


def test_worker_of_another_host_is_told_of_if_stopped_and_lost_if_cut_off(
    workers_hosts: TestHosts | None, tmp_path: Path
) -> None:
    if workers_hosts is None:
        pytest.skip("no hosts can be made here")
    hosts = workers_hosts

    def body(member: Member) -> Any:
        workers.begin(member, tcp=False)
        if member.rank == 2:
            assert [rpc.call(rank, workers.add, rank, 2) for rank in (0, 1)] == [2, 3]
            two_that_are_stopped(member)
            two_that_are_cut_off(member, tmp_path)
            member.say("over")
        member.await_said("over")
        rpc.shutdown(wait=False)

    def cut() -> None:
        if soon((tmp_path / "cut").exists, LONG_S):
            hosts.cut(1)
            (tmp_path / "is cut").touch()

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        values(run_ranks(body, 3, inside=[hosts.inside[0], hosts.inside[0], hosts.inside[1]]))
    finally:
        cutting.join()
        hosts.mend()
