"""A worker that can start no more threads, as under a limit on processes: what needs one says so; nothing is left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.rpc.workers import add, next_of, use_tcp
from tests.support.leaks import Holdings
from tests.support.ranks import Member, on_ranks

from phalanx import rpc
from phalanx.errors import BackendError

START = next(name for name in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, name))


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


def tried_until_it_can(begin: Callable[[], Any]) -> int:
    """Begin, the first time without the first thread, and so on; how often it failed, and left nothing."""
    before = Holdings.now()
    for number in itertools.count(1):
        with refused(number) as tries:
            told = ""
            try:
                begin()
            except BackendError as error:
                told = str(error)
        if not told:
            return number - 1
        assert "no more threads" in told
        assert tries() >= number
        assert not before.left_in_time(Holdings.now)
    raise AssertionError


@pytest.mark.parametrize("tcp", [False, pytest.param(True, marks=pytest.mark.long)])
def test_one_that_cannot_become_a_worker_can_later(tcp: bool) -> None:
    """Whichever of its threads is refused, nothing is left of the attempt."""

    def body(member: Member) -> None:
        if tcp:
            use_tcp()
        member.join("gloo" if tcp else "phalanx")
        if member.rank:
            rpc.init()
        else:
            assert tried_until_it_can(rpc.init) >= 2
        assert rpc.call(next_of(member), add, 1, member.rank) == 1 + member.rank
        rpc.shutdown()

    on_ranks(body, 2)
