"""What is said when a worker is lost: the same class, facts and words for all who wait for it, however they do."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.rpc import workers
from tests.rpc.workers import Account
from tests.support.ranks import Member, run_ranks

from phalanx import rpc
from phalanx.errors import ObjectLost, PeerLost, WorkerLost

PATIENCE_S = 60.0
WHY = (
    "its process has ended",
    "its process has ended, or its host",
    "the connection was lost: Connection reset by peer",
)
LOST = (
    "worker{rank} (rank {rank}, pid {pid} on {host}) is gone ({why}) while this worker waited for {asked} ({line}), "
    "{s} s ago. Look at that worker's own output for the cause"
)
OBJECT_LOST = (
    "<Account N on worker{rank} (rank {rank}, pid {pid} on {host})> is gone with its worker: {lost}. Make it again"
)


def one_and_no_more() -> Iterator[int]:
    yield 1
    time.sleep(PATIENCE_S)


def waits(to: str) -> dict[str, Callable[[], Any]]:
    """Ways to wait for a worker, by what it is asked."""
    account = rpc.make(to, Account, 1.0)
    items = rpc.call(to, one_and_no_more)
    assert next(items) == 1
    return {
        "sleep": lambda: rpc.call(to, workers.sleep, PATIENCE_S),
        "add_and_sleep": lambda: rpc.start(to, add_and_sleep, 1).then(str).wait(),
        "the next item of a generator": lambda: next(items),
        "Account.sleep_for": lambda: rpc.call(account, sleep_for),
        "to make a make_slowly": lambda: rpc.make(to, make_slowly),
    }


def add_and_sleep(number: int) -> int:
    time.sleep(PATIENCE_S)
    return number


def sleep_for(account: Account) -> None:
    time.sleep(PATIENCE_S)


def make_slowly() -> Account:
    time.sleep(PATIENCE_S)
    return Account(1.0)


@pytest.mark.parametrize("tcp", [False, True])
def test_all_who_wait_for_a_worker_get_the_same_error(tcp: bool, tmp_path: Path) -> None:
    size, last = 3, 2

    def run(member: Member) -> Any:
        workers.begin(member, tcp=tcp)
        if member.rank == last:
            while len(list(tmp_path.iterdir())) < last:
                time.sleep(0.01)
            time.sleep(0.5)  # until all wait
            os.kill(os.getpid(), signal.SIGKILL)
        pid = rpc.call(last, workers.pid)
        found = {}
        ways = waits(f"worker{last}")
        (tmp_path / str(member.rank)).touch()
        with concurrent.futures.ThreadPoolExecutor(len(ways)) as pool:
            for asked, future in [(asked, pool.submit(way)) for asked, way in ways.items()]:
                error = future.exception(PATIENCE_S)
                assert isinstance(error, WorkerLost)
                assert isinstance(error, PeerLost)
                assert 0 < error.elapsed_s < PATIENCE_S
                assert error.why in WHY
                facts = (error.worker, error.rank, error.pid, error.host, error.asked, error.group_rank)
                found[asked] = (type(error), error.incarnation, facts, error.line, error.why, str(error))
        with pytest.raises(WorkerLost, match=f"worker{last}"):  # also who asks later
            rpc.call(f"worker{last}", workers.pid)
        rpc.shutdown()
        return pid, found

    outcomes = run_ranks(run, size)
    incarnations = set()
    for outcome in outcomes[:-1]:
        assert outcome.error is None, outcome.traceback
        pid, found = outcome.value
        for asked, (kind, incarnation, facts, line, why, text) in found.items():
            incarnations.add(incarnation)
            host = socket.gethostname()
            assert facts == (f"worker{last}", last, pid, host, asked, last)
            assert re.fullmatch(rf"{re.escape(__file__)}:\d+", line)
            words = {"rank": last, "pid": pid, "host": host, "why": why, "asked": asked, "line": line, "s": "N"}
            lost = LOST.format(**words)
            assert kind is (ObjectLost if asked.startswith("Account") else WorkerLost)
            expected = OBJECT_LOST.format(lost=lost, **words) if kind is ObjectLost else lost
            assert re.sub(r"\d+\.\d s ago", "N s ago", re.sub("^<Account \\d+", "<Account N", text)) == expected
    assert len(incarnations) == 1
