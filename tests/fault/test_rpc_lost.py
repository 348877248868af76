"""What is said when a worker is lost: the same class, facts and words for all who wait for it, however they do."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.rpc import workers
from tests.rpc.workers import Account
from tests.support.ranks import Member, run_ranks

from phalanx import rpc
from phalanx.errors import ObjectLost, WorkerLost

PATIENCE_S = 60.0
LAST = 2
_begun: list[None] = []
WAYS = 5


def wait_for_ever(*_: Any) -> Any:
    _begun.append(None)
    return workers.wait_for_gate()


def wait_too() -> None:
    wait_for_ever()


def one_and_no_more() -> Iterator[int]:
    yield 1
    wait_for_ever()


def waits(to: str) -> dict[str, Callable[[], Any]]:
    """Ways to wait for a worker, by what it is asked."""
    account = rpc.make(to, Account, 1.0)
    items = rpc.call(to, one_and_no_more)
    assert next(items) == 1
    return {
        "wait_too": lambda: rpc.call(to, wait_too),
        "wait_for_ever": lambda: rpc.start(to, wait_for_ever, 1).then(str).wait(),
        "the next item of a generator": lambda: next(items),
        "Account.wait_for_ever": lambda: rpc.call(account, wait_for_ever),
        "to make a wait_for_ever": lambda: rpc.make(to, wait_for_ever),
    }


def errors_of_all() -> dict[str, BaseException | None]:
    ways = waits(f"worker{LAST}")
    with concurrent.futures.ThreadPoolExecutor(len(ways)) as pool:
        futures = {asked: pool.submit(way) for asked, way in ways.items()}
        return {asked: future.exception(PATIENCE_S) for asked, future in futures.items()}


@pytest.mark.parametrize("tcp", [False, True])
def test_all_who_wait_for_a_worker_get_the_same_error(tcp: bool) -> None:
    def run(member: Member) -> None:
        workers.begin(member, tcp=tcp)
        if member.rank == LAST:
            while len(_begun) < 2 * WAYS:  # of both others
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        pid, host = rpc.call(LAST, workers.pid), socket.gethostname()
        found = errors_of_all()
        for asked, error in found.items():
            assert isinstance(error, ObjectLost if asked.startswith("Account") else WorkerLost)
            assert (error.worker, error.rank, error.group_rank, error.pid) == (f"worker{LAST}", LAST, LAST, pid)
            assert (error.host, error.asked) == (host, asked)
            assert 0 < error.elapsed_s < PATIENCE_S
            assert error.why.startswith(("its process has ended", "the connection was lost: Connection reset by peer"))
            assert re.fullmatch(rf"{re.escape(__file__)}:\d+", error.line)
            said = (
                f"worker{LAST} (rank {LAST}, pid {pid} on {host}) is gone ({error.why}) while this worker waited for "
            )
            assert f"{said}{asked} ({error.line}), " in str(error)
            assert ("Make it again" in str(error)) == isinstance(error, ObjectLost)
        with pytest.raises(WorkerLost, match=f"worker{LAST}"):  # also who asks later
            rpc.call(f"worker{LAST}", workers.pid)
        rpc.shutdown()

    for outcome in run_ranks(run, LAST + 1)[:-1]:
        assert outcome.error is None, outcome.traceback
