"""A worker that can start no more threads, as under a limit on processes: what needs one says so; nothing is left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from tests.rpc.torch_workers import started
from tests.rpc.workers import add, next_of, sleep, use_tcp, with_workers
from tests.support.leaks import Holdings
from tests.support.ranks import Member, on_ranks

from phalanx import rpc
from phalanx.errors import BackendError, CallTimeout
from phalanx.rpc import session, watching

START = next(name for name in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, name))
TOLD = r"no more threads .*ulimit -u"


@contextmanager
def refused(number: int) -> Iterator[Callable[[], int]]:
    """The ``number``-th thread that this thread starts is refused, and those after it; how many it has tried."""
    start: Any = getattr(threading, START)
    own, tries = threading.get_ident(), 0

    def start_or_refuse(*arguments: Any, **options: Any) -> Any:
        nonlocal tries
        if threading.get_ident() == own:
            tries += 1
            if tries >= number:
                raise RuntimeError("can't start new thread")
        return start(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, START, start_or_refuse)
        yield lambda: tries


@pytest.mark.parametrize("tcp", [False, True], ids=["shared memory", "tcp"])
def test_one_that_cannot_become_a_worker_can_later(tcp: bool) -> None:
    """Whichever of its threads is refused, nothing is left of the attempt."""
    size = 2

    def body(member: Member) -> tuple[int, Any]:
        if tcp:
            use_tcp()
        member.join("gloo" if tcp else "phalanx")
        failed, before = 0, Holdings.now()
        for number in itertools.count(1):
            if member.rank:
                rpc.init()
                break
            with refused(number) as tries:
                told = ""
                try:
                    rpc.init()
                except BackendError as error:
                    told = str(error)
            if not told:
                break
            assert "no more threads" in told
            assert tries() >= number
            failed += 1
            assert not before.left_in_time(Holdings.now)
        value = rpc.call(next_of(member), add, 1, member.rank)
        rpc.shutdown()
        dist.destroy_process_group()
        return failed, value

    got = on_ranks(body, size)
    assert [value for _, value in got] == [1 + rank for rank in range(size)]
    assert got[0][0] >= 2


def test_a_call_that_cannot_be_watched_is_not_made() -> None:
    """Calls that are made when there are threads again end in time."""

    def body(member: Member) -> int:
        with refused(1), pytest.raises(BackendError, match=TOLD):
            rpc.call(next_of(member), add, 1, 1, timeout_s=0.2)  # due before the next one
        with pytest.raises(CallTimeout):
            rpc.call(next_of(member), sleep, 2.0, timeout_s=0.5)
        return int(rpc.call(next_of(member), add, member.rank, 1))

    assert with_workers(body, 2) == [1, 2]


def test_a_watch_that_cannot_begin_leaves_nothing() -> None:
    size = 2

    def watched() -> tuple[int, int]:
        agent = session.agent()
        return len(watching._watches.get(agent, ())), len(agent._departures._watchers)

    def body(member: Member) -> list[str]:
        seen: list[str] = []
        came = threading.Event()

        def note(worker: rpc.Member, event: str) -> None:
            seen.append(worker.name)
            if len(seen) == size - 1:
                came.set()

        kept = watched()
        with refused(1), pytest.raises(BackendError, match=TOLD):
            rpc.watch(note)
        assert watched() == kept
        watch = rpc.watch(note)
        assert came.wait(60.0)
        watch.stop()
        return sorted(seen)

    for rank, seen in enumerate(with_workers(body, size)):
        assert seen == [f"worker{other}" for other in range(size) if other != rank]


def test_nothing_is_left_of_a_failed_init_rpc_of_torchs() -> None:
    """Whichever thread is refused."""

    def body(member: Member) -> int:
        failed, before = 0, Holdings.now()
        for number in itertools.count(1):
            with refused(number):
                told = ""
                try:
                    torch_rpc = started(member)
                except BackendError as error:
                    told = str(error)
            if not told:
                break
            assert "no more threads" in told
            failed += 1
            assert not before.left_in_time(Holdings.now)
        torch_rpc.shutdown()
        return failed

    (failed,) = on_ranks(body, 1)
    assert failed > 5
