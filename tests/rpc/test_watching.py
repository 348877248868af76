"""Who the workers are, and who comes and goes."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore

from phalanx import rpc
from phalanx.errors import ArgumentError, WorkerLost
from phalanx.rpc import session
from phalanx.system.interfaces import LOOPBACK
from tests.rpc import workers
from tests.support.ranks import Member, on_ranks, run_ranks, values
from tests.support.waiting import soon

PATIENCE_S = 60.0


class Log:
    """What a watch has said."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def __call__(self, member: rpc.Member, event: str) -> None:
        self.events.append((member.name, event))

    def wait_for(self, *events: tuple[str, str]) -> None:
        assert soon(lambda: set(events) <= set(self.events)), self.events


def test_watch_tells_once_who_comes_leaves_and_dies() -> None:
    """The dead one although nobody has called it."""

    def body(member: Member) -> Any:
        workers.begin(member)
        if member.rank == 1:
            time.sleep(2 * PATIENCE_S)
        if member.rank == 2:
            member.await_said("leave")  # not by a call, which it may leave unanswered
            rpc.shutdown(wait=False)
            return
        log, of_one, stopped = Log(), Log(), Log()
        with pytest.raises(ArgumentError, match="takes callback: Callable"):
            rpc.watch("worker0")  # type: ignore[arg-type]
        rpc.watch(log)
        rpc.watch(of_one, "worker1")
        watch = rpc.watch(stopped)
        log.wait_for(("worker1", "came"), ("worker2", "came"))
        stopped.wait_for(("worker1", "came"), ("worker2", "came"))
        watch.stop()
        watch.stop()
        member.say("leave")
        log.wait_for(("worker2", "left"))
        os.kill(session.worker().directory.find("worker1").pid, signal.SIGKILL)
        log.wait_for(("worker1", "lost"))
        of_one.wait_for(("worker1", "lost"))
        with pytest.raises(WorkerLost):
            rpc.call("worker1", workers.pid)
        time.sleep(0.3)  # nothing is told twice
        rpc.shutdown(wait=False)
        assert of_one.events == [("worker1", "came"), ("worker1", "lost")]
        assert [event for event in log.events if event[0] == "worker1"] == of_one.events
        assert [event for event in log.events if event[0] == "worker2"] == [("worker2", "came"), ("worker2", "left")]
        assert sorted(stopped.events) == [("worker1", "came"), ("worker2", "came")]

    first, _, third = run_ranks(body, 3)
    values([first, third])


def test_workers_are_listed_with_those_that_are_no_rank_until_they_leave() -> None:
    size, last = 3, 2

    def body(member: Member) -> None:
        store = PrefixStore("listed", member.store("workers"))
        names = [("worker0", 0), ("worker1", 1), ("server", -1)]
        session.begin(store, *names[member.rank], LOOPBACK, 60.0)
        (member.folder / f"pid-{member.rank}").write_text(str(os.getpid()))
        member.meet("begun")
        pids = [(member.folder / f"pid-{rank}").read_text() for rank in range(size)]
        listed = [(*name, pid) for name, pid in zip(names, pids, strict=True)]
        assert [(one.name, one.rank, str(one.pid)) for one in rpc.workers()] == listed
        title, columns, *lines = rpc.describe().splitlines()
        assert (title, columns.split()) == ("3 workers", ["worker", "rank", "host", "pid", "address"])
        for number, (line, (name, rank, pid)) in enumerate(zip(lines, listed, strict=True)):
            assert ("(this one)" in line) == (number == member.rank)
            cells = line.replace(" (this one)", "").split()
            assert cells[:4] == [name, str(rank) if rank >= 0 else "none", socket.gethostname(), pid]
            assert cells[4].startswith(f"{LOOPBACK}:")
        member.meet("seen")
        if member.rank == last:
            rpc.shutdown()
        member.meet("left")
        assert member.rank == last or [one.name for one in rpc.workers()] == ["worker0", "worker1"]
        member.meet("over")
        rpc.shutdown(wait=False)

    on_ranks(body, size)
