"""A job that is suspended for longer than a timeout has not waited in vain when it goes on."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
from tests.support.ranks import Member, on_ranks

from phalanx.c10d.operation import Operation
from phalanx.place.place import Place
from phalanx.rendezvous.meet import leave, meet

TIMEOUT_S = 12.0  # for all that is done while nobody is stopped, on a busy machine too
SUSPENDED_S = 13.0


def place(member: Member) -> Place:
    job = f"suspended {member.folder}"
    return Place("slurm", member.rank, 2, member.rank, 2, 0, 1, master_addr="127.0.0.1", job=job)


def test_neither_the_search_for_rank_0_nor_the_wait_for_an_operation_ends() -> None:
    """Rank 1 searches and waits, is stopped for longer than it may do either, and finds both after that."""

    def body(member: Member) -> list[object]:
        pid, resumed = member.folder / "pid", member.folder / "resumed"
        if member.rank == 0:
            while not pid.exists():
                time.sleep(0.01)
            time.sleep(0.3)
            os.kill(int(pid.read_text()), signal.SIGSTOP)
            time.sleep(SUSPENDED_S)
            os.kill(int(pid.read_text()), signal.SIGCONT)
            resumed.touch()
            store = meet(place(member), 30.0, 0)
            store.wait(["read"])
            leave(store)
            return []
        operation = Operation(lambda: None, [torch.ones(1)])
        waited: list[object] = []
        waiting = threading.Thread(target=lambda: waited.append(operation.wait_done(TIMEOUT_S)))
        waiting.start()

        def run_when_resumed() -> None:
            while not resumed.exists():
                time.sleep(0.01)
            operation.run()

        running = threading.Thread(target=run_when_resumed)
        running.start()
        pid.with_suffix(".part").write_text(str(os.getpid()))
        pid.with_suffix(".part").rename(pid)
        store = meet(place(member), TIMEOUT_S, 0)
        store.set("read", "")
        leave(store)
        waiting.join()
        running.join()
        return waited

    assert on_ranks(body, 2) == [[], [True]]
